"""Responses that FastAPI lacks."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send


def json_of(model: BaseModel) -> Response:
    """The JSON response of a Pydantic model, without fields that have their defaults."""
    return Response(model.model_dump_json(exclude_defaults=True, by_alias=True), media_type="application/json")


class EventStream(StreamingResponse):
    """Server-sent events. If the client disconnects, the generator ends, and with it the work that it waits for.

    Args:
        first: the first event, which was awaited to determine the status.
        events: the events after it.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes]):
        self._events = events
        super().__init__(_with_first(first, events), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _with_first(first: bytes, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for event in events:
        yield event
