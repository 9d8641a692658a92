"""Faults of generation_config.json that the search finds name the file; those of the user do not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fakes import tiny_config
from tfexport.decoding.generation_config import options_with_defaults
from tfexport.errors import TfexportError

HF = {"profile": "hf"}


def unknown(tokens: str) -> tuple[int, ...]:
    raise TfexportError(f"the vocabulary has no {tokens!r}")


def options(given: dict[str, Any], content: dict[str, Any]) -> Any:
    return options_with_defaults({**HF, **given}, content, tiny_config(), unknown)[0]


FILE = "generation_config.json of this bundle"


@pytest.mark.parametrize(
    ("given", "content", "problem", "named"),
    [
        ({}, {"num_beams": 0}, "beam is 0, not between", f"{FILE} gives beam 0, max_length"),
        (
            {"nbest": 3},
            {"num_beams": 2},
            "nbest 3 needs a beam of at least 3, and beam is 2",
            f"{FILE} gives beam 2, max_length",
        ),
        (
            {},
            {"sequence_bias": {"w1 w2": 1.0}},
            "not a list of [ids, number]",
            f"{FILE} has sequence_bias {{'w1 w2': 1.0}}",
        ),
        (
            {},
            {"sequence_bias": [["w1", 1.0]]},
            "not a list of [ids, number]",
            f"{FILE} has sequence_bias [['w1', 1.0]]",
        ),
        ({}, {"bad_words_ids": [["a", "b"]]}, "bad_words is", FILE),
    ],
)
def test_a_fault_of_the_file_names_it(given: dict[str, Any], content: dict[str, Any], problem: str, named: str) -> None:
    with pytest.raises(TfexportError) as error:
        options(given, content)
    assert problem in str(error.value)
    assert named in str(error.value)


@pytest.mark.parametrize("given", [{"beam": 0}, {"nbest": 3, "beam": 2}, {"sequence_bias": {"w1 w2": 1.0}}])
def test_a_fault_of_the_user_does_not(given: dict[str, Any]) -> None:
    with pytest.raises(TfexportError) as error:
        options(given, {"num_beams": 4})
    assert "generation_config" not in str(error.value)


def test_what_the_user_gives_comes_before_a_faulty_setting() -> None:
    assert options({"beam": 3}, {"num_beams": 0}).beam == 3
    bias = options({"sequence_bias": [[[4], 1.0]]}, {"sequence_bias": {"w1": 1.0}}).sequence_bias
    assert bias == (((4,), 1.0),)
