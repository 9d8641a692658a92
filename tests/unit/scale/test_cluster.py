"""How long Ray's scheduling loop rests between two rounds, and which programs are no cluster."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tfexport.errors import TfexportError
from tfexport.scale import cluster
from tfexport.scale.cluster import LAST_TASKS, MOST_REST, Rhythm
from tfexport.scale.options import ClusterOptions


@pytest.mark.parametrize(("actors", "rest"), [(1, 0.3), (2, 0.3), (100, 0.006)])
def test_the_rest_is_half_of_a_task_or_the_time_between_two_shards(actors: int, rest: float) -> None:
    assert Rhythm(actors).rest(0.6) == pytest.approx(rest)


def test_the_rest_is_that_of_the_shortest_task_among_the_last() -> None:
    rhythm = Rhythm(2)
    assert [rhythm.rest(seconds) for seconds in (2.0, 2.0, 0.02)] == pytest.approx([1.0, 1.0, 0.01])
    assert [rhythm.rest(2.0) for _ in range(LAST_TASKS)] == pytest.approx([0.01] * (LAST_TASKS - 1) + [1.0])


def test_the_rest_is_never_longer_than_ray_waits_for_the_end_of_its_loop() -> None:
    assert Rhythm(1).rest(3600.0) == MOST_REST
    assert MOST_REST + 0.1 < 2  # `StreamingExecutor.shutdown` of Ray 2.60, after a round that waits a tenth for results


@contextmanager
def answering(content: bytes | None) -> Iterator[int]:
    """The port of a program that answers so, or not at all."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                if content is not None:
                    connection.sendall(content)
                    return
                done.wait(20)

        thread = threading.Thread(target=answer)
        thread.start()
        yield server.getsockname()[1]
        done.set()
        thread.join()


@pytest.mark.parametrize(
    ("content", "about"),
    [
        (b"HTTP/1.0 400 Bad Request\r\n", "another program answers"),
        (b"", "another program answers"),
        (None, "timed out"),
    ],
)
def test_another_program_is_no_cluster(content: bytes | None, about: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SECONDS_TO_ANSWER", 0.3)
    with answering(content) as port, pytest.raises(OSError, match=about):
        cluster._require_answer("127.0.0.1", port)


def test_a_grpc_server_may_be_a_cluster() -> None:
    with answering(bytes([0, 0, 6, 4, 0, 0, 0, 0, 0]) + b"\0" * 6) as port:
        cluster._require_answer("127.0.0.1", port)


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_a_cluster_with_tls_is_left_to_ray(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("RAY_USE_TLS", value)
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster._require_answer("127.0.0.1", server.getsockname()[1])


def test_an_empty_address_is_an_error() -> None:
    with pytest.raises(TfexportError, match="--address is empty"):
        ClusterOptions(address="")
