"""Bundles behind the HTTP server: in this process, or in one of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from tfexport.scheduling.options import ServingOptions
from tfexport.serving.app import create_app
from tfexport.serving.catalog import Catalog, HowToLoad, Place

_RUNNING = re.compile(r"running on (http://\S+)")
STARTS_WITHIN = 120
"""Seconds."""


@contextmanager
def application(bundles: Mapping[str, Path], precision: str | None = None, **scheduling: Any) -> Iterator[Any]:
    """The application over bundles by name, without a socket. It is closed when the block ends."""
    how = HowToLoad(precision=precision, scheduling=ServingOptions(**scheduling))
    catalog = Catalog([Place(name, folder) for name, folder in bundles.items()], how)
    try:
        yield create_app(catalog)
    finally:
        catalog.close()


@contextmanager
def client(bundles: Mapping[str, Path], **scheduling: Any) -> Iterator[TestClient]:
    """A client of `application`. What it raises is an answer with the status 500, as a client sees it."""
    with application(bundles, **scheduling) as app, TestClient(app, raise_server_exceptions=False) as found:
        yield found


@contextmanager
def process(bundles: Mapping[str, Path], flags: Sequence[str] = ()) -> Iterator[str]:
    """`tfexport serve` over bundles by name: its address. It is ended when the block ends.

    Raises:
        RuntimeError: it does not start.
    """
    given = [f"{name}={folder}" for name, folder in bundles.items()]
    command = [sys.executable, "-m", "tfexport", "serve", *given, "--port", "0", *flags]
    server = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    watch = threading.Timer(STARTS_WITHIN, server.kill)
    watch.start()
    try:
        said: list[str] = []
        for line in server.stderr:
            said.append(line)
            if found := _RUNNING.search(line):
                break
        else:
            raise RuntimeError(f"the server ended: {''.join(said)}")
        watch.cancel()
        # Somebody has to read what it says, or it waits.
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield found[1]
    finally:
        watch.cancel()
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
