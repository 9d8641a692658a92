"""The embedded model is small enough to ship."""

from __future__ import annotations

from tfexport.commands.demo import embedded_checkpoint


def test_embedded_checkpoint_is_small_enough_to_ship() -> None:
    assert embedded_checkpoint().stat().st_size <= 8_000_000
