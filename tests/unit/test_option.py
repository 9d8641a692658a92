"""Options declared once: bounds, types, texts and what follows from them."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tfexport.bench.options import BenchOptions
from tfexport.errors import TfexportError
from tfexport.exporter.options import EngineOptions
from tfexport.models.checkpoints.options import ExportedCheckpointOptions
from tfexport.option import Options, checked, declared, numbers, option, rows, with_keywords
from tfexport.search.options import SearchOptions
from tfexport.verification.options import CompareOptions


@dataclass(frozen=True, kw_only=True)
class Group(Options):
    beam: int = option(1, minimum=1, help="Beam width.")
    penalty: float = option(0.6, minimum=-10, maximum=10, help="A penalty.")
    ratio: float | None = option(None, above=0, finite=False, help="A ratio.")
    share: float = option(1.0, above=0, maximum=1, help="A share.")
    weight: float = option(0.0, minimum=0, help="A weight.")
    mode: Literal["false", "true", "never"] = option("false", help="A mode.")
    scores: bool = option(True, flag="", help="Scores.")
    suppress: tuple[int, ...] = option((), tokens=True, help="Tokens.")
    widths: tuple[int, ...] = option((1,), flag="--width", parse=numbers, help="Widths.")
    file: Path | None = option(None, help="A file.")

    def conflicts(self) -> list[str]:
        return ["beam 3 has no weight"] if self.beam == 3 and self.weight else []


@dataclass(frozen=True, kw_only=True)
class Wider(Group):
    seed: int = option(0, minimum=0, help="A seed.")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"beam": 0}, "beam is 0, below 1"),
        ({"penalty": 10.5}, "penalty is 10.5, not between -10 and 10"),
        ({"penalty": math.nan}, "penalty is nan, not between -10 and 10"),
        ({"ratio": 0.0}, "ratio is 0.0, not above 0"),
        ({"share": 1.5}, "share is 1.5, not above 0 and at most 1"),
        ({"weight": math.inf}, "weight is inf, not a number"),
        ({"weight": -1.0}, "weight is -1.0, below 0"),
        ({"beam": 3, "weight": 1.0}, "beam 3 has no weight"),
    ],
)
def test_what_is_out_of_range_or_in_conflict_is_named(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(TfexportError) as error:
        Group(**given)
    assert str(error.value) == f"these options cannot be used: {problem}. Change them."


def test_several_problems_are_named_together() -> None:
    with pytest.raises(TfexportError, match=r"beam is 0, below 1; share is 2, not above 0"):
        Group(beam=0, share=2)
    assert Group(ratio=math.inf, share=1, penalty=-10).ratio == math.inf


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"beam": np.int64(4)}, {"beam": 4}),
        ({"penalty": 1}, {"penalty": 1.0}),
        ({"ratio": None}, {"ratio": None}),
        ({"mode": True}, {"mode": "true"}),
        ({"suppress": [4, 5]}, {"suppress": (4, 5)}),
        ({"suppress": "ein Hund"}, {"suppress": "ein Hund"}),
        ({"widths": "1,4"}, {"widths": (1, 4)}),
        ({"widths": 4}, {"widths": (4,)}),
        ({"widths": ["1", "4"]}, {"widths": (1, 4)}),
        ({"file": "x.txt"}, {"file": Path("x.txt")}),
    ],
)
def test_values_are_taken_in_the_forms_people_write(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert checked(Group, given) == wanted
    ((name, value),) = checked(Group, given).items()
    assert type(value) is type(wanted[name])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beam": "4"}, "beam is '4'. Give a whole number."),
        ({"beam": True}, "beam is True. Give a whole number."),
        ({"beam": 1.5}, "beam is 1.5. Give a whole number."),
        ({"penalty": "0.6"}, "penalty is '0.6'. Give a number."),
        ({"mode": "nevr"}, "mode is 'nevr'. Give one of false, true, never."),
        ({"scores": 1}, "scores is 1. Give True or False."),
        ({"suppress": [1.5]}, "suppress is [1.5]. Give a list of whole numbers or tokens separated by spaces."),
        ({"file": 3}, "file is 3. Give a path."),
        ({"widths": "1,x"}, "widths is '1,x', not numbers above 0. Give them as in 1,8."),
        ({"widths": ["x"]}, "widths is 'x', not numbers above 0. Give them as in 1,8."),
        ({"widths": [1, "x"]}, "widths is [1, 'x']. Give a list of whole numbers."),
        ({"beam_size": 4}, "there is no option 'beam_size'. Did you mean 'beam'?"),
        ({"precison": 4}, "there is no option 'precison'. Did you mean 'precision'?"),
    ],
)
def test_wrong_values_and_names_say_what_to_give(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TfexportError) as error:
        checked(Group, given, others=["precision"])
    assert str(error.value) == message


def test_the_command_line_names_an_option_by_its_flag() -> None:
    for given, message in (({"widths": "1,x"}, "--width is '1,x'"), ({"suppress": [1.5]}, "--suppress is [1.5]")):
        with pytest.raises(TfexportError) as error:
            checked(Group, given, as_flags=True)
        assert str(error.value).startswith(message)


def test_groups_inherit_options_and_their_checks() -> None:
    assert list(declared(Wider)) == [*declared(Group), "seed"]
    assert declared(Wider)["widths"].flag == "--width"
    with pytest.raises(TfexportError, match="seed is -1, below 0"):
        Wider(seed=-1)
    with pytest.raises(TfexportError, match="beam 3 has no weight"):
        Wider(beam=3, weight=1.0)


def test_tables_and_signatures_follow_from_the_declaration() -> None:
    table = {name: rest for name, *rest in rows(Group)}
    assert table["beam"] == ["--beam", "a whole number", "1", "Beam width."]
    assert table["scores"][0] == ""

    @with_keywords(Group)
    def search(text: str, *, workers: int = 1, **options: Any) -> None: ...

    parameters = inspect.signature(search).parameters
    assert list(parameters) == ["text", "workers", *declared(Group)]
    assert parameters["penalty"].default == 0.6


GROUPS = (SearchOptions, CompareOptions, BenchOptions, ExportedCheckpointOptions, EngineOptions)


@pytest.mark.parametrize("group", GROUPS)
def test_text_that_is_no_value_is_told_of_the_option_or_its_flag(group: type) -> None:
    parsed = {name: found for name, found in declared(group).items() if found.about.parse is not None}
    assert parsed
    for name, found in parsed.items():
        for as_flags, called in ((False, name), (True, found.flag)):
            with pytest.raises(TfexportError) as error:
                checked(group, {name: " ,x"}, as_flags=as_flags)
            assert str(error.value).startswith(f"{called} is ")


@dataclass(frozen=True, kw_only=True)
class Sequences(Options):
    words: tuple[tuple[int, ...], ...] = option((), tokens=True, repeated=True, help="Lists.", also=("bad_words_ids",))
    biases: tuple[tuple[tuple[int, ...], float], ...] = option((), tokens=True, repeated=True, help="Pairs.")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"words": [[4, 5], 6]}, ((4, 5), (6,))),
        ({"words": ["a b", [6]]}, ("a b", (6,))),
        ({"words": "a b"}, ("a b",)),
        ({"biases": [[[4, 5], 2]]}, (((4, 5), 2.0),)),
        ({"biases": {(4, 5): -0.5, "a b": 1}}, (((4, 5), -0.5), ("a b", 1.0))),
    ],
)
def test_lists_of_lists_become_tuples(given: dict[str, Any], wanted: Any) -> None:
    assert [*checked(Sequences, given).values()] == [wanted]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"words": [[4.5]]},
            "words is [[4.5]]. Give a list of lists of whole numbers or tokens separated by spaces for",
        ),
        ({"biases": [[4, 5]]}, ""),
        (
            {"biases": [[[4], "x"]]},
            "Give a list of pairs of tokens and a number: the tokens are ids, as in [4, 5], or text",
        ),
        ({"biases": [[[4]]]}, "Give a list of pairs"),
        ({"bad_words_ids": [[4]]}, "there is no option 'bad_words_ids'. Did you mean 'words'?"),
    ],
)
def test_what_is_no_list_of_lists_is_told(given: dict[str, Any], message: str) -> None:
    if not message:
        assert checked(Sequences, given) == {"biases": (((4,), 5.0),)}  # one id alone is a list of it
        return
    with pytest.raises(TfexportError) as error:
        checked(Sequences, given)
    assert message in str(error.value)
