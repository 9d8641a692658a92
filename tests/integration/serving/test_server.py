"""`tfexport serve` as a process: signals, connections, reloads and faults."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from makers.processes import children
from makers.servers import Running, serving, workers
from makers.serving_bundle import write_bundle
from tests.support.commands import Run
from tests.support.shared import made_once
from tfexport.bundle.reader import open_bundle

IDS = [5, 6, 7, 8, 9]
LONG = {"ids": [IDS] * 600, "beam": 4, "min_length": 50, "max_length": 55}
"""It takes a while."""
HALF_REQUEST = (
    b"POST /v1/translate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
)
MANY_REQUESTS = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 300


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a random model, without words."""

    def make(folder: Path) -> None:
        folder.mkdir()
        write_bundle(folder)

    return made_once(tmp_path_factory, "served", make) / "bundle"


@pytest.fixture(scope="module")
def running(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with two worker processes, few connections and little patience. It is not to be ended."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = [
        "--workers",
        2,
        "--max-connections",
        6,
        "--receive-timeout",
        1,
        "--send-timeout",
        1,
        "--log-format",
        "json",
    ]
    with serving(log, f"model={bundle}", *options) as found:
        yield found


def in_background(running: Running, body: object) -> tuple[threading.Thread, list[httpx.Response]]:
    """Send a request, and wait until the server has taken it."""
    answers: list[httpx.Response] = []
    before = running.metric("tfexport_requests_total")
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{running.url}/v1/translate", json=body, timeout=120)), daemon=True
    )
    thread.start()
    for _ in range(500):
        if running.metric("tfexport_requests_total") > before:
            return thread, answers
        time.sleep(0.01)
    raise AssertionError("the request was not taken")


def test_connections_are_bounded(running: Running) -> None:
    sockets = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(6)]
    try:
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", running.port)) as refused:
            refused.settimeout(5)
            assert refused.recv(100).startswith(b"HTTP/1.1 503 Service Unavailable")
    finally:
        for one in sockets:
            one.close()
    time.sleep(0.5)
    assert httpx.get(f"{running.url}/health").status_code == 200
    assert running.metric('tfexport_http_refused_total{reason="connections"}') >= 1


def test_half_of_a_request_is_not_waited_for(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port)) as headers:
        headers.settimeout(10)
        headers.send(b"POST /v1/tr")
        assert headers.recv(100) == b""
    with socket.create_connection(("127.0.0.1", running.port)) as body:
        body.settimeout(10)
        body.send(HALF_REQUEST)
        assert body.recv(100).startswith(b"HTTP/1.1 408 ")


def test_headers_are_bounded(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port)) as client:
        client.settimeout(20)
        client.sendall(b"GET /health HTTP/1.1\r\nX-A: ")
        try:
            for _ in range(100):
                client.sendall(b"a" * 100_000)
        except OSError:
            return  # the server has closed it already
        assert client.recv(100).startswith(b"HTTP/1.1 431 ")


def test_who_reads_nothing_loses_the_connection(running: Running) -> None:
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", running.port))
        slow.send(MANY_REQUESTS)
        running.wait_for('tfexport_http_refused_total{reason="slow reader"}', 1)
    assert "Traceback" not in running.log.read_text(encoding="utf-8")


def test_a_worker_that_is_killed_costs_no_answer(running: Running) -> None:
    thread, answers = in_background(running, LONG)
    os.kill(workers(running)[0], signal.SIGKILL)
    thread.join(120)
    assert answers[0].status_code == 200
    assert len(answers[0].json()["results"]) == 600
    assert running.metric("tfexport_worker_restarts_total") == 1


def test_logs_are_json(running: Running) -> None:
    httpx.get(f"{running.url}/v1/models", headers={"X-Request-ID": "models"})
    for _ in range(100):
        lines = [json.loads(line) for line in running.log.read_text().splitlines() if line.startswith("{")]
        if found := [line for line in lines if line.get("id") == "models"]:
            break
        time.sleep(0.05)
    assert found[0]["address"] == "/v1/models"


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_taken_is_answered_before_the_end(bundle: Path, tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path / "log", f"model={bundle}", "--workers", 2, "--drain-delay", 4) as it:
        thread, answers = in_background(it, {**LONG, "priority": "bulk"})  # others need not wait for it
        it.process.send_signal(number)
        time.sleep(0.3)
        ready = httpx.get(f"{it.url}/ready")  # connections are still taken
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        short = httpx.post(f"{it.url}/v1/translate", json={"ids": [IDS]}, timeout=60)
        assert (short.status_code, short.headers["connection"]) == (200, "close")
        thread.join(120)
        assert answers[0].status_code == 200
        assert it.process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{it.url}/health")


def test_the_end_does_not_wait_for_ever(bundle: Path, tmp_path: Path) -> None:
    endless = {**LONG, "ids": [IDS] * 1024, "beam": 16}
    with serving(tmp_path / "log", f"model={bundle}", "--workers", 1, "--drain-timeout", 1) as it:
        thread, answers = in_background(it, endless)
        it.process.terminate()
        assert it.process.wait(60) == 143
        thread.join(60)
        assert answers[0].status_code == 503
        assert answers[0].json() == {"error": "the server ended before this request was answered. Send it again."}


def test_a_second_signal_ends_at_once(bundle: Path, tmp_path: Path) -> None:
    endless = {**LONG, "ids": [IDS] * 1024, "beam": 16}
    with serving(tmp_path / "log", f"model={bundle}", "--workers", 1) as it:
        in_background(it, endless)
        it.process.terminate()
        time.sleep(0.5)
        assert it.process.poll() is None
        it.process.send_signal(signal.SIGINT)
        assert it.process.wait(20) == 143


def test_what_cannot_be_served_is_told_before_the_port_is_opened(bundle: Path, tmp_path: Path, run: Run) -> None:
    def said(*arguments: object) -> str:
        done = run("serve", *arguments, "--workers", 1)
        assert done.code == 2, done.stderr
        assert "running on" not in done.stderr
        return done.stderr.splitlines()[-1]

    damaged = Path(shutil.copytree(bundle, tmp_path / "damaged"))
    with (damaged / "weights.safetensors").open("ab") as file:
        file.write(b"x")
    assert said(damaged, "--port", 0).startswith("error: ")
    assert "is not served" in said(bundle, "--port", 0, "--certified")
    assert "cannot read the keys" in said(bundle, "--port", 0, "--keys", tmp_path / "none")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1, port {port}" in said(bundle, "--port", port)


@pytest.mark.thorough
def test_a_bundle_is_replaced_again_and_again_under_load(bundle: Path, tmp_path: Path) -> None:
    """Each answer is that of the old or of the new bundle, and none is lost."""
    import torch

    from makers.serving_bundle import CONFIG, small_model
    from tfexport.api.model import load
    from tfexport.exporter.pipeline import export
    from tfexport.models.checkpoints.load import load_checkpoint
    from tfexport.models.formats import native

    other = small_model()
    with torch.no_grad():
        other.output_bias[CONFIG.eos_id] -= 3  # type: ignore[index]
    native.save(
        tmp_path / "other.safetensors", other.state_dict(), CONFIG, native.Tokenizers(None, None), torch.float32
    )
    export(load_checkpoint(tmp_path / "other.safetensors", {}), tmp_path / "other", gate=None)
    bundles = [bundle, tmp_path / "other"]
    sources = [[4 + (n * 7 + place) % 40 for place in range(1 + n % 9)] for n in range(20)]
    wanted = []
    for one in bundles:
        open_bundle(one)
        wanted.append([found.hypotheses[0].ids for found in load(one, threads=1).translate_ids(sources)])
    place = Path(shutil.copytree(bundles[0], tmp_path / "served"))
    problems: list[str] = []
    seen, is_over = {0: 0, 1: 0}, threading.Event()

    def ask(to: Running) -> None:
        with to.client() as client:
            while not is_over.is_set():
                answer = client.post("/v1/translate", json={"ids": sources})
                found = [tuple(one["hypotheses"][0]["ids"]) for one in answer.json().get("results", [])]
                if found in wanted:
                    seen[wanted.index(found)] += 1
                else:
                    problems.append(f"{answer.status_code}: {answer.text[:200]}")

    options = ["--workers", 2, "--reload", "--reload-every", 0.2, "--max-wait", 60]
    with serving(tmp_path / "log", f"model={place}", *options) as it:
        threads = [threading.Thread(target=ask, args=(it,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(1, 21):
            new = Path(shutil.copytree(bundles[number % 2], tmp_path / "new"))
            place.rename(tmp_path / "old")
            new.rename(place)
            shutil.rmtree(tmp_path / "old")
            if number % 2:
                it.process.send_signal(signal.SIGHUP)
            it.wait_for('tfexport_reloads_total{model="model",outcome="loaded"}', number)
        is_over.set()
        for thread in threads:
            thread.join(60)
        assert problems == []
        assert min(seen.values()) > 0
        for _ in range(100):
            if len(children(it.process.pid)) == 1:
                break
            time.sleep(0.1)
        assert len(children(it.process.pid)) == 1  # the old bundles' processes have ended
        assert it.metric('tfexport_reloads_total{model="model",outcome="failed"}') == 0
