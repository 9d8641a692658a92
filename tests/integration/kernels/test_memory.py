"""A kernel whose threads get no memory: an error, and the process goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tfexport import kernels

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import re, resource
from pathlib import Path
import numpy as np
from tests.integration.kernels.test_kernels import called

def attend(tokens):
    ones = np.ones((2, tokens, 1, 128), np.float32)
    feeds = {"query": ones.reshape(2, tokens, 128), "key": ones, "value": ones, "length": np.full(2, tokens, np.int32)}
    return called("SourceAttention", feeds, kernel=True, threads=2)

attend(300)
status = Path("/proc/self/status").read_text()
size = int(re.search(r"VmSize:\\s+(\\d+) kB", status)[1]) << 10
# There is room for the inputs of 102 MB and an output, but not for what each thread needs: 104 MB.
resource.setrlimit(resource.RLIMIT_AS, (size + (300 << 20), resource.RLIM_INFINITY))
try:
    attend(100_000)
except Exception as error:
    print(error)
(mixed,) = attend(300)
print("goes on", float(mixed.mean()))
"""


@pytest.mark.skipif(kernels.library() is None, reason="the kernels are not built here")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits a process's memory")
def test_threads_without_memory_end_the_call_and_not_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "there is not enough memory" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("goes on 1.0\n"), done.stdout + done.stderr
    assert done.returncode == 0
