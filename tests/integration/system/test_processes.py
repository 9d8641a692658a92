"""What a fork keeps of its parent."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tfexport.system.processes import close_sockets


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_a_fork_closes_the_sockets_of_its_parent_but_one() -> None:
    ours, theirs = socket.socketpair()
    kept, told = socket.socketpair()
    with ours, theirs, kept, told:
        child = os.fork()
        if child == 0:
            close_sockets(keep=told.fileno())
            told.send(b"x")
            time.sleep(60)
            os._exit(0)
        try:
            told.close()
            kept.settimeout(10)
            assert kept.recv(1) == b"x"
            theirs.close()
            ours.settimeout(10)
            assert ours.recv(1) == b""  # nobody else has the other end
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
