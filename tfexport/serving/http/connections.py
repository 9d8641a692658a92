"""Connections under uvicorn: how many there are, and how long a client may take to send its headers and to read an answer.

uvicorn waits for both without end. Bodies have their time in `bodies.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tfexport.serving.options import ServerOptions
from tfexport.serving.telemetry.metrics import Metrics

CHECK_EVERY = 0.5
"""Seconds between two looks at all connections."""

MOST_HEADERS = 64 * 1024
"""Bytes of the headers of a request. Parsers take longer for each byte of a long one, and hold up all other requests."""

FULL = b'{"error":"the server has too many connections. Try again."}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(FULL), FULL)
)


LARGE_HEADERS = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _Counted:
    """A transport that counts what was written to it: with what is left in its buffer, that tells what was sent."""

    def __init__(self, transport: asyncio.Transport):
        self._transport, self.written = transport, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        # uvicorn may still answer a request that was sent before the last one, and uvloop raises where others drop it.
        if not self._transport.is_closing():
            self.written += len(data)
            self._transport.write(data)


@dataclass
class _Progress:
    """Of what a client reads."""

    sent: int = 0
    since: float = 0.0
    """When it last was more, or nothing was left to read."""


class Connection(HttpToolsProtocol):
    """A connection that knows how long it waits for its client."""

    def __init__(self, options: ServerOptions, metrics: Metrics, **uvicorn: Any):
        super().__init__(**uvicorn)
        self._options, self._metrics = options, metrics
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
        if self._headers_since is not None:  # they go on
            self._header_bytes += len(data)
            if self._header_bytes > MOST_HEADERS and not self._counted.is_closing():
                self._metrics.refused.labels("large headers").inc()
                self._counted.write(LARGE_HEADERS)
                self._counted.close()

    def on_headers_complete(self) -> None:
        self._headers_since, self._header_bytes = None, 0
        super().on_headers_complete()

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


async def check_always(connections: Iterable[Any]) -> None:
    """Check connections until the task is cancelled."""
    while True:
        await asyncio.sleep(CHECK_EVERY)
        now = time.monotonic()
        for connection in list(connections):
            if isinstance(connection, Connection):
                connection.check(now)
