"""Jobs that take turns on the same CPUs: one runs for some seconds while all others are frozen.

The speed of a virtual CPU changes by a tenth within minutes, because the machine below has other guests. Jobs that run one
after the other meet different speeds, and their ratio is uncertain by as much. Jobs that take turns meet the same.

A job is a control group with all processes that come from it (Linux, cgroup v2, root).
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.memory.commands import Memory

TURN = 10.0
"""Seconds of a turn. To fill the caches again takes milliseconds. A wait that begins in a turn goes on while the job is
frozen. So a job gains if all its processes wait at the end of turns: one that keeps the CPUs busy does not."""
INTERVAL = 1.0
"""Seconds between two counts of rows."""


class Group:
    """A control group of Linux, as a context; the end kills its processes.

    Raises:
        RuntimeError: this process may not make one.
    """

    def __init__(self, name: str):
        self._folder = hierarchy() / f"tfexport-{os.getpid()}-{name}"

    def __enter__(self) -> Group:
        try:
            self._folder.mkdir()
        except OSError as error:
            raise RuntimeError(
                f"cannot make the control group {self._folder}: {error.strerror}. Run as root."
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        (self._folder / "cgroup.kill").write_text("1")
        self._wait_for("populated 0")  # threads of a process may end after it
        self._folder.rmdir()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Processes that are started within belong to this group."""
        before = next(line for line in _lines(Path("/proc/self/cgroup")) if line.startswith("0::"))
        own = str(os.getpid())
        (self._folder / "cgroup.procs").write_text(own)
        try:
            yield
        finally:
            (hierarchy() / before.removeprefix("0::/") / "cgroup.procs").write_text(own)

    def freeze(self) -> None:
        """Stop all processes."""
        (self._folder / "cgroup.freeze").write_text("1")
        self._wait_for("frozen 1")

    def thaw(self) -> None:
        """Let them go on."""
        (self._folder / "cgroup.freeze").write_text("0")

    def _wait_for(self, event: str) -> None:
        while event not in _lines(self._folder / "cgroup.events"):
            time.sleep(0.001)

    def processes(self) -> list[int]:
        """Those that live."""
        return [int(line) for line in _lines(self._folder / "cgroup.procs")]

    def cpu_seconds(self) -> float:
        """The CPU time of all processes, also of those that have ended."""
        found = dict(line.split() for line in _lines(self._folder / "cpu.stat"))
        return int(found["usage_usec"]) / 1e6


def hierarchy() -> Path:
    """Where control groups of version 2 are.

    Raises:
        RuntimeError: this system has none.
    """
    with suppress(OSError):
        for line in _lines(Path("/proc/self/mounts")):
            _, place, kind, *_ = line.split()
            if kind == "cgroup2":
                return Path(place)
    raise RuntimeError("this system has no control groups of version 2: use Linux with cgroup2 mounted.")


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="ascii").splitlines()


@dataclass
class Job:
    """A command that takes turns.

    Args:
        group: in which it runs, with all that comes from it. Processes may be there before.
        rows: counts what it has written; None where that is not known.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    group: Group
    rows: Callable[[], int | None] = lambda: None
    seconds: float = 0.0
    """Of its turns."""
    cpu_seconds: float = 0.0
    """The CPU time within its turns, of all its processes."""
    samples: list[tuple[float, int | None, float]] = field(default_factory=list)
    """(seconds, rows, memory in MiB) in the course of its turns."""
    exit_code: int | None = None
    _process: subprocess.Popen[bytes] | None = None

    def turn(self, log: int) -> None:
        """Run for `TURN` seconds, or until the end. What is measured is read while the processes are frozen.

        Args:
            log: the file to which it writes its messages.
        """
        before, began = self.group.cpu_seconds(), time.monotonic()
        self.group.thaw()
        if self._process is None:
            with self.group.joined():
                self._process = subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=log)
        counted = []
        while self.exit_code is None and (passed := time.monotonic() - began) < TURN:
            counted.append((round(self.seconds + passed, 1), self.rows()))
            with suppress(subprocess.TimeoutExpired):
                self.exit_code = self._process.wait(min(INTERVAL, TURN - passed))
        self.group.freeze()
        self.seconds += time.monotonic() - began
        self.cpu_seconds += self.group.cpu_seconds() - before
        memory = round(sum(one.pss for one in map(Memory.of, self.group.processes()) if one is not None), 1)
        if self.exit_code is None:
            self.samples += [(seconds, rows, memory) for seconds, rows in counted]
        else:
            self.samples.append((round(self.seconds, 1), self.rows(), self.samples[-1][2] if self.samples else memory))


def take_turns(jobs: Sequence[Job], log: int) -> None:
    """Run jobs until each has ended.

    Raises:
        RuntimeError: one failed.
    """
    while going := [job for job in jobs if job.exit_code is None]:
        for job in going:
            job.turn(log)
            if job.exit_code:
                raise RuntimeError(f"{job.name} ended with exit code {job.exit_code}")
