"""`/health` when the workers of a bundle have ended and cannot be replaced."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from fastapi.testclient import TestClient

from tfexport.scheduling.options import ServingOptions
from tfexport.serving.app import create_app
from tfexport.serving.catalog import Catalog, HowToLoad, Place


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text(encoding="ascii").split()]


def test_a_process_that_can_decode_nothing_any_more_is_not_healthy(quantized_bundle: Path) -> None:
    """Then Kubernetes and Ray start another."""
    before = set(children(os.getpid()))
    how = HowToLoad(scheduling=ServingOptions(worker_kind="processes"))
    catalog = Catalog([Place("tiny", quantized_bundle)], how)
    try:
        client = TestClient(create_app(catalog))
        assert client.get("/health").json() == {"status": "ok"}
        (server,) = set(children(os.getpid())) - before
        while not (workers := children(server)):
            time.sleep(0.01)
        os.kill(server, signal.SIGSTOP)  # so that it makes no new worker before it ends
        os.kill(workers[0], signal.SIGKILL)
        os.kill(server, signal.SIGKILL)
        os.kill(server, signal.SIGCONT)
        ends = time.monotonic() + 60
        while (answer := client.get("/health")).status_code == 200:
            client.post("/v1/translate", json={"text": "de4", "timeout": 1})
            assert time.monotonic() < ends
        assert answer.status_code == 503
        assert "the workers of tiny have ended" in answer.json()["error"]
    finally:
        catalog.close()
