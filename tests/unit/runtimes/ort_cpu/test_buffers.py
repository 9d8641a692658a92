"""Arrays of the runtime `ort-cpu` in memory that is used again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tfexport.runtimes.ort_cpu.buffers import LARGEST, SMALLEST, Buffers

SOME = SMALLEST // 4


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    pool = Buffers()
    first = pool.empty((2, SOME))
    address = first.ctypes.data
    view = first[1, ::2]
    del first
    assert pool.free == []  # a view is enough
    other = pool.empty((2, SOME))
    assert other.ctypes.data != address
    del view
    again = pool.empty((3, SOME // 2))
    assert again.ctypes.data == address
    assert again.shape == (3, SOME // 2)
    assert again.dtype == np.float32


def test_there_are_never_more_pieces_than_were_in_use_at_once() -> None:
    pool = Buffers()
    for size in (SOME, 3 * SOME, 2 * SOME, 5 * SOME, 4 * SOME, SOME):
        arrays = [pool.empty((size,)), pool.empty((SOME,))]
        del arrays
    assert pool.free == [4 * SOME, 4 * 5 * SOME]


def test_the_smallest_piece_that_is_large_enough_is_taken() -> None:
    pool = Buffers()
    kept = [pool.empty((factor * SOME,)) for factor in (1, 4, 2)]
    wanted = kept[2].ctypes.data
    kept.clear()
    assert pool.empty((SOME + 1,)).ctypes.data == wanted


@pytest.mark.parametrize("nbytes", [SMALLEST - 4, LARGEST + 4])
def test_small_and_huge_arrays_are_not_kept(nbytes: int) -> None:
    pool = Buffers()
    array = pool.empty((nbytes // 4,))
    del array
    assert pool.free == []


def test_threads_never_get_the_same_memory() -> None:
    pool = Buffers()

    def fill(number: int) -> bool:
        array = pool.empty((SOME + number % 7,))
        array.fill(number)
        return bool((array == number).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(fill, range(2_000)))
    assert len(pool.free) <= 8
