"""Connections that refuse requests while a scheduler has no room."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tfexport.errors import QueueFullError
from tfexport.serving.http.connections import SHORT_BODY, Connection
from tfexport.serving.options import ServerOptions
from tfexport.serving.state import State
from tfexport.serving.telemetry.metrics import Metrics

FULL = QueueFullError("too much waits", 2.5)
POST = "POST /v1/translate HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n{}\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.ended = b"", ""

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def get_write_buffer_size(self) -> int:
        return 0

    def resume_reading(self) -> None:
        pass


class Client:
    """A connection, and the requests that reached the application. It answers 200."""

    def __init__(self, **options: Any):
        self.reached: list[str] = []
        self.full: QueueFullError | None = FULL
        catalog: Any = SimpleNamespace(served=[])
        metrics = Metrics(catalog, State())
        config = uvicorn.Config(self._answer, interface="asgi3", lifespan="off", log_config=None)
        config.load()
        self.transport = Transport()
        self.connection = Connection(
            ServerOptions(**options),
            metrics,
            Counter(),
            lambda headers, address: self.full,
            config=config,
            server_state=ServerState(),
            app_state={},
        )
        self.connection.connection_made(self.transport)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["method"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def send(self, text: str) -> str:
        """What is answered at once."""
        before = len(self.transport.written)
        self.connection.data_received(text.encode())
        await asyncio.sleep(0.01)
        return self.transport.written[before:].decode()


def test_a_request_is_refused_with_what_the_application_would_say() -> None:
    async def run() -> None:
        client = Client()
        for _ in range(2):  # the connection stays open
            answer = await client.send(POST.format(2, "") + "{}")
            head, _, body = answer.partition("\r\n\r\n")
            assert head.startswith("HTTP/1.1 429 Too Many Requests\r\n")
            assert "Retry-After: 3" in head
            assert f"Content-Length: {len(body)}" in head
            assert body == '{"error": "too much waits"}'
        assert client.reached == []
        client.full = None
        assert (await client.send(POST.format(2, "") + "{}")).startswith("HTTP/1.1 200")
        assert client.reached == ["POST"]

    asyncio.run(run())


@pytest.mark.parametrize(
    "request_text",
    [
        "GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
        POST.format(SHORT_BODY + 1, "") + "a" * (SHORT_BODY + 1),
        POST.format(2, "expect: 100-continue\r\n") + "{}",
        POST.replace("content-length: {}", "transfer-encoding: chunked").format("") + "0\r\n\r\n",
    ],
    ids=["look", "long", "expect", "chunked"],
)
def test_other_requests_reach_the_application(request_text: str) -> None:
    async def run() -> None:
        client = Client()
        await client.send(request_text)
        assert len(client.reached) == 1

    asyncio.run(run())


def test_pages_of_other_origins_are_answered_by_the_application_which_knows_their_headers() -> None:
    async def run() -> None:
        client = Client(cors=["https://example.org"])
        await client.send(POST.format(2, "") + "{}")
        assert client.reached == ["POST"]

    asyncio.run(run())


def test_a_body_that_does_not_come_ends_the_connection() -> None:
    async def run() -> None:
        client = Client(receive_timeout=5)
        assert await client.send(POST.format(2, "") + "{") == ""
        now = asyncio.get_running_loop().time()
        client.connection.check(now + 4)
        assert client.transport.ended == ""
        client.connection.check(now + 6)
        assert client.transport.ended == "aborted"

    asyncio.run(run())


def test_a_client_that_wants_no_further_answers_gets_none() -> None:
    async def run() -> None:
        client = Client()
        answer = await client.send(POST.format(2, "connection: close\r\n") + "{}")
        assert "Connection: close" in answer
        assert client.transport.ended == "closed"

    asyncio.run(run())
