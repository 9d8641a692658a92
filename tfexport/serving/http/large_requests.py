"""Runs the work of large requests on an event loop of its own thread.

Parsing, validation and splitting take time in proportion to a body. On the server's event loop, each millisecond of it would
delay all other requests and `/health`. Threads take turns every few milliseconds, except within a call of C code; the
largest such call parses `--max-body` bytes with the largest number of values.

    server's loop ──turn of the client──body──> loop of large requests ──> route ──response──> server's loop

Large requests delay each other. So a client has a few of them at once, and its others wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGE = 8 * 1024
"""The smallest number of bytes in the body of a large request. Smaller bodies take at most some milliseconds."""
AT_ONCE = 4
"""The number of large requests of a client that run at once."""

Result = TypeVar("Result")


class LargeRequests:
    """An event loop in a thread, which starts with the first large request."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait on the server's loop until a client has fewer than `AT_ONCE` large requests, and hold one of them."""
        turns = self._turns.setdefault(client, asyncio.Semaphore(AT_ONCE))
        self._users[client] += 1
        try:
            async with turns:
                yield
        finally:
            self._users[client] -= 1
            if not self._users[client]:
                del self._users[client], self._turns[client]

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine that runs on this loop. To cancel it, cancel the task that waits."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="tfexport large requests", daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def over(self, app: ASGIApp) -> ASGIApp:
        """An application that runs on this loop, and can be called from another loop."""

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
