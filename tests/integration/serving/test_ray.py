"""The server under Ray Serve: two replicas on this machine. What the proxy of Ray does is seen through HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import tfexport
from makers.paths import ROOT
from makers.tiny import SRC_VOCAB
from tfexport.errors import TfexportError

pytest.importorskip("ray", reason="Ray Serve is not installed: pip install 'tfexport[ray]'")
pytestmark = pytest.mark.thorough

LINES = [" ".join(f"de{4 + (n * 7 + place * 3) % (SRC_VOCAB - 4)}" for place in range(1 + n % 9)) for n in range(60)]
SEARCH: dict[str, Any] = {"beam": 4, "max_length": 24}
PATIENCE = 300.0
"""Seconds: a cluster starts some ten processes, and the machine may be busy."""


@dataclass
class Cluster:
    """Ray with two replicas, in processes of their own."""

    process: subprocess.Popen[str]
    url: str

    def translate(self, line: str | list[str], **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/translate", json={"text": line, **SEARCH, **options}, timeout=PATIENCE)

    def cancelled(self) -> int:
        """Requests that were cancelled in a replica, whichever Ray asks."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        (counters,) = json.loads(self.process.stdout.readline()).values()
        return int(counters["cancelled"])

    def replicas(self) -> list[int]:
        """Processes that answer."""
        return [pid for pid in descendants(self.process.pid) if name_of(pid).startswith("ray::ServeReplica")]


def descendants(pid: int) -> list[int]:
    try:
        found = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(child) for file in found for child in file.read_text(encoding="ascii").split()]
    except OSError:  # it has ended
        return []
    return [*children, *(one for child in children for one in descendants(child))]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(quantized_bundle: Path) -> Iterator[Cluster]:
    port = free_port()
    # Ray gives its workers a lower priority than other programs; on a busy machine nothing would go on.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PYTHONPATH"] = str(ROOT)
    environment["TFEXPORT_SERVE_REPLICAS"] = "2"
    command = [sys.executable, "-m", "tests.support.ray_driver", str(port)]
    process = subprocess.Popen(
        [*command, json.dumps({"bundles": f"tiny={quantized_bundle}", "precision": "int8"})],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        while process.stdout.readline() not in ("ready\n", ""):
            pass
        assert process.poll() is None
        yield Cluster(process, f"http://127.0.0.1:{port}")
    finally:
        all_of_it = descendants(process.pid)
        try:
            process.communicate(timeout=60)  # the end of stdin ends it
        except subprocess.TimeoutExpired:
            process.kill()
        for pid in all_of_it:
            if name_of(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def wanted(quantized_bundle: Path) -> dict[str, list[int]]:
    """The ids of each line's best output, without a server."""
    model = tfexport.load(quantized_bundle, precision="int8", threads=1)
    return {
        line: list(found.hypotheses[0].ids) for line, found in zip(LINES, model.translate(LINES, **SEARCH), strict=True)
    }


def ids_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return [int(number) for number in answer.json()["results"][0]["hypotheses"][0]["ids"]]


def test_answers_equal_those_without_a_server(cluster: Cluster, wanted: dict[str, list[int]]) -> None:
    assert len(cluster.replicas()) == 2
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(cluster.translate, LINES))
    assert [ids_of(answer) for answer in answers] == [wanted[line] for line in LINES]


def test_events_come_through(cluster: Cluster) -> None:
    asked = {"text": LINES[8], "max_length": 12, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/translate", json=asked, timeout=PATIENCE) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        names = [line for line in answer.iter_lines() if line.startswith("event: ")]
    assert len(names) > 2
    assert {*names[:-1]} == {"event: step"}
    assert names[-1] == "event: result"


def test_errors_come_through(cluster: Cluster) -> None:
    answer = cluster.translate(LINES[0], model="other")
    assert answer.status_code == 404
    assert "tiny" in answer.json()["error"]


def test_who_goes_away_is_cancelled(cluster: Cluster) -> None:
    before = max(cluster.cancelled() for _ in range(8))
    ends = time.monotonic() + PATIENCE
    while max(cluster.cancelled() for _ in range(8)) <= before:
        assert time.monotonic() < ends
        # Again and again: a replica may answer before it hears that nobody waits.
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{cluster.url}/v1/translate", json={"text": LINES * 17, **SEARCH}, timeout=0.3)


def test_a_replica_that_is_killed_costs_errors_and_no_wrong_answer(
    cluster: Cluster, wanted: dict[str, list[int]]
) -> None:
    """Ray answers 500 to requests that the replica had, and gives those after them to the other one."""
    lines = LINES * 5
    victim = cluster.replicas()[0]
    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(cluster.translate, line) for line in lines]
        answers[40].result()
        os.kill(victim, signal.SIGKILL)
        found = [answer.result() for answer in answers]
    assert all(ids_of(answer) == wanted[line] for line, answer in zip(lines, found, strict=True) if answer.is_success)
    failed = [answer.status_code for answer in found if not answer.is_success]
    assert set(failed) <= {500, 503}
    assert len(failed) <= 8  # no more than there were at once
    assert [ids_of(cluster.translate(line)) for line in LINES] == [wanted[line] for line in LINES]
    ends = time.monotonic() + PATIENCE
    while len(cluster.replicas()) < 2:
        assert time.monotonic() < ends
        time.sleep(0.5)
    assert victim not in cluster.replicas()


def test_arguments_are_strings_or_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfexport.scheduling.options import ServingOptions
    from tfexport.serving.ray import Arguments
    from tfexport.serving.replica_options import ReplicaOptions

    monkeypatch.setenv("TFEXPORT_SERVE_SLOTS", "16")
    monkeypatch.setenv("TFEXPORT_SERVE_REPLICAS", "3")
    given = Arguments(bundles="de-en=/a,/b", replicas="2", precision="int8")
    assert given.bundles == ["de-en=/a", "/b"]
    assert (given.of(ReplicaOptions).replicas, given.of(ServingOptions).slots) == (2, 16)
    for wrong in (
        {"replicas": "0"},
        {"port": "80"},
        {"worker_kind": "processes"},
        {"precision": "fp8"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Arguments(**{"bundles": "/a", **wrong})


def test_the_deployment_has_what_the_arguments_say() -> None:
    from tfexport.serving.ray import Arguments, deployment_options

    def found(**given: str) -> dict[str, Any]:
        return dict(deployment_options(Arguments(bundles="/a", **given)))

    assert found(replicas="3")["num_replicas"] == 3
    assert found(workers="2", threads="2")["ray_actor_options"] == {"num_cpus": 4}
    assert found(max_replicas="4")["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 4,
        "target_ongoing_requests": 32.0,
    }
    with pytest.raises(TfexportError, match="max_replicas is 1, below replicas, which is 2"):
        found(replicas="2", max_replicas="1")
