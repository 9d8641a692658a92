"""How far hypotheses are with their phrases."""

from __future__ import annotations

import gc
import weakref
from itertools import product

import pytest

from tests.support.constrained import has_all
from tfexport.search.constraints import states
from tfexport.search.constraints.states import ConstraintState, first_state, missing_phrases
from tfexport.search.hypothesis import Ids, Phrase
from tfexport.search.options import ConstraintOrder


def after(tokens: Ids, phrases: list[Ids], order: ConstraintOrder) -> ConstraintState:
    state = first_state(phrases, order)
    for token in tokens:
        state = state.advance(token)
    return state


PHRASES: list[list[Ids]] = [
    [(1,)],
    [(1, 2)],
    [(1,), (1, 2)],
    [(1, 2), (2, 1)],
    [(1,), (1,), (2,)],
    [(1, 2), (1, 2)],
    [(1, 1), (1,)],
    [(1, 2, 1), (1, 2)],
]


@pytest.mark.parametrize("order", ["ordered", "unordered"])
@pytest.mark.parametrize("phrases", PHRASES)
def test_states_that_are_met_have_all_phrases_and_stay_so(phrases: list[Ids], order: ConstraintOrder) -> None:
    total = sum(map(len, phrases))
    n_met = 0
    for tokens in product((1, 2, 9), repeat=6):
        states = [after(tokens[:length], phrases, order) for length in range(len(tokens) + 1)]
        met = [state.met for state in states]
        assert met == sorted(met)
        assert all(state.bank == total for state in states if state.met)
        assert all(0 <= state.bank < total for state in states if not state.met)
        if met[-1]:
            assert has_all(tokens, phrases, order)
            n_met += 1
    assert n_met


@pytest.mark.parametrize("order", ["ordered", "unordered"])
@pytest.mark.parametrize("phrases", PHRASES)
def test_each_state_has_a_token_that_fills_its_bank(phrases: list[Ids], order: ConstraintOrder) -> None:
    """So the fullest bank of a beam grows with each step."""
    for length in range(5):
        for tokens in product((1, 2, 9), repeat=length):
            state = after(tokens, phrases, order)
            if not state.met:
                assert max(state.advance(token).bank for token in state.next_tokens) == state.bank + 1


def test_states_by_hand() -> None:
    ordered: list[tuple[Ids, int, bool]] = [
        ((1, 2), 2, False),
        ((1, 2, 9, 3), 3, False),
        ((1, 2, 9, 3, 4), 4, True),
        ((1, 2, 3, 9), 0, False),  # all phrases begin anew, as in fairseq
        ((3, 4, 1, 2), 2, False),
        ((1, 1, 2), 2, False),
    ]
    for tokens, bank, met in ordered:
        state = after(tokens, [(1, 2), (3, 4)], "ordered")
        assert (state.bank, state.met) == (bank, met), tokens
    unordered: list[tuple[Ids, int, bool]] = [
        ((3, 4, 1, 2), 4, True),
        ((1, 2, 3, 9), 2, False),  # the broken one is lost, the other is not
        ((1, 1, 2), 0, False),  # the second 1 breaks the first off, and begins none
        ((1, 9, 3, 4, 9, 1, 2), 4, True),
    ]
    for tokens, bank, met in unordered:
        state = after(tokens, [(1, 2), (3, 4)], "unordered")
        assert (state.bank, state.met) == (bank, met), tokens


def test_tokens_that_begin_or_continue_a_phrase() -> None:
    assert after((), [(1, 2), (3,)], "ordered").next_tokens == [1]
    assert after((1,), [(1, 2), (3,)], "ordered").next_tokens == [2]
    assert after((1, 2), [(1, 2), (3,)], "ordered").next_tokens == [1, 3]
    assert after((), [(1, 2), (3,)], "unordered").next_tokens == [1, 3]
    assert after((1,), [(1, 2), (3,)], "unordered").next_tokens == [1, 2, 3]


def test_hypotheses_share_states() -> None:
    """Else a long search would make one for each of its candidates."""
    one, other = (after(tokens, [(1, 2), (3,)], "unordered") for tokens in ((9, 1, 8, 7, 3), (3, 9, 9, 1, 3)))
    assert one is after((), [], "unordered") or one.advance(9) is one.advance(8)
    first = first_state([(1, 2), (3,)], "unordered")
    assert first.advance(9) is first.advance(8) is first
    assert first.advance(3).advance(9) is first.advance(9).advance(3).advance(1).advance(5)
    assert (one.met, other.met) == (False, False)


def test_missing_phrases() -> None:
    a, b, ab = Phrase((1,), "a"), Phrase((2,), "b"), Phrase((1, 2), "a b")
    assert missing_phrases((1, 2), [a, ab], "unordered") == (a,)
    assert missing_phrases((1, 9, 1, 2), [a, ab], "unordered") == ()
    assert missing_phrases((2, 1), [a, b], "ordered") == (b,)
    assert missing_phrases((2, 1), [a, b], "unordered") == ()
    assert missing_phrases((), [a, a], "unordered") == (a, a)


def test_states_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MOST_STATES", 50)
    phrases: list[Ids] = [(token,) for token in range(30)]
    first = first_state(phrases, "unordered")
    living: list[weakref.ref[ConstraintState]] = []
    state = first
    for token in range(30):
        living += [weakref.ref(state.advance(other)) for other in range(30)]
        state = state.advance(token)
    del first
    assert (state.bank, state.met) == (30, True)
    gc.collect()
    assert len({one() for one in living} - {None}) < 90
