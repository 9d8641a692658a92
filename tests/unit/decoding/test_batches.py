"""Batches of like length and how CPUs are shared: with a scripted runtime, and no clock."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfexport.decoding.batches
import tfexport.system.processes
from tests.support.fakes import EOS, ScriptedRuntime, echo_model, tiny_config
from tfexport.decoding.batches import Split, batches, decode_all
from tfexport.decoding.search import SearchOptions
from tfexport.system.processes import return_freed_memory

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
    found = batches(lengths, size, most)
    assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) <= size
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= most


@given(LENGTHS, st.integers(1, 9))
def test_batches_go_from_long_to_short_and_are_full(lengths: list[int], size: int) -> None:
    found = batches(lengths, size)
    ordered = [lengths[index] for batch in found for index in batch]
    assert ordered == sorted(lengths, reverse=True)
    assert all(len(batch) == size for batch in found[:-1])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 30), st.integers(1, 7), st.integers(1, 3))
def test_outputs_are_in_the_order_of_the_sources_with_any_workers(count: int, size: int, workers: int) -> None:
    given = sources(count)
    found = decode_all(runtime(), given, SearchOptions(), batch_size=size, workers=workers)
    assert [hypotheses[0].ids for hypotheses in found] == wanted(given)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give memory back by themselves")
def test_freed_memory_goes_back_to_the_system_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfexport.system.processes, "_returned", 0.0)
    for now, returned in ((1000.0, True), (1000.9, False), (1001.1, True)):
        monkeypatch.setattr(tfexport.system.processes.time, "monotonic", lambda now=now: now)
        pieces = [bytes(range(250)) * 200 for _ in range(1000)]  # 50 MB, too small each for a map of its own
        kept = pieces[::100]  # so that what lies between cannot be given back from the end
        full = resident()
        del pieces
        return_freed_memory()
        assert (full - resident() > 25e6) == returned
        assert len(kept) == 10


@pytest.mark.parametrize(
    ("workers", "threads", "at_once", "expected"),
    [
        (None, None, True, Split(4, 1)),
        (None, None, False, Split(1, 4)),
        (None, 2, True, Split(2, 2)),
        (None, 9, True, Split(1, 9)),
        (3, None, True, Split(3, 1)),
        (2, None, False, Split(2, 2)),
        (8, None, True, Split(8, 1)),
        (2, 5, True, Split(2, 5)),
    ],
)
def test_the_split_of_four_cpus(
    workers: int | None, threads: int | None, at_once: bool, expected: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfexport.decoding.batches, "usable_cpus", lambda: 4)
    assert Split.of(workers, threads, at_once=at_once) == expected


def test_a_split_is_told_in_words() -> None:
    assert str(Split(2, 1)) == "2 workers of 1 thread"
    assert str(Split(1, 4)) == "1 worker of 4 threads"
