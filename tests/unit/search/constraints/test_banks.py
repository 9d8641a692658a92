"""Which candidates get a place in the beam."""

from __future__ import annotations

import numpy as np

from tfexport.search.constraints.banks import allocated


def order_of(log_probs: list[float], banks: list[int]) -> list[int]:
    return allocated(np.array(log_probs, dtype=np.float64), np.array(banks)).tolist()


def test_banks_take_turns_the_fullest_first() -> None:
    assert order_of([-1, -2, -3, -4, -5, -6, -7, -8], [0, 0, 0, 1, 1, 2, 0, 2]) == [5, 3, 0, 7, 4, 1, 2, 6]
    assert order_of([-3, -1, -2], [1, 1, 1]) == [1, 2, 0]
    assert order_of([-1, -1], [0, 0]) == [0, 1]
    assert order_of([], []) == []


def test_a_bank_may_come_in_several_runs() -> None:
    """-250 in bank 2 comes after -1 in bank 0: it begins a run, and has the place of a best one."""
    assert order_of([-1, -2, -250, -3], [0, 0, 2, 2]) == [3, 2, 0, 1]


def test_hardly_more_candidates_than_banks() -> None:
    """fairseq's numbers let the second of a full bank go before the best of one that is far behind."""
    assert order_of([-1, -2, -3], [9, 9, 0]) == [0, 1, 2]
