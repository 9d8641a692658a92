"""Batches of like length, with a scripted runtime."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fakes import EOS, ScriptedRuntime, echo_model, tiny_config
from tfexport.decoding.batches import batches_by_length, decode_all, decode_windows
from tfexport.decoding.workers import WorkerPool
from tfexport.search.search import SearchOptions

CONFIG = tiny_config(src_vocab_size=9, tgt_vocab_size=9, max_source_length=12, max_target_length=20)
LENGTHS = st.lists(st.integers(1, 50), max_size=40)


def runtime(kind: type[ScriptedRuntime] = ScriptedRuntime) -> ScriptedRuntime:
    return kind(echo_model(9), CONFIG)


def sources(count: int) -> list[list[int]]:
    """All different, of lengths that go up and down."""
    return [[4 + (k // 5**place) % 5 for place in range(4 + k % 3)] for k in range(count)]


def wanted(given: list[list[int]]) -> list[tuple[int, ...]]:
    return [(*source, EOS) for source in given]


@given(LENGTHS, st.integers(1, 9), st.integers(1, 120))
def test_batches_hold_every_index_once_within_both_limits(lengths: list[int], size: int, most: int) -> None:
    found = batches_by_length(lengths, size, most)
    assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) <= size
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= most


@given(LENGTHS, st.integers(1, 9))
def test_batches_go_from_long_to_short_and_are_full(lengths: list[int], size: int) -> None:
    found = batches_by_length(lengths, size)
    ordered = [lengths[index] for batch in found for index in batch]
    assert ordered == sorted(lengths, reverse=True)
    assert all(len(batch) == size for batch in found[:-1])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 30), st.integers(1, 7), st.integers(1, 3))
def test_outputs_are_in_the_order_of_the_sources_with_any_workers(count: int, size: int, workers: int) -> None:
    given = sources(count)
    found = decode_all(runtime(), given, SearchOptions(), batch_size=size, workers=workers)
    assert [hypotheses[0].ids for hypotheses in found] == wanted(given)


def test_padded_ids_bound_the_batches_of_a_search() -> None:
    given = [source for source in sources(60) if len(source) == 6]
    for most, largest in ((1, 1), (12, 2), (35, 5), (None, 8)):
        one = runtime()
        with WorkerPool(one, 1, SearchOptions()) as pool:
            found = next(decode_windows(pool, [given], SearchOptions(), batch_size=8, max_batch_tokens=most))
        assert [hypotheses[0].ids for hypotheses in found] == wanted(given)
        assert max(steps[0] for steps in one.rows) == largest
