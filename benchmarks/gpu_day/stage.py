"""What the process of a stage is given, and how it keeps what it finds."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.stand_ins import use_stand_ins
from benchmarks.gpu_day.state import write_json

SPARE = 20.0
"""Seconds before its limit at which a stage begins nothing new."""


@dataclass
class Task:
    """A stage that runs."""

    out: Path
    """The file of its results."""
    work: Path
    """A folder that the stages share: models and bundles."""
    seconds: float
    rehearsal: bool
    found: dict[str, Any] = field(default_factory=dict)
    """The results; they are on the disk after each `save`."""
    _start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds for work that is not begun yet."""
        return self.seconds - SPARE - (time.monotonic() - self._start)

    def save(self) -> None:
        write_json(self.found, self.out)


def say(line: str) -> None:
    print(line, flush=True)


def main(run: Callable[[Task], bool], arguments: Sequence[str] | None = None, *, stand_ins: bool = False) -> int:
    """Run a stage as a command; exit code 1 if it found something wrong.

    Args:
        stand_ins: in a rehearsal it decodes over the stand-ins of CUDA. Without them it finds no GPU.
    """
    parser = argparse.ArgumentParser(description=run.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the file of the results")
    parser.add_argument("--work", type=Path, required=True, help="the folder that the stages share")
    parser.add_argument("--seconds", type=float, default=600.0, help="the limit of the stage")
    parser.add_argument(
        "--rehearse", action="store_true", help="without a GPU, over the stand-ins of benchmarks/cuda_dry"
    )
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    task = Task(options.out, options.work, options.seconds, options.rehearse)
    task.save()  # nothing of an earlier run is taken for this one's
    if task.rehearsal and stand_ins:
        use_stand_ins(say)
    try:
        return 0 if run(task) else 1
    finally:
        task.save()
        sys.stdout.flush()
