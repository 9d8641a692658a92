"""What beam search does with the candidates of several steps."""

from __future__ import annotations

import numpy as np
import pytest

from tfexport.runtimes.outputs import Continuations, IntArray
from tfexport.search.beam import let_go_on, places_among_first

STEPS, SENTENCES, BEAM, CANDIDATES = 5, 7, 3, 6


def continuations(tokens: IntArray) -> Continuations:
    numbers = np.arange(tokens.size).reshape(tokens.shape)
    return Continuations(-numbers.astype(np.float64), numbers % BEAM, tokens.copy())


@pytest.mark.parametrize("ends", [0, 1, 2, 3])
def test_the_best_that_do_not_end_come_first(ends: int) -> None:
    """`ends` of each sentence do, at any rank; nothing but their places changes, and not where none is among the first."""
    random = np.random.default_rng(ends)
    ranks = random.permuted(np.tile(np.arange(CANDIDATES), (STEPS * SENTENCES, 1)), axis=1)
    is_eos = (ranks < ends).reshape(STEPS, SENTENCES, CANDIDATES)
    found = continuations(np.arange(is_eos.size).reshape(is_eos.shape))
    wanted = np.take_along_axis(found.tokens, is_eos.argsort(axis=2, kind="stable"), axis=2)[..., :BEAM]
    ending = places_among_first(is_eos, BEAM)
    assert ending.tolist() == [place for place in np.flatnonzero(is_eos).tolist() if place % CANDIDATES < BEAM]
    if len(ending):
        let_go_on(found, is_eos, ending, BEAM)
    first = found.at((..., slice(BEAM)))
    assert (first.tokens == wanted).all()
    assert (first.log_probs == -wanted).all()
    assert (first.parents == wanted % BEAM).all()


def test_a_sentence_that_can_only_end_takes_nothing_of_others() -> None:
    tokens = np.arange(2 * CANDIDATES).reshape(1, 2, CANDIDATES)
    for group in range(2):
        is_eos = np.zeros(tokens.shape, dtype=bool)
        is_eos[0, group] = True
        found = continuations(tokens)
        let_go_on(found, is_eos, places_among_first(is_eos, BEAM), BEAM)
        assert (found.tokens // CANDIDATES == tokens // CANDIDATES).all()
        assert (found.tokens[0, 1 - group] == tokens[0, 1 - group]).all()


def test_places_that_no_candidate_fills_are_empty() -> None:
    """Fewer candidates than the beam go on: the others of the beam must not continue after their end."""
    is_eos = np.ones((1, 1, CANDIDATES), dtype=bool)
    is_eos[0, 0, [2, 5]] = False
    reordered = continuations(np.arange(CANDIDATES).reshape(is_eos.shape))
    let_go_on(reordered, is_eos, places_among_first(is_eos, BEAM), BEAM)
    assert reordered.tokens[0, 0, :2].tolist() == [2, 5]
    assert (reordered.log_probs[0, 0, :2] == [-2, -5]).all()
    assert (reordered.log_probs[0, 0, 2:BEAM] == -np.inf).all()
