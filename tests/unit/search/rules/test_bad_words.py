"""Sequences of tokens that never come, in the rule and in searches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.support.fakes import ScriptedRuntime, random_model, tiny_config
from tfexport.errors import TfexportError
from tfexport.search.rules.bad_words import BadWords
from tfexport.search.search import SearchOptions, search

HISTORY = np.array([[1, 5, 6], [1, 6, 5]])


@pytest.mark.parametrize(
    ("words", "banned"),
    [
        (((6, 7),), [{7}, set()]),
        (((4,), (5, 6, 3)), [{4, 3}, {4}]),
        (((1, 5, 6, 0), (1, 1, 5, 6, 2)), [{0}, set()]),  # the second is longer than what came
    ],
)
def test_the_last_token_of_a_sequence_is_banned_after_the_others(words: Any, banned: list[set[int]]) -> None:
    allowed = np.ones((2, 8), dtype=bool)
    BadWords(bad_words=words).ban(allowed, HISTORY)
    assert [{*np.flatnonzero(~row)} for row in allowed] == banned


@pytest.mark.parametrize("options", [{}, {"beam": 3, "nbest": 3}, {"samples": 2}, {"alternatives": 2}], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_no_output_of_a_search_has_one(options: dict[str, Any], seed: int) -> None:
    def outputs(**more: Any) -> list[tuple[int, ...]]:
        runtime = ScriptedRuntime(random_model(seed, 7), tiny_config(tgt_vocab_size=7))
        found = search(runtime, [(5, 6, 2), (7, 2)], SearchOptions(max_length=9, **options, **more))
        return [hypothesis.ids for one in found for hypothesis in one]

    pairs = {pair for ids in outputs() for pair in pairwise(ids) if pair[1] != 2}
    banned = tuple(sorted(pairs)[: len(pairs) // 2 + 1])
    assert not {pair for ids in outputs(bad_words=banned) for pair in pairwise(ids)} & {*banned}


def test_wrong_sequences_are_told() -> None:
    config = tiny_config(tgt_vocab_size=7)
    for words, message in (
        ([[5], []], "empty sequence"),
        ([[5, 7]], "7 is an id that an option names"),
        ([[2]], "end"),
    ):
        with pytest.raises(TfexportError, match=message):
            search(ScriptedRuntime(random_model(0, 7), config), [(5, 2)], SearchOptions.of({"bad_words": words}))


def test_words_are_given_as_text_too() -> None:
    given = {"bad_words": ["a b", (3, 4)], "sequence_bias": {"a": -1, (3, 4): 2.5}}
    options = SearchOptions.of(given, lambda text: tuple(ord(token) for token in text.split()))
    assert options.bad_words == ((97, 98), (3, 4))
    assert options.sequence_bias == (((97,), -1.0), ((3, 4), 2.5))
    assert SearchOptions.of({"bad_words": "a b"}, lambda text: (7,)).bad_words == ((7,),)
    with pytest.raises(TfexportError, match="bad_words is 'a b', and there is no vocabulary"):
        SearchOptions.of({"bad_words": ["a b"]})
