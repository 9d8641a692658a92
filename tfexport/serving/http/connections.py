"""Connections under uvicorn: limits of their number, and of the time to send headers and to read a response.

uvicorn has no limit for these times. `bodies.py` limits the time of bodies.

While a scheduler is full, requests are rejected here. A request that reaches the application costs a fraction of a
translation's time, and under heavy overload the server would do little else.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tfexport.errors import QueueFullError
from tfexport.serving.options import ServerOptions
from tfexport.serving.problems import Problem
from tfexport.serving.telemetry.metrics import Metrics

CHECK_EVERY = 0.5
"""Seconds between two checks of all connections."""

MOST_HEADERS = 64 * 1024
"""The largest size of a request's headers in bytes. Parsers are slow for long headers, and delay all other requests."""

FULL = b'{"error":"the server has too many connections. Try again."}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(FULL), FULL)
)


SHORT_BODY = 16 * 1024
"""The largest size of a request that is rejected here, in bytes. The application rejects longer ones, and those without
a length."""

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open. This is longer than the 60 seconds of proxies. Otherwise a proxy may send a
request into a connection that is being closed."""

LOOKS = (b"GET", b"HEAD", b"OPTIONS")
LARGE_HEADERS = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _Counted:
    """A transport that counts the written bytes. Minus the bytes in its buffer, that is the number of sent bytes."""

    def __init__(self, transport: asyncio.Transport):
        self._transport, self.written = transport, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        # uvicorn may still answer an earlier request of the connection, and uvloop raises where other loops drop the data.
        if not self._transport.is_closing():
            self.written += len(data)
            self._transport.write(data)


@dataclass
class _Progress:
    """The progress of a client that reads a response."""

    sent: int = 0
    since: float = 0.0
    """The last time at which the client had read more, or had read everything."""


class Connection(HttpToolsProtocol):
    """A connection that measures how long it waits for its client.

    Args:
        refusal: the reason to reject requests other than GET now; None to accept them.
    """

    def __init__(
        self,
        options: ServerOptions,
        metrics: Metrics,
        refusal: Callable[[], QueueFullError | None] = lambda: None,
        **uvicorn: Any,
    ):
        super().__init__(**uvicorn)
        self._options, self._metrics, self._refusal = options, metrics, refusal
        self._refused: bytes | None = None
        """The response to a request whose body has not arrived yet."""
        self._counted: _Counted | None = None
        self._progress = _Progress()
        self._headers_since: float | None = None
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._options.max_connections:
            self._metrics.refused.labels("connections").inc()
            transport.write(REFUSAL)
            transport.close()
            return
        self._counted = _Counted(transport)
        self._headers_since = self._progress.since = time.monotonic()
        super().connection_made(self._counted)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._counted is not None:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._counted is None:
            return
        if self._headers_since is None and (self.cycle is None or self.cycle.response_complete):
            self._headers_since = time.monotonic()
        super().data_received(data)
        if self._headers_since is not None:  # headers continue
            self._header_bytes += len(data)
            if self._header_bytes > MOST_HEADERS and not self._counted.is_closing():
                self._metrics.refused.labels("large headers").inc()
                self._counted.write(LARGE_HEADERS)
                self._counted.close()

    def on_headers_complete(self) -> None:
        self._header_bytes = 0
        if (full := self._refusal()) is not None and self._is_short():
            # The time limit for headers covers the body too.
            self._refused = _refusal_of(full, keep_alive=self.parser.should_keep_alive())
            return
        self._headers_since = None
        super().on_headers_complete()

    def _is_short(self) -> bool:
        """Whether the connection can reject this request without the application: it is short, and no other is running."""
        is_first = self.cycle is None or self.cycle.response_complete
        if not is_first or self.expect_100_continue or self.parser.get_method() in LOOKS or self._options.cors:
            return False
        length = dict(self.headers).get(b"content-length", b"")
        return length.isdigit() and int(length) <= SHORT_BODY

    def on_body(self, body: bytes) -> None:
        if self._refused is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refused is None:
            super().on_message_complete()
            return
        assert self._counted is not None
        answer, self._refused, self._headers_since = self._refused, None, None
        self._metrics.refused.labels("queue").inc()
        self._counted.write(answer)
        if not self.parser.should_keep_alive():
            self._counted.close()
        self.on_response_complete()  # waits for the next request

    def check(self, now: float) -> None:
        """End the connection if its client takes too long."""
        if self._counted is None:
            return
        left, progress = self._counted.get_write_buffer_size(), self._progress
        sent = self._counted.written - left
        if not left or sent > progress.sent:
            progress.sent, progress.since = sent, now
        elif now - progress.since > self._options.send_timeout:
            self._abort("slow reader")
        if self._headers_since is not None and now - self._headers_since > self._options.receive_timeout:
            self._abort("slow headers")

    def _abort(self, reason: str) -> None:
        assert self._counted is not None
        if self in self.connections:
            self._metrics.refused.labels(reason).inc()
        self._counted.abort()


def _refusal_of(full: QueueFullError, *, keep_alive: bool) -> bytes:
    """The response with the status and the headers that the application would send."""
    problem = Problem.of(full)
    body = json.dumps({"error": problem.message}).encode()
    headers = {**problem.headers, "Content-Type": "application/json", "Content-Length": str(len(body))}
    if not keep_alive:
        headers["Connection"] = "close"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {problem.status} Too Many Requests\r\n{lines}\r\n".encode() + body


async def check_always(connections: Iterable[Any]) -> None:
    """Check connections until the task is cancelled."""
    while True:
        await asyncio.sleep(CHECK_EVERY)
        now = time.monotonic()
        for connection in list(connections):
            if isinstance(connection, Connection):
                connection.check(now)
