"""Settings in YAML: what would take PyYAML long is refused."""

from __future__ import annotations

import pytest

from tfexport.errors import CheckpointError
from tfexport.system.yaml_files import LARGEST_SETTINGS, read_settings


def test_settings_are_values_of_core_types() -> None:
    assert read_settings("a: 1\nb: [2.5, c]\nd: 1:30\n", "here") == {"a": 1, "b": [2.5, "c"], "d": 90}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1" + ":1" * 50_000, "a number of 100001 characters"),
        ("a: 1" + ":1" * 50_000 + ".5", "a number of 100003 characters"),
        ("a: 0b" + "1" * 50_000, "a number of 50002 characters"),
        ("a: &x 1\nb: *x", "aliases"),
        ("- a", "not a mapping"),
        ("a: " + "[" * 10_000, "recursion"),
    ],
)
def test_what_takes_long_or_makes_large_values_is_refused(text: str, problem: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_settings(text, "here")
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_file_that_is_far_larger_than_settings_is_refused() -> None:
    with pytest.raises(CheckpointError, match="here has 262,146 characters, more than settings have"):
        read_settings("a:" + " " * LARGEST_SETTINGS, "here")
