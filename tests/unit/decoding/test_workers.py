"""How CPUs are shared among workers."""

from __future__ import annotations

import pytest

import tfexport.decoding.workers
import tfexport.system.processes
from tfexport.decoding.workers import CpuSplit


@pytest.mark.parametrize(
    ("workers", "threads", "at_once", "expected"),
    [
        (None, None, True, CpuSplit(4, 1)),
        (None, None, False, CpuSplit(1, 4)),
        (None, 2, True, CpuSplit(2, 2)),
        (None, 9, True, CpuSplit(1, 9)),
        (3, None, True, CpuSplit(3, 1)),
        (2, None, False, CpuSplit(2, 2)),
        (8, None, True, CpuSplit(8, 1)),
        (2, 5, True, CpuSplit(2, 5)),
    ],
)
def test_the_split_of_four_cpus(
    workers: int | None, threads: int | None, at_once: bool, expected: CpuSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfexport.decoding.workers, "usable_cpus", lambda: 4)
    assert CpuSplit.choose(workers, threads, at_once=at_once) == expected


def test_a_split_is_told_in_words() -> None:
    assert str(CpuSplit(2, 1)) == "2 workers of 1 thread"
    assert str(CpuSplit(1, 4)) == "1 worker of 4 threads"
