"""Requests that are refused unread while a scheduler has no room."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tfexport.errors import QueueFullError
from tfexport.serving import state as module
from tfexport.serving.access.limits import Limits, Refusals
from tfexport.serving.options import ServerOptions
from tfexport.serving.state import State
from tfexport.serving.telemetry.metrics import Metrics


class Clock:
    """What `time.monotonic` tells."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def status_of(state: State, bundles: int = 1, method: str = "POST", client: str = "127.0.0.1") -> int:
    """The status of a request. The application behind the limits answers 200, and reading a body is an error."""
    catalog: Any = SimpleNamespace(served=[None] * bundles)
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    read = False

    async def receive() -> Any:
        nonlocal read
        if read:
            await asyncio.Event().wait()  # the client stays
        read = True
        if state.repeated_refusal(client) and bundles == 1 and method == "POST":
            raise AssertionError("a request that is refused is not read")
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    limits = Limits(
        app,
        options=ServerOptions(),
        state=state,
        metrics=Metrics(catalog, state),
        keys=None,
        refusals=Refusals(state, catalog, None),
    )
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": "/v1/translate", "headers": [(b"host", b"a")],
        "client": (client, 1),
    }  # fmt: skip
    asyncio.run(limits(scope, receive, send))
    if sent[0]["status"] == 429:
        assert (b"retry-after", b"3") in sent[0]["headers"]
    return sent[0]["status"]


def test_after_a_refusal_others_are_refused_unread_for_a_moment(clock: Clock) -> None:
    state = State()
    assert status_of(state) == 200
    state.note_full(QueueFullError("too much waits", 2.5), "127.0.0.1")
    assert status_of(state) == 429
    assert status_of(state, client="127.0.0.2") == 200  # another client may have room
    clock.now += module.PAUSE
    assert status_of(state) == 200


def test_who_only_looks_and_who_may_mean_another_bundle_is_not_refused(clock: Clock) -> None:
    state = State()
    state.note_full(QueueFullError("too much waits", 2.5), "127.0.0.1")
    assert status_of(state, method="GET") == 200
    assert status_of(state, bundles=2) == 200


def test_refusals_of_bulk_requests_are_no_reason_for_others(clock: Clock) -> None:
    state = State()
    state.note_full(QueueFullError("too much waits", 2.5, bulk=True), "127.0.0.1")
    assert status_of(state) == 200
