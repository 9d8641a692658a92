"""Facts of a model that its user writes down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfexport.errors import ConfigError
from tfexport.models.checkpoints.load import read_hints


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read the configuration"),
        ("[" * 100_000, "cannot read the configuration"),
        ("[1]", "Give a JSON object"),
        ('{"heads": 8}', "heads"),
    ],
)
def test_hints_that_are_none_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "hints.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_hints(tmp_path / "hints.json")


def test_hints_are_read(tmp_path: Path) -> None:
    (tmp_path / "hints.json").write_text('{"n_heads": 3, "activation": "gelu"}')
    assert read_hints(tmp_path / "hints.json") == {"n_heads": 3, "activation": "gelu"}


def test_an_unknown_field_names_its_likes(tmp_path: Path) -> None:
    (tmp_path / "hints.json").write_text('{"heads": 8}')
    with pytest.raises(ConfigError, match=r"unknown field heads.*n_heads"):
        read_hints(tmp_path / "hints.json")
