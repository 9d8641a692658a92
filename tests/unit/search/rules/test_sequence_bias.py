"""Biases of sequences: the numbers of Transformers' processor, its conflicts, and what a search may not cut short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.fakes import Ids, ScriptedRuntime, tiny_config
from tfexport.errors import TfexportError
from tfexport.search.rules.sequence_bias import SequenceBias, parse_bias
from tfexport.search.search import SearchOptions, search

EOS = 2


def test_a_bias_is_added_after_the_tokens_before() -> None:
    scores = np.zeros((2, 8))
    biases = (((4,), -1.0), ((5, 6, 4), 2.5), ((6, 7), 3.0), ((0, 1, 5, 6, 3), 9.0))
    SequenceBias(sequence_bias=biases).penalise(scores, np.array([[1, 5, 6], [1, 6, 5]]))
    assert scores.tolist() == [[0, 0, 0, 0, 1.5, 0, 0, 3.0], [0, 0, 0, 0, -1.0, 0, 0, 0]]


@pytest.mark.parametrize("given", ["w1 w2", "=2", "w1=x", "", "w1="])
def test_what_is_no_bias_is_told(given: str) -> None:
    with pytest.raises(TfexportError, match="not tokens, = and a number"):
        parse_bias("sequence_bias", given)
    assert parse_bias("sequence_bias", "w1 w=2=-2.5") == ("w1 w=2", -2.5)


def test_numbers_that_ban_are_told() -> None:
    with pytest.raises(TfexportError, match="not finite"):
        SearchOptions(sequence_bias=(((4,), -np.inf),))


def test_a_beam_goes_on_where_a_bias_may_make_up_for_the_rest() -> None:
    """An output that ends at once is likely, and the other one becomes the best only with the bias of its third token."""

    def model(source: Ids, tokens: Ids) -> Any:
        eos, three = ((0.6, 0.3), (0.01, 0.9), (0.01, 0.9), (0.99, 0.001))[min(len(tokens), 3)]
        rest = (1 - eos - three) / 5
        return np.log(np.array([rest, rest, eos, three, rest, rest, rest], dtype=np.float32))

    def best(**given: Any) -> Ids:
        options = SearchOptions(beam=1 + (not given.pop("greedy", False)), max_length=6, length_penalty=0.0, **given)
        [[hypothesis]] = search(ScriptedRuntime(model, tiny_config(tgt_vocab_size=7)), [(5, 2)], options)
        return hypothesis.ids

    assert best() == (EOS,)
    assert best(sequence_bias=(((3, 3, 3), 2.0),), profile="marian") == (3, 3, 3, EOS)
