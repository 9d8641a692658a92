"""The sizes that tensors come in: the smallest that fits, and a refusal that says what to do."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fakes import tiny_config
from tfexport.errors import TfexportError
from tfexport.runtimes.buckets import CUDA_BATCH, Buckets, cpu_buckets, cuda_buckets

BUCKETS = Buckets((16, 32, 64), (1, 2, 4), (8, 24), rows=9, remedy="Ask for less.")


def test_the_smallest_size_that_fits_is_taken() -> None:
    assert [BUCKETS.cache_for(slots) for slots in (1, 16, 17, 33, 64)] == [16, 16, 32, 64, 64]
    assert [BUCKETS.batch_for(sentences, 1) for sentences in (1, 2, 3, 4)] == [1, 2, 4, 4]
    assert [BUCKETS.src_for(length) for length in (1, 8, 9, 24)] == [8, 8, 24, 24]


def test_where_no_sizes_are_given_any_is_taken() -> None:
    free = Buckets((20,))
    assert [free.batch_for(sentences, 100) for sentences in (1, 3, 1000)] == [1, 3, 1000]
    assert [free.src_for(length) for length in (1, 7, 5000)] == [1, 7, 5000]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: BUCKETS.cache_for(65), "a translation of 65 tokens is more than the 64 planned for. Ask for less."),
        (lambda: BUCKETS.batch_for(5, 1), "a batch of 5 sentences is more than the 4 planned for. Ask for less."),
        (lambda: BUCKETS.src_for(25), "a source of 25 ids is more than the 24 planned for. Ask for less."),
        (lambda: BUCKETS.batch_for(4, 3), "4 sentences with beam 3 are more than 9 rows. Ask for less."),
        (lambda: BUCKETS.batch_for(1, 10), "1 sentences with beam 10 are more than 9 rows. Ask for less."),
    ],
)
def test_what_is_too_large_is_refused_with_the_remedy(ask: Any, message: str) -> None:
    with pytest.raises(TfexportError) as caught:
        ask()
    assert str(caught.value) == message


def test_rows_limit_batch_and_beam_together() -> None:
    assert BUCKETS.batch_for(1, 9) == 1
    assert BUCKETS.batch_for(2, 4) == 2
    assert BUCKETS.batch_for(4, 2) == 4
    # A bucket of 4 sentences has 12 rows with beam 3; without the empty place there are 9, which fit.
    assert BUCKETS.batch_for(3, 3) == 3
    assert BUCKETS.batch_for(3, 2) == 4


@pytest.mark.parametrize("positions", [1, 15, 16, 17, 20, 48, 50])
def test_caches_on_the_cpu_grow_by_blocks_to_the_model_s_positions(positions: int) -> None:
    buckets = cpu_buckets(positions)
    assert buckets.cache[-1] == positions
    assert all(size % 16 == 0 for size in buckets.cache[:-1])
    assert all(0 < one < other <= one + 16 for one, other in itertools.pairwise(buckets.cache))
    with pytest.raises(TfexportError, match=r"The model has no more positions\.$"):
        buckets.cache_for(positions + 1)


def cuda(precision: Any, **changes: Any) -> Buckets:
    bundle: Any = SimpleNamespace(config=tiny_config(**changes))
    return cuda_buckets(bundle, precision)


def test_on_cuda_there_are_few_sizes_and_they_hold_all_of_the_model() -> None:
    buckets = cuda("float16", d_model=64, max_source_length=70, max_target_length=100)
    assert buckets.cache == (64, 128)
    assert buckets.src == (64, 70)
    assert buckets.batch == CUDA_BATCH
    assert buckets.batch_for(33, 4) == 64
    assert cuda("float16", d_model=64, max_source_length=32, max_target_length=32).cache == (64,)
    assert cuda("float16", d_model=64, max_source_length=32, max_target_length=33).src == (32,)
    long = cuda("float16", d_model=64, max_source_length=1000, max_target_length=1024)
    assert (long.src, long.cache) == ((64, 128, 256, 512, 1000), (64, 128, 256, 512, 1024))
    with pytest.raises(TfexportError, match=r"Use a smaller --batch-size, or shorter lines\.$"):
        buckets.batch_for(16385, 1)


def test_a_batch_becomes_smaller_in_few_steps() -> None:
    """Each batch has graphs of its own, which are recorded once."""
    buckets = cuda("float16", d_model=64)
    assert [buckets.batch_after(128, left, 4) for left in (128, 33, 32, 9, 8, 1)] == [128, 128, 32, 32, 8, 8]
    assert [buckets.batch_after(4, left, 4) for left in (4, 1)] == [4, 4]
    assert [BUCKETS.batch_after(4, left, 1) for left in (4, 3, 2, 1)] == [4, 4, 2, 1]


def test_a_cache_may_begin_as_long_as_the_source() -> None:
    buckets = cuda("float16", d_model=64, max_source_length=300, max_target_length=100)
    assert [buckets.first_cache(src) for src in buckets.src or ()] == [64, 128, 128, 128]
    assert BUCKETS.first_cache(24) == 16


@pytest.mark.parametrize(("precision", "item"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
@pytest.mark.parametrize("d_model", [2, 6, 24, 512])
def test_on_cuda_caches_end_aligned(precision: Any, item: int, d_model: int) -> None:
    for size in cuda(precision, d_model=d_model, max_target_length=3000).cache:
        assert size * d_model * item % 256 == 0
