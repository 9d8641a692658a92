"""`tfexport serve` in a process of its own, with its metrics, workers and size."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from makers.paths import ROOT
from makers.processes import ENVIRONMENT, TFEXPORT, children


@dataclass
class Running:
    """A server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def metric(self, name: str, headers: dict[str, str] | None = None) -> float:
        """The sum of a metric over its labels.

        Args:
            name: with all labels, or without any.
        """
        text = httpx.get(f"{self.url}/metrics", headers=headers, timeout=60).text
        return sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))
        )

    def wait_for(self, name: str, least: float, seconds: float = 60) -> float:
        """A metric, when it is at least as large."""
        end = time.monotonic() + seconds
        while (found := self.metric(name)) < least and time.monotonic() < end:
            time.sleep(0.05)
        assert found >= least, f"{name} is {found}, not {least}"
        return found


@contextmanager
def serving(log: Path, *arguments: object) -> Iterator[Running]:
    """`tfexport serve ARGUMENTS` on a free port, which is ended at the end of the block.

    Args:
        log: what it says goes there.
    """
    command = [TFEXPORT, "serve", *map(str, arguments), "--port", "0"]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as said:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        yield Running(process, _port_of(process, log), log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port_of(process: subprocess.Popen[bytes], log: Path) -> int:
    for _ in range(2400):
        found = re.search(r"running on http://[^ ]*:(\d+)", log.read_text(encoding="utf-8"))
        if found:
            return int(found[1])
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(log.read_text(encoding="utf-8"))


def workers(of: Running) -> list[int]:
    """The worker processes of a server: children of its fork servers."""
    return [worker for server in children(of.process.pid) for worker in children(server)]


@dataclass
class Size:
    """Of a server with its processes."""

    resident: int = 0
    files: int = 0
    threads: int = 0

    @classmethod
    def of(cls, running: Running) -> Size:
        found, parents = cls(), children(running.process.pid)
        for process in [running.process.pid, *parents, *workers(running)]:
            found.resident += _own_memory(process)
            found.files += len(os.listdir(f"/proc/{process}/fd"))
            found.threads += len(os.listdir(f"/proc/{process}/task"))
        return found


def _own_memory(process: int) -> int:
    """Bytes in memory, of which shared ones count for a part."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
