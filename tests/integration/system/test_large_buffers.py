"""Large buffers go back to the system when they are freed."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tfexport.system.processes import LARGE_BUFFER

SIZES = """
import tfexport.system.processes as processes
from pathlib import Path
LARGE_BUFFER = processes.LARGE_BUFFER
if {mapped}:
    processes.map_large_buffers()
kept = []
for _ in range(5):
    one = bytearray(LARGE_BUFFER + 4096)  # the first of its size, when freed, teaches glibc to take such from its heap
    kept.append(bytearray(100_000))  # so that the heap cannot shrink to before it
    del one
    two = bytearray(LARGE_BUFFER + 8192)
    kept.append(bytearray(100_000))
    del two
print(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not change their threshold")
def test_large_buffers_leave_no_gaps_in_the_heap() -> None:
    sizes = [
        int(subprocess.run([sys.executable, "-c", SIZES.format(mapped=mapped)], capture_output=True, check=True).stdout)
        for mapped in (False, True)
    ]
    assert sizes[0] - sizes[1] > LARGE_BUFFER / 2
