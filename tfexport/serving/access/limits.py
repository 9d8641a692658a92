"""The checks before a route sees a request: hosts, origins, keys, rates, concurrent requests, and sizes.

GET requests are not counted, and need no key except for `/metrics`. All other requests are counted and need a key.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

from limits import parse
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from tfexport.errors import QueueFullError
from tfexport.serving.access.keys import Keys, key_in_body, key_in_headers
from tfexport.serving.access.origins import ANY, check_host, check_origin, origins_of
from tfexport.serving.catalog import Catalog
from tfexport.serving.http.bodies import ClientGoneError, check_values, read_body, run_while_there
from tfexport.serving.http.clients import network_of
from tfexport.serving.http.large_requests import LARGE, LargeRequests
from tfexport.serving.http.methods import SAFE_METHODS
from tfexport.serving.options import ServerOptions
from tfexport.serving.problems import Problem
from tfexport.serving.record import current_record
from tfexport.serving.state import State
from tfexport.serving.telemetry.metrics import Metrics

BODIES = 64
"""The server holds bodies of at most this many times `--max-body` bytes at once."""
WITH_KEY = ("/metrics",)
"""GET routes that need a key."""


def unknown_key() -> HTTPException:
    """A new exception each time: an exception keeps its stack frames alive, and these keep the bodies of requests."""
    message = "this server needs an API key. Send it as Authorization: Bearer KEY."
    return HTTPException(401, message, {"WWW-Authenticate": "Bearer"})


REASONS = {400: "malformed", 401: "key", 403: "origin", 408: "slow request", 413: "size", 421: "host", 429: "rate"}
"""The labels of refusals in the metrics, by status."""


class Refusals:
    """The reasons to reject requests of a client unread. Both doors, `Limits` and `Connection`, ask here.

    The scheduler decides (`Scheduler.refusal`). For a moment its decision holds for the next requests of the client.

    Args:
        keys: the keys; None if no key is needed.
    """

    def __init__(self, state: State, catalog: Catalog, keys: Keys | None):
        self._state, self._catalog = state, catalog
        self._keys = keys

    def client(self, headers: Mapping[str, str], address: str) -> str:
        """The name of a client: the name of its key, or its network address. Clients share the server."""
        name = self._keys.name_of(key_in_headers(headers)) if self._keys is not None else None
        return name or network_of(address)

    def of_connection(self, headers: list[tuple[bytes, bytes]], address: str) -> QueueFullError | None:
        """The reason to reject a request with these headers, if any."""
        return self.of(self.client(Headers(raw=headers), address)) if self._state.full else None

    def of(self, client: str) -> QueueFullError | None:
        """The reason to reject a request of a client, if any. With several bundles there is none: another may have room."""
        full = self._state.repeated_refusal(client)
        return full if full is not None and len(self._catalog.served) == 1 else None


def _size_of(headers: Headers, most: int) -> int:
    """The number of bytes that a body may have: its declared length, at most `most`, or `most` without a declared length."""
    length = headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20:
        return min(int(length), most)
    return most if "transfer-encoding" in headers else 0


class Rate:
    """A limit of requests for each client in a sliding window of time."""

    def __init__(self, rate: str):
        self._item, self._limiter = parse(rate), SlidingWindowCounterRateLimiter(MemoryStorage())

    async def wait_of(self, client: str) -> float:
        """Count a request. Returns 0 if it is accepted, otherwise the seconds until the next one is."""
        if await self._limiter.hit(self._item, client):
            return 0.0
        window = await self._limiter.get_window_stats(self._item, client)
        return max(1.0, window.reset_time - time.time())


class Limits:
    """The ASGI middleware of these checks.

    Args:
        keys: the keys; None if no key is needed.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        options: ServerOptions,
        state: State,
        metrics: Metrics,
        keys: Keys | None,
        refusals: Refusals,
    ):
        self._app, self._options = app, options
        self._state, self._metrics = state, metrics
        self._keys, self._refusals = keys, refusals
        self._large = LargeRequests()
        self._rate = Rate(options.rate) if options.rate else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client = self._refusals.client(headers, scope["client"][0] if scope.get("client") else "")
        if scope["method"] in SAFE_METHODS:
            await self._taken(scope, receive, send, client)
            return
        size = _size_of(headers, self._options.max_body)
        if self._is_busy(client, size):
            busy = f"{self._state.active} requests are being answered already. Send this one again."
            await self._refuse(HTTPException(429, busy, {"Retry-After": "1"}), "requests", scope, receive, send)
            return
        if (full := self._refusals.of(client)) is not None:
            problem = Problem.of(full)
            error = HTTPException(problem.status, problem.message, problem.headers)
            await self._refuse(error, "queue", scope, receive, send)
            return
        self._state.begin(client, size)
        try:
            await self._taken(scope, receive, send, client)
        finally:
            self._state.end(client, size)

    def _is_busy(self, client: str, size: int) -> bool:
        """Whether there are too many requests, or too many bytes of their bodies, of all clients or of this one."""
        state, most = self._state, self._options.max_requests
        held = BODIES * self._options.max_body
        is_full = state.active >= most or state.active_of[client] >= -(-most // 2)
        return is_full or state.held + size > held or state.held_of[client] + size > held // 2

    async def _taken(self, scope: Scope, receive: Receive, send: Send, client: str) -> None:
        most, seconds = self._options.max_body, self._options.receive_timeout
        if scope["method"] in SAFE_METHODS:
            most = min(most, LARGE)  # they are not counted, and need no body
        async with AsyncExitStack() as turns:
            try:
                name = await self._admitted(scope, client)
                body = await read_body(scope, receive, most=most, seconds=seconds)
                if len(body) >= LARGE:
                    await turns.enter_async_context(self._large.turn(client))
                await self._check_body(scope, body, client, name)
            except HTTPException as error:
                await self._refuse(error, REASONS[error.status_code], scope, receive, send)
                return
            except ClientGoneError:
                if (record := current_record.get()) is not None:
                    record.is_gone = True
                return
            app = self._large.over(self._app) if len(body) >= LARGE else self._app
            await run_while_there(app, scope, body, receive, send)

    async def _admitted(self, scope: Scope, client: str) -> str | None:
        """The name of the key in the headers of a request that is allowed to send its body; None if no header has one.

        Args:
            client: the name of its key, if a header has one, otherwise its address.

        Raises:
            HTTPException: the request is not allowed.
        """
        looks, headers = scope["method"] in SAFE_METHODS, Headers(scope=scope)
        check_host(headers, self._options.allowed_hosts or (ANY,), scope["http_version"])
        if not looks:
            check_origin(headers, origins_of(self._options))
        key = key_in_headers(headers)
        name = self._keys.name_of(key) if self._keys is not None else None
        if not looks and (name is not None or self._keys is None):
            await self._count(client)  # first, so that a client over its rate need not send its body
        needs_key = self._keys is not None and (not looks or scope["path"] in WITH_KEY)
        if needs_key and name is None and (key is not None or looks):
            await self._count(client)
            raise unknown_key()
        return name

    async def _check_body(self, scope: Scope, body: bytes, client: str, name: str | None) -> None:
        """Check the values of a body, and the key in it if no header has one.

        Raises:
            HTTPException: the body is not allowed.
        """
        needs_key = self._keys is not None and name is None and scope["method"] not in SAFE_METHODS
        checking = self._key_of_body(scope, body, needs_key=needs_key)
        in_body = await (self._large.run(checking) if len(body) >= LARGE else checking)
        if needs_key:
            name = in_body
            await self._count(name or client)
            if name is None:
                raise unknown_key()
        if (record := current_record.get()) is not None:
            record.key, record.usage.client = name, name or client

    async def _key_of_body(self, scope: Scope, body: bytes, *, needs_key: bool) -> str | None:
        """Check the values of a body, and return the name of the key in it if `needs_key`."""
        await check_values(body)
        if not needs_key or self._keys is None:
            return None
        return self._keys.name_of(await key_in_body(scope, body))

    async def _count(self, client: str) -> None:
        """Count a request of a client.

        Raises:
            HTTPException: the client sends too many requests.
        """
        wait = await self._rate.wait_of(client) if self._rate is not None else 0.0
        if wait:
            text = f"more than {self._options.rate} requests. Send this one again in {math.ceil(wait)} seconds."
            raise HTTPException(429, text, {"Retry-After": str(math.ceil(wait))})

    async def _refuse(self, error: HTTPException, reason: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.refused.labels(reason).inc()
        answer: Callable[[Scope, Receive, Send], Awaitable[None]]
        answer = Problem(error.status_code, str(error.detail), dict(error.headers or {})).response()
        await answer(scope, receive, send)
