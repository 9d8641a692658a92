"""The program, and processes on Linux: which come from which, and their end."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

TFEXPORT = Path(sys.executable).with_name("tfexport")
"""The installed program."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
"""For processes that tests and fuzzers start."""


def children(pid: int) -> list[int]:
    """The processes that a process started, with any of its threads."""
    try:
        files = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for file in files for child in file.read_text(encoding="ascii").split()]
    except OSError:  # it has ended
        return []


def descendants(pid: int) -> list[int]:
    """The processes that come from a process."""
    own = children(pid)
    return [*own, *(grandchild for child in own for grandchild in descendants(child))]


def is_actor(pid: int) -> bool:
    """Whether a process is an actor of Ray Data."""
    with suppress(OSError):
        return b"MapWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def kill(pid: int) -> None:
    """End a process at once, if it is there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
