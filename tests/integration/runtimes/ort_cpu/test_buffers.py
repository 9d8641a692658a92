"""Arrays of the runtime `ort-cpu` in memory that is used again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.ort_bundles import CONFIG, random_model, random_sources, with_end, write_bundle
from tfexport.decoding.search import SearchOptions, search
from tfexport.runtimes.ort_cpu import buffers
from tfexport.runtimes.ort_cpu.buffers import LARGEST, SMALLEST, Buffers
from tfexport.runtimes.ort_cpu.runtime import OrtCpuRuntime

SOME = SMALLEST // 4
MODEL = CONFIG.replace(output_bias=True)


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


@pytest.mark.parametrize("beam", [1, 3])
def test_batches_like_those_before_take_no_new_memory(
    beam: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "SMALLEST", 1)  # all arrays of a small model count
    runtime = OrtCpuRuntime(write_bundle(with_end(random_model(MODEL, seed=3), -30.0), tmp_path / "bundle"), threads=1)
    sources, options = random_sources(MODEL, [20, 7, 12, 3]), SearchOptions(beam=beam, max_length=60)

    def outputs() -> list[list[tuple[int, ...]]]:
        return [[found.ids for found in hypotheses] for hypotheses in search(runtime, sources, options)]

    first = outputs()
    pieces = runtime.context.buffers.free
    # Keys and values of the sentences, a cache, and one more tensor of it while it grows, with beams also what moves into
    # it; no second cache.
    assert len(pieces) == 1 + 2 * MODEL.n_decoder_layers + (1 if beam == 1 else 2)
    for _ in range(3):
        assert outputs() == first
        assert len(runtime.context.buffers.free) == len(pieces)
