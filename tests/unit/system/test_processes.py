"""Freed memory goes back to the system."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

import tfexport.decoding.workers
import tfexport.system.processes
from tfexport.system.processes import return_freed_memory


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
