"""`/health` when the workers of a bundle hang, or have ended and cannot be replaced."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tfexport.scheduling.options import ServingOptions
from tfexport.serving.app import create_app
from tfexport.serving.catalog import Catalog, CatalogEntry, HowToLoad


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text(encoding="ascii").split()]


def test_a_process_that_can_decode_nothing_any_more_is_not_healthy(quantized_bundle: Path) -> None:
    """Then Kubernetes and Ray start another."""
    before = set(children(os.getpid()))
    how = HowToLoad(scheduling=ServingOptions(worker_kind="processes"))
    catalog = Catalog([CatalogEntry("tiny", quantized_bundle)], how)
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
        assert "the workers of tiny have ended or hang" in answer.json()["error"]
    finally:
        catalog.close()


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_worker_that_hangs_is_replaced_or_shows_in_health(quantized_bundle: Path, is_replaced: bool) -> None:
    """A stopped fork server makes no worker that could replace a stopped one."""
    before = set(children(os.getpid()))
    how = HowToLoad(scheduling=ServingOptions(worker_kind="processes", worker_timeout=1))
    catalog = Catalog([CatalogEntry("tiny", quantized_bundle)], how)
    stopped: list[int] = []
    try:
        client = TestClient(create_app(catalog))
        assert client.post("/v1/translate", json={"text": "de4"}).status_code == 200
        (server,) = set(children(os.getpid())) - before
        stopped = [*children(server), *([] if is_replaced else [server])]
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as waits:
            answer = waits.submit(client.post, "/v1/translate", json={"text": "de4", "timeout": 20})
            if not is_replaced:
                time.sleep(1.5)
                assert client.get("/health").status_code == 503
            assert answer.result().status_code == (200 if is_replaced else 503)
        assert client.get("/health").status_code == 200  # the new worker may start yet
        if not is_replaced:
            time.sleep(1.5)
            assert client.get("/health").status_code == 503
    finally:
        began = time.monotonic()
        catalog.close()  # although they are still stopped
        assert time.monotonic() - began < 20
    assert not Path(f"/proc/{server}").exists()
