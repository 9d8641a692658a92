"""The outermost middleware: each request gets an id, a line in the log, an entry in the metrics, and a response."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tfexport.scheduling import usage
from tfexport.serving.problems import Problem
from tfexport.serving.record import Record, current_record, request_id
from tfexport.serving.state import State
from tfexport.serving.telemetry.logs import NOTES, REQUESTS, log
from tfexport.serving.telemetry.metrics import Metrics

CLIENT_GONE = 499
"""The status, only in logs and metrics, of a request whose client left before the response. nginx uses it too."""

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
OTHER = "other"
"""The label of unknown routes and methods, because clients can invent any number of them."""

ENDED = Problem(503, "the server ended before this request was answered. Send it again.", {"Connection": "close"})
FAULT = Problem(500, "this is a fault of the server, which its log has with this X-Request-ID. Report it.")


@dataclass(slots=True)
class _Answer:
    status: int = 0
    """0 before the response begins."""


class Observe:
    """The ASGI middleware that observes requests.

    Args:
        addresses: the paths of the server's routes. Requests that were refused have no route.
    """

    def __init__(self, app: ASGIApp, *, state: State, metrics: Metrics, addresses: Collection[str]):
        self._app = app
        self._state, self._metrics = state, metrics
        self._addresses = frozenset(addresses)
        self._patterns = [(compile_path(address)[0], address) for address in self._addresses if "{" in address]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, answer = time.perf_counter(), _Answer()
        record = Record(request_id(Headers(scope=scope).get("x-request-id")))
        current_record.set(record)
        usage.current.set(record.usage)

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = record.id
                if self._state.is_draining:
                    headers["Connection"] = "close"  # so that the client's next request goes to another server
            await send(message)

        try:
            await self._app(scope, receive, send_observed)
        except asyncio.CancelledError:  # uvicorn no longer waits
            self._state.unanswered += 1
            if answer.status:
                raise
            await ENDED.response()(scope, receive, send_observed)
        except Exception:
            NOTES.exception("request %s failed", record.id)
            if answer.status:
                raise
            await FAULT.response()(scope, receive, send_observed)
        finally:
            self._note(scope, record, answer.status or CLIENT_GONE, time.perf_counter() - began)

    def _note(self, scope: Scope, record: Record, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else OTHER
        address = path = scope["path"]
        if path not in self._addresses:
            address = next((address for pattern, address in self._patterns if pattern.match(path)), OTHER)
        self._metrics.requests.labels(method, address, str(status)).inc()
        self._metrics.seconds.labels(address).observe(seconds)
        used = record.usage
        fields = {
            "id": record.id,
            "client": scope["client"][0] if scope.get("client") else None,
            "method": method,
            "address": address,
            "status": status,
            "seconds": round(seconds, 6),
            "key": record.key,
            "model": record.model,
            "sentences": used.sentences or None,
            "tokens_in": used.source_tokens or None,
            "tokens_out": used.tokens or None,
            "client_gone": record.is_gone or None,
        }
        log(REQUESTS, "request", fields, logging.DEBUG if path in ("/health", "/ready", "/metrics") else logging.INFO)
