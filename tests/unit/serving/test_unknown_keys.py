"""Refusals of unknown keys keep nothing of the requests."""

from __future__ import annotations

from tfexport.serving.limits import unknown_key


def test_each_refusal_is_an_error_of_its_own() -> None:
    assert unknown_key() is not unknown_key()
