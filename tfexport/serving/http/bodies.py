"""Reads the bodies of requests completely, within a limit of size and time, and detects clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tfexport.serving.record import current_record

DISCARDED = 4
"""A body that is too large is read up to this multiple of the limit, because many clients do not read while they send."""

CLOSE = {"Connection": "close"}
MOST_VALUES = 2**18
"""The largest number of values in a JSON body. A small value takes many times its size in memory."""
COUNTED = 2**14
"""The number of marks that are counted at once."""
_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[,:\[{]', re.DOTALL)
"""A string, or a character that begins or divides values. A value has one or two of them."""


class ClientGoneError(Exception):
    """The client disconnected before it had sent its request."""


async def read_body(scope: Scope, receive: Receive, *, most: int, seconds: float) -> bytes:
    """The body of a request.

    Raises:
        HTTPException: the body is too large (413), or does not arrive in time (408).
        ClientGoneError: the client disconnected.
    """
    too_large = HTTPException(413, f"this request is larger than {most:,} bytes. Send fewer sentences at once.", CLOSE)
    headers = dict(scope["headers"])
    if b"expect" in headers and int(headers.get(b"content-length", b"0")) > most:
        raise too_large  # the client waits for `100 Continue`
    try:
        async with asyncio.timeout(seconds):
            parts, size = list[bytes](), 0
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                if size <= most:
                    parts.append(part)
                elif size > DISCARDED * most:
                    raise too_large
    except TimeoutError:
        raise HTTPException(
            408, f"this request did not arrive within {seconds:g} seconds. Send it again.", CLOSE
        ) from None
    if size > most:
        raise too_large
    return b"".join(parts)


async def check_values(body: bytes) -> None:
    """Raise HTTPException if a body may be JSON that takes far more memory and time than its size.

    The values are counted before anything is parsed, whatever the headers say.

    Raises:
        HTTPException: too many values (413), or JSON in another encoding than UTF-8 (400), in which nothing can be counted.
    """
    if json.detect_encoding(body) not in ("utf-8", "utf-8-sig"):
        raise HTTPException(400, "the body is not UTF-8. Send UTF-8 (RFC 8259, 8.1).", CLOSE)
    at_most = sum(map(body.count, (b",", b"[", b"{", b":")))  # with those in strings
    if at_most <= MOST_VALUES:
        return
    # Other threads run between the steps of a loop, and not within `itertools`.
    for marks, _ in enumerate(_MARK.finditer(body)):
        if marks % COUNTED == 0:
            await asyncio.sleep(0)  # other requests of this loop
        if marks >= 2 * MOST_VALUES:
            raise HTTPException(413, f"this request has more than {MOST_VALUES:,} values. Send fewer at once.", CLOSE)


async def run_while_there(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Let an application answer a request whose body was read, and cancel the request if the client disconnects.

    FastAPI itself would continue, and notice only when it sends the response.
    """
    has_body = is_complete = False
    gone = asyncio.Event()

    async def replayed() -> Message:
        nonlocal has_body
        if not has_body:
            has_body = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def watched(message: Message) -> None:
        nonlocal is_complete
        is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        await send(message)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async def answer() -> None:
        await app(scope, replayed, watched)

    answering = asyncio.create_task(answer())
    watching = asyncio.create_task(watch())
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done() and not is_complete:  # uvicorn also reports a disconnect after the response
            if (record := current_record.get()) is not None:
                record.is_gone = True
            answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering
        else:
            await answering
    finally:
        for task in (answering, watching):
            task.cancel()
        await asyncio.gather(answering, watching, return_exceptions=True)
