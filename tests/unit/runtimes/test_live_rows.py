"""The places of live sentences in buffers, against buffers that are written out row by row."""

from __future__ import annotations

import numpy as np
import pytest

from tfexport.runtimes.live_rows import LiveRows, fill_sources
from tfexport.runtimes.outputs import IntArray

BATCH = 5


def buffer(beam: int) -> IntArray:
    """Rows that tell where they were at first."""
    return np.arange(BATCH * beam) + 100


@pytest.mark.parametrize("beam", [1, 3])
def test_rows_continue_their_parents_in_place_and_in_smaller_buffers(beam: int) -> None:
    random = np.random.default_rng(beam)
    live, rows = LiveRows.first(BATCH, beam), buffer(beam)
    searched = list(rows[live.rows])  # what a search without buffers would hold
    for kept in ([0, 1, 2, 3, 4], [3, 0, 2, 4], [2, 0, 1], [1, 0]):
        selected = np.concatenate([beam * sentence + random.integers(0, beam, beam) for sentence in kept])
        searched = [searched[row] for row in selected]
        live, parents = live.select(selected)
        assert len(live) == len(kept)
        sentences, moved = live.compact(parents, BATCH)
        smaller = rows[moved]
        assert list(smaller[: len(searched)]) == searched
        assert list(sentences[len(kept) :]) == [sentences[0]] * (BATCH - len(kept))
        index = live.reorder(parents, BATCH)
        rows = rows if index is None else rows[index]
        assert list(rows[live.rows]) == searched


def test_rows_that_all_continue_themselves_move_nothing() -> None:
    live, parents = LiveRows.first(BATCH, 2).select(np.arange(2 * BATCH))
    assert live.reorder(parents, BATCH) is None
    live, parents = live.select(np.arange(4, 8))  # the third and the fourth sentence, where they are
    assert list(live.places) == [2, 3]
    assert list(live.rows) == [4, 5, 6, 7]
    assert live.reorder(parents, BATCH) is None
    assert [list(one) for one in live.compact(parents, 3)] == [[2, 3, 2], [4, 5, 6, 7, 4, 5]]


def test_empty_places_hold_a_sentence_of_one_pad() -> None:
    ids, lengths = np.full((3, 4), -1), np.full(3, -1)
    fill_sources(ids, lengths, np.array([[7, 8, 9], [6, 1, 1]]), np.array([3, 1]), pad_id=1)
    assert ids.tolist() == [[7, 8, 9, 1], [6, 1, 1, 1], [1, 1, 1, 1]]
    assert lengths.tolist() == [3, 1, 1]
