"""The checks before a route sees a request: keys, rates, concurrent requests, and sizes.

GET requests are not counted, and need no key except for `/metrics`. All other requests are counted and need a key.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Awaitable, Callable

from limits import parse
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from tfexport.errors import QueueFullError
from tfexport.serving.access.keys import Keys, key_in_body, key_in_headers
from tfexport.serving.catalog import Catalog
from tfexport.serving.http.bodies import ClientGoneError, check_values, read_body, run_while_there
from tfexport.serving.options import ServerOptions
from tfexport.serving.problems import Problem
from tfexport.serving.record import current_record
from tfexport.serving.state import State
from tfexport.serving.telemetry.metrics import Metrics

LOOKS = ("GET", "HEAD", "OPTIONS")
WITH_KEY = ("/metrics",)
"""GET routes that need a key."""


def unknown_key() -> HTTPException:
    """A new exception each time: an exception keeps its stack frames alive, and these keep the bodies of requests."""
    message = "this server needs an API key. Send it as Authorization: Bearer KEY."
    return HTTPException(401, message, {"WWW-Authenticate": "Bearer"})


REASONS = {401: "key", 408: "slow request", 413: "size"}


def refusal(state: State, catalog: Catalog) -> QueueFullError | None:
    """The reason to reject requests unread now, if any. With several bundles there is none: another one may have room."""
    full = state.refusal()
    return full if full is not None and len(catalog.served) == 1 else None


class Rate:
    """A limit of requests for each client in a sliding window of time."""

    def __init__(self, rate: str):
        self._item, self._limiter = parse(rate), SlidingWindowCounterRateLimiter(MemoryStorage())

    async def wait_of(self, client: str) -> float:
        """Count a request. Returns 0 if it is accepted, otherwise the seconds until the next is."""
        if await self._limiter.hit(self._item, client):
            return 0.0
        found = await self._limiter.get_window_stats(self._item, client)
        return max(1.0, found.reset_time - time.time())


class Limits:
    """ASGI middleware.

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
        catalog: Catalog,
    ):
        self._app, self._options, self._state, self._metrics, self._keys = app, options, state, metrics, keys
        self._catalog = catalog
        self._rate = Rate(options.rate) if options.rate else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        counted = scope["method"] not in LOOKS
        if counted and self._state.active >= self._options.max_requests:
            busy = f"{self._state.active} requests are being answered already. Send this one again."
            await self._refuse(HTTPException(429, busy, {"Retry-After": "1"}), "requests", scope, receive, send)
            return
        full = refusal(self._state, self._catalog) if counted else None
        if full is not None:
            problem = Problem.of(full)
            error = HTTPException(problem.status, problem.message, problem.headers)
            await self._refuse(error, "queue", scope, receive, send)
            return
        self._state.active += counted
        try:
            await self._taken(scope, receive, send)
        finally:
            self._state.active -= counted

    async def _taken(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._allowed(scope, receive)
        except HTTPException as error:
            reason = REASONS.get(error.status_code, "rate")
            await self._refuse(error, reason, scope, receive, send)
        except ClientGoneError:
            if (record := current_record.get()) is not None:
                record.is_gone = True
        else:
            await run_while_there(self._app, scope, body, receive, send)

    async def _allowed(self, scope: Scope, receive: Receive) -> bytes:
        """The body of an allowed request.

        Raises:
            HTTPException: the request is not allowed.
        """
        looks = scope["method"] in LOOKS
        given = key_in_headers(Headers(scope=scope))
        name = self._keys.name_of(given) if self._keys is not None else None
        if not looks and name is not None:
            await self._count(name)  # first, so that a client over its rate need not send its body
        needs_key = self._keys is not None and (not looks or scope["path"] in WITH_KEY)
        if needs_key and name is None and (given is not None or looks):
            await self._count(_client_of(scope))
            raise unknown_key()
        if not looks and self._keys is None:
            await self._count(_client_of(scope))
        most, seconds = self._options.max_body, self._options.receive_timeout
        body = await read_body(scope, receive, most=most, seconds=seconds)
        check_values(scope, body)
        if needs_key and name is None and self._keys is not None:
            name = self._keys.name_of(await key_in_body(scope, body))
            await self._count(name or _client_of(scope))
            if name is None:
                raise unknown_key()
        if (record := current_record.get()) is not None:
            record.key = name
        return body

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


def _client_of(scope: Scope) -> str:
    """The address of a client; for IPv6 the network, because a client has very many addresses."""
    host = scope["client"][0] if scope.get("client") else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else host
