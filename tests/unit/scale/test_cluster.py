"""Which programs are no cluster."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tfexport.errors import TfexportError
from tfexport.scale import cluster
from tfexport.scale.options import ClusterOptions


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
