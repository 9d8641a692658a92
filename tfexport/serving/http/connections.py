"""Connections under uvicorn: limits of their number, and of the time to send headers and to read a response.

uvicorn has no limit for these times. `bodies.py` limits the time of bodies.

While a scheduler is full, requests are rejected here. A request that reaches the application costs a fraction of a
translation's time, and under heavy overload the server would do little else.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr

from tfexport.errors import QueueFullError
from tfexport.serving.http.clients import network_of
from tfexport.serving.http.methods import SAFE_METHODS
from tfexport.serving.options import ServerOptions
from tfexport.serving.problems import Problem
from tfexport.serving.telemetry.metrics import Metrics

CHECK_EVERY = 0.5
"""Seconds between two checks of all connections."""

MOST_HEADERS = 64 * 1024
"""The largest size of a request in bytes without its body: headers, and the framing of chunks. Parsers are slow for long
headers, and delay all other requests."""
CHUNK = 16
"""The largest number of bytes of framing for each byte of a body. A chunk of one byte has 5 bytes of framing."""

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

LARGE_HEADERS = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FRAMING = (b"content-length", b"transfer-encoding", b"connection")
"""The headers that determine the end of a request."""


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


class _Parser(httptools.HttpRequestParser):
    """A parser that ignores `Upgrade`."""

    def __init__(self, connection: Connection):
        super().__init__(connection)
        self._connection = connection
        # As uvicorn's: a request after one with `Connection: close` is no error, and gets no response.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # uvicorn gives bytes
        parser: httptools.HttpRequestParser = self
        while True:
            try:
                httptools.HttpRequestParser.feed_data(parser, data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._connection.restart_parser()
                parser = self._connection.parser


class Connection(HttpToolsProtocol):
    """A connection that measures how long it waits for its client.

    Args:
        addresses: the number of open connections by address, which this updates. One address has at most half of them.
        refusal: returns the reason to reject a request with these headers from an address, if it is not a GET; None to
            accept it.
    """

    def __init__(
        self,
        options: ServerOptions,
        metrics: Metrics,
        addresses: Counter[str],
        refusal: Callable[[list[tuple[bytes, bytes]], str], QueueFullError | None] | None = None,
        **uvicorn: Any,
    ):
        super().__init__(**uvicorn)
        self.parser = _Parser(self)
        self._options, self._metrics = options, metrics
        self._addresses, self._refusal = addresses, refusal
        self._refused: bytes | None = None
        """The response to a request whose body has not arrived yet."""
        self._counted: _Counted | None = None
        self._progress = _Progress()
        self._headers_since: float | None = None
        self._frame_bytes = self._body_bytes = 0
        """The size of the current request without its body, and of its body, so far."""
        self._is_complete = False
        """A request ended in the data that is being parsed."""
        self._is_reframed = False
        """The parser reads the headers of a request again."""
        self._has_headers = False
        """The headers of the current request are complete: further ones are trailers."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered. `cycle` is the last request that was read. Requests between them wait in
        `pipeline`."""
        self._address = ""
        self._stops_reading = False
        """No more requests are read. The connection is closed after the responses to those that were."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        most, self._address = self._options.max_connections, network_of((get_remote_addr(transport) or ("", 0))[0])
        # The connections of all clients behind a proxy have its address.
        share = most if self._options.trusted_proxies else -(-most // 2)
        if len(self.connections) >= most or self._addresses[self._address] >= share:
            self._metrics.refused.labels("connections").inc()
            transport.write(REFUSAL)
            transport.close()
            return
        self._addresses[self._address] += 1
        self._counted = _Counted(transport)
        self._headers_since = self._progress.since = time.monotonic()
        super().connection_made(self._counted)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._counted is None:
            return
        self._addresses[self._address] -= 1
        if not self._addresses[self._address]:
            del self._addresses[self._address]
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._counted is None or self._stops_reading:
            return
        if self._headers_since is None and not self._is_answering:
            self._headers_since = time.monotonic()
        before, self._is_complete = self._body_bytes, False
        super().data_received(data)
        if self._is_complete:  # the rest of this data belongs to the next request, and is short
            self._frame_bytes = self._body_bytes = 0
            return
        self._frame_bytes += len(data) - (self._body_bytes - before)
        if self._frame_bytes > MOST_HEADERS + CHUNK * self._body_bytes and not self._counted.is_closing():
            self._metrics.refused.labels("large headers").inc()
            if not self._end_reading():
                self._counted.write(LARGE_HEADERS)
                self._counted.close()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's closes the connection: it returns None
        """Whether the connection stays open for the response. A client may send no more and still wait (RFC 9112, 9.6).

        TCP does not distinguish this client from a client that has left. A client that has left answers the next bytes with
        a reset, so an interim response is sent.
        """
        if self._end_reading():
            self._probe()
        return self._stops_reading

    def send_400_response(self, msg: str) -> None:
        if not self._end_reading():
            super().send_400_response(msg)

    def _end_reading(self) -> bool:
        """Read no further request, and let the complete ones be answered. False if there is none."""
        if self.pipeline and self.cycle.more_body:  # half of a request; the newest is the first
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running  # type: ignore[assignment]
        self._stops_reading = self._is_answering and not self.cycle.more_body
        if self._stops_reading:
            self.flow.pause_reading()
        return self._stops_reading

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._stops_reading and not self._is_answering and self._counted is not None:
            self._counted.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _probe(self) -> None:
        running = self._running
        # While requests wait, nothing is read, so the end of a client is not seen either.
        if self._counted is None or running is None or not (self._stops_reading or self.pipeline):
            return
        if running.response_started or running.response_complete:
            return  # no interim response may stand within a response
        if running.scope["http_version"] == "1.1":  # older clients know no interim responses
            self._counted.write(CONTINUE)

    def restart_parser(self) -> None:
        """Read on after a request with `Upgrade` as if it had none, which a server may do (RFC 9110, 7.8).

        The parser stops after such headers, because it treats the body as another protocol. So a new parser reads the
        headers again that determine the end of the body.
        """
        head = [name + b": " + value + b"\r\n" for name, value in self.headers if name in _FRAMING]
        self.parser, self._is_reframed = _Parser(self), True
        try:
            self.parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *head, b"\r\n"]))
        finally:
            self._is_reframed = False

    def on_message_begin(self) -> None:
        if not self._is_reframed:
            self._has_headers = False
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_reframed:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are no headers (RFC 9110, 6.5.1): proxies let them pass, such as an `X-Forwarded-For` of the client.
        if not self._has_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_reframed:
            return
        self._has_headers = True
        full = self._refusal(self.headers, self._address) if self._refusal is not None else None
        if full is not None and self._is_short():
            # The time limit for headers covers the body too.
            self._refused = _refusal_of(full, keep_alive=self.parser.should_keep_alive())
            return
        self._headers_since = None
        super().on_headers_complete()

    def _is_short(self) -> bool:
        """Whether the connection can reject this request without the application: it is short, and no other is running."""
        is_safe = self.parser.get_method().decode("ascii", "replace") in SAFE_METHODS
        if self._is_answering or self.expect_100_continue or is_safe or self._options.cors:
            return False
        length = dict(self.headers).get(b"content-length", b"")
        return length.isdigit() and int(length) <= SHORT_BODY

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._refused is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `restart_parser` reads the body
        self._is_complete = True
        if self._refused is None:
            super().on_message_complete()
            return
        assert self._counted is not None
        answer = self._refused
        self._refused = self._headers_since = None
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
        self._probe()

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
