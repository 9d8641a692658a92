"""Runs the work of large requests on an event loop of its own thread, so that they do not delay others.

Parsing, validation and splitting take time in proportion to a body. On the server's event loop, each millisecond of it would
delay all other requests and `/health`.

    server's loop ──body──> loop of large requests ──> route ──response──> server's loop
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGE = 8 * 1024
"""Bytes of a body from which it is a large request. Smaller ones take less than some milliseconds."""

Result = TypeVar("Result")


class LargeRequests:
    """An event loop in a thread, which starts with the first large request."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine that runs on this loop. To cancel it, cancel the task that waits."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="tfexport large requests", daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def over(self, app: ASGIApp) -> ASGIApp:
        """An application on this loop, which is called on another one."""

        async def called(scope: Scope, receive: Receive, send: Send) -> None:
            here = asyncio.get_running_loop()

            async def received() -> Message:
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_coroutine(receive), here))

            async def sent(message: Message) -> None:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_coroutine(send, message), here))

            await self.run(_coroutine(app, scope, received, sent))

        return called


async def _coroutine(function: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
    return await function(*arguments)
