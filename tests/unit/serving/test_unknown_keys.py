"""Refusals of unknown keys keep nothing of the requests."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any, cast

from starlette.types import Message, Receive, Scope, Send

from tfexport.serving.access.keys import Keys
from tfexport.serving.access.limits import Limits, Refusals
from tfexport.serving.options import ServerOptions
from tfexport.serving.state import State


class Told(dict[str, Any]):
    """A scope that can be watched."""


async def _never(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("the request was let through")


def _refused(limits: Limits) -> tuple[int, weakref.ref[Told]]:
    """The status of a request with an unknown key, and what tells whether the request is still kept."""
    headers = [(b"host", b"a"), (b"authorization", b"Bearer somebody-elses-key")]
    about = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/translate", "client": ("::1", 1)}
    scope, statuses = Told(about, headers=headers), []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    asyncio.run(limits(scope, receive, send))
    return statuses[0], weakref.ref(scope)


def test_a_refused_request_is_not_kept() -> None:
    metrics = SimpleNamespace(refused=SimpleNamespace(labels=lambda _: SimpleNamespace(inc=lambda: None)))
    state, keys = State(), Keys({"a-key-of-sixteen": "ours"})
    limits = Limits(
        _never,
        options=ServerOptions(),
        state=state,
        metrics=cast(Any, metrics),
        keys=keys,
        refusals=Refusals(state, cast(Any, SimpleNamespace(served=[])), keys),
    )
    for _ in range(3):
        status, kept = _refused(limits)
        gc.collect()
        assert status == 401
        assert kept() is None
