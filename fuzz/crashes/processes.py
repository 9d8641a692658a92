"""Processes on Linux: which come from which, and their end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """The processes that come from a process."""
    try:
        found = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(child) for file in found for child in file.read_text(encoding="ascii").split()]
    except OSError:  # it has ended
        return []
    return [*children, *(one for child in children for one in descendants(child))]


def is_actor(pid: int) -> bool:
    """Whether a process is an actor of Ray Data."""
    with suppress(OSError):
        return b"MapWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def kill(pid: int) -> None:
    """End a process at once, if it is there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
