"""Jobs that take turns: no two run at once, and each has the time of its own turns alone."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext
from typing import Any

import pytest

from benchmarks.corpora import turns
from benchmarks.corpora.turns import Group, Job, take_turns


class Recorded:
    """A group without a cgroup: what was asked of the groups, in order."""

    def __init__(self, name: str, asked: list[str]):
        self.name, self.asked = name, asked

    def freeze(self) -> None:
        self.asked.append(f"freeze {self.name}")

    def thaw(self) -> None:
        self.asked.append(f"thaw {self.name}")

    def joined(self) -> Any:
        return nullcontext()

    def processes(self) -> list[int]:
        return [os.getpid()]

    def cpu_seconds(self) -> float:
        return float(len(self.asked))


def sleeping(name: str, group: Any, seconds: float, code: int = 0) -> Job:
    command = [sys.executable, "-c", f"import sys, time; time.sleep({seconds}); sys.exit({code})"]
    return Job(name, command, dict(os.environ), group, lambda: 7)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN", 0.1)
    monkeypatch.setattr(turns, "INTERVAL", 0.05)


def test_only_one_job_runs_at_a_time() -> None:
    asked: list[str] = []
    jobs = [sleeping(name, Recorded(name, asked), 0.5) for name in "ab"]
    take_turns(jobs, log=2)
    pairs = list(zip(asked[::2], asked[1::2], strict=True))
    assert {(thaw, freeze) for thaw, freeze in pairs} == {(f"thaw {name}", f"freeze {name}") for name in "ab"}
    assert [thaw for thaw, _ in pairs[:4]] == ["thaw a", "thaw b"] * 2
    for job in jobs:
        assert job.cpu_seconds == 2 * sum(thaw == f"thaw {job.name}" for thaw, _ in pairs)
        assert all(rows == 7 and memory > 1 for _, rows, memory in job.samples)
        assert [seconds for seconds, *_ in job.samples] == sorted(seconds for seconds, *_ in job.samples)


def test_a_job_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="b ended with exit code 3"):
        take_turns([sleeping("a", Recorded("a", []), 1.0), sleeping("b", Recorded("b", []), 0.0, code=3)], log=2)


def can_make_groups() -> bool:
    try:
        with Group("probe"):
            return True
    except (RuntimeError, OSError):
        return False


@pytest.mark.skipif(not can_make_groups(), reason="control groups of version 2 need root and a mounted cgroup2")
def test_frozen_processes_stand_still_and_end_with_their_group() -> None:
    with Group("test") as group:
        job = Job("a", [sys.executable, "-c", "while True: pass"], dict(os.environ), group)
        job.turn(log=2)
        used, (running,) = group.cpu_seconds(), group.processes()
        time.sleep(0.3)
        assert group.cpu_seconds() == used > 0.01
        assert 0.1 <= job.seconds < 5
        group.thaw()
        time.sleep(0.3)
        assert group.cpu_seconds() > used
    assert os.waitpid(running, 0)[1] == signal.SIGKILL


@pytest.mark.skipif(not can_make_groups(), reason="control groups of version 2 need root and a mounted cgroup2")
def test_a_group_ends_with_processes_of_many_threads() -> None:
    code = "import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep, args=(60,)).start()"
    for number in range(10):
        with Group(f"threads-{number}") as group:
            jobs = [Job("a", [sys.executable, "-c", code], dict(os.environ), group) for _ in range(4)]
            for job in jobs:
                job.turn(log=2)
        assert not list(turns.hierarchy().glob(f"tfexport-{os.getpid()}-*"))
