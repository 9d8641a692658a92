"""The servers that are compared: how each is started, what it uses, and how it rests while another is measured."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import psutil  # type: ignore[import-untyped]

from benchmarks.serve import OURS

STARTS_WITHIN = 180.0
"""Seconds."""
HOST = "127.0.0.1"


@dataclass(frozen=True)
class System:
    """A server of one model.

    Attributes:
        name: what the report calls it.
        module: that Python runs, with `arguments` and a port.
        ready: the path that answers when it can be asked.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    ready: str = "/health"


def ours(bundle: Path, precision: str, *more: str) -> System:
    """`tfexport serve`: continuous batching."""
    given = ("serve", f"model={bundle}", "--precision", precision, *more)
    return System(OURS, "tfexport", given, "/ready")


def behind_litserve(engine: str, bundle: Path, precision: str, *more: str) -> System:
    """An engine behind LitServe: dynamic batching."""
    given = (engine, str(bundle), "--precision", precision, *more)
    return System(f"{engine}, LitServe", "benchmarks.serve.lit", given)


class Running:
    """A server that runs until the block ends.

    Raises:
        RuntimeError: it does not start.
    """

    def __init__(self, system: System):
        self.system = system

    def __enter__(self) -> Self:
        port = _free_port()
        self.address = f"http://{HOST}:{port}"
        self._log: IO[bytes] = tempfile.TemporaryFile()
        command = [sys.executable, "-m", self.system.module, *self.system.arguments, "--port", str(port)]
        alone = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=alone, start_new_session=True
        )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        several = self._family()
        for process in several:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for process in several:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._log.close()

    @property
    def cpu_seconds(self) -> float:
        """User and system time of all its processes."""
        total = 0.0
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    @property
    def memory(self) -> int:
        """Bytes of all its processes; what they share is counted once (PSS)."""
        total = 0
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total

    def rest(self) -> None:
        """Stop: some servers look for work all the time."""
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def go_on(self) -> None:
        """End a rest."""
        for process in reversed(self._family()):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def _family(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _wait(self) -> None:
        until = time.monotonic() + STARTS_WITHIN
        while time.monotonic() < until and self._process.poll() is None:
            with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(self.address + self.system.ready, timeout=5).close()
                return
            time.sleep(0.2)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()[-5:]
        raise RuntimeError(f"{self.system.name} does not start:\n" + "\n".join(said))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])
