"""Worker processes from the side of the server: what is written to a connection stays in it."""

from __future__ import annotations

import os
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tfexport.scheduling.sentences import NO_ORDERS, Report
from tfexport.scheduling.workers import ProcessWorker


class SlowToWrite(Connection):
    """A connection whose descriptor is looked up some time before it is written to, as another thread may come between."""

    def _send(self, buf: Any, write: Any = os.write) -> None:
        descriptor = self._handle  # type: ignore[attr-defined]
        time.sleep(0.1)
        write(descriptor, buf)


def test_nothing_is_written_to_a_descriptor_that_has_another_use(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()

    class Forks:
        def fork(self) -> Connection:
            return SlowToWrite(ours.detach())

    ended = threading.Event()
    worker = ProcessWorker(Forks(), lambda *_: None, lambda *_: ended.set())  # type: ignore[arg-type]
    worker.send(NO_ORDERS)
    time.sleep(0.02)
    theirs.close()  # the worker ends while it is told something
    assert ended.wait(10)
    files = []
    until = time.monotonic() + 0.3
    while time.monotonic() < until:  # one of them gets the number of the connection, when that is closed
        files.append((tmp_path / str(len(files))).open("wb"))
        time.sleep(0.01)
    worker.close()
    for file in files:
        file.close()
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b""}


def test_a_worker_that_reads_nothing_does_not_keep_its_connection() -> None:
    ours, theirs = socket.socketpair()

    class Reads:
        def fork(self) -> Connection:
            return Connection(ours.detach())

    def fails(*_: Any) -> None:
        raise ValueError("a report that cannot be used")

    errors: list[BaseException | None] = []
    worker = ProcessWorker(Reads(), fails, lambda _, error: errors.append(error))  # type: ignore[arg-type]
    for _ in range(100):
        worker.send([b"x" * 100_000])  # type: ignore[arg-type]  # more than a socket takes
    worker_end = Connection(theirs.detach())
    worker_end.send(0)  # its process id
    worker_end.send(Report())
    worker.close()
    assert [type(error) for error in errors] == [ValueError]
