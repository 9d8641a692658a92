"""Large requests on an event loop of their own: results, errors, cancellation and turns."""

from __future__ import annotations

import asyncio
import threading
import time
from contextvars import ContextVar
from typing import Any

import pytest

from tfexport.serving.http.large_requests import AT_ONCE, LargeRequests

WHO: ContextVar[str] = ContextVar("who", default="nobody")


def test_work_runs_in_another_thread_with_the_context_of_the_request() -> None:
    async def work() -> tuple[str, str]:
        return threading.current_thread().name, WHO.get()

    async def run() -> tuple[str, str]:
        WHO.set("anna")
        return await LargeRequests().run(work())

    assert asyncio.run(run()) == ("tfexport large requests", "anna")


def test_the_servers_loop_goes_on_meanwhile() -> None:
    async def work() -> None:
        time.sleep(0.5)  # as a parser does

    async def run() -> int:
        task, ticks = asyncio.create_task(LargeRequests().run(work())), 0
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert asyncio.run(run()) > 10


def test_errors_are_those_of_the_work() -> None:
    async def work() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        asyncio.run(LargeRequests().run(work()))


def test_cancelling_cancels_the_work() -> None:
    is_cancelled = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await LargeRequests().run(work())

    asyncio.run(run())
    assert is_cancelled.wait(10)


def test_messages_pass_in_order_and_on_the_servers_loop() -> None:
    main, sent = threading.current_thread(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        for part in (body[:2], body[2:]):
            await send({"type": "http.response.body", "body": part, "thread": threading.current_thread()})

    async def receive() -> Any:
        assert threading.current_thread() is main
        return {"type": "http.request", "body": b"text"}

    async def send(message: Any) -> None:
        assert threading.current_thread() is main
        assert message["thread"] is not main
        sent.append(message["body"])

    asyncio.run(LargeRequests().over(app)({}, receive, send))
    assert sent == [b"te", b"xt"]


def test_a_client_has_a_few_at_once_and_others_do_not_wait_for_it() -> None:
    large = LargeRequests()

    async def request(client: str, seconds: float) -> float:
        began = time.monotonic()
        async with large.turn(client):
            waited = time.monotonic() - began
            await asyncio.sleep(seconds)
        return waited

    async def run() -> tuple[list[float], float]:
        many = [asyncio.create_task(request("many", 0.4)) for _ in range(2 * AT_ONCE)]
        await asyncio.sleep(0.05)
        other = await request("other", 0)
        return await asyncio.gather(*many), other

    waited, other = asyncio.run(run())
    assert sorted(seconds > 0.2 for seconds in waited) == [False] * AT_ONCE + [True] * AT_ONCE
    assert other < 0.2
    assert not large._turns
