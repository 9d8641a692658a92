"""This process and its CPUs."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1


def usable_cpus() -> int:
    """CPUs that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's model, as it calls itself."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def end_with_parent() -> None:
    """Let this process be killed when its parent dies, on Linux: it may be stopped or waiting, and would stay for ever."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
