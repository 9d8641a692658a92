"""Pages in Chromium, and a server for them whose answers a test decides."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.sse import format_sse_event

from tfexport.serving.page.routes import add_page
from tfexport.serving.v1.schemas import TranslateRequest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PATIENCE = 30
"""Seconds: a busy machine may take long to show what a quick one shows at once."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test where there is no browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no Chromium: apt install chromium")
    playwright.expect.set_options(timeout=PATIENCE * 1000)
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses root
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, address: str, **context: Any) -> Iterator[Page]:
    """A page of its own, without what other tests left in the browser. Errors of its scripts fail the test."""
    with browser.new_context(**context) as own:
        own.set_default_timeout(PATIENCE * 1000)
        page, errors = own.new_page(), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.extend([said.text] * ("Content Security Policy" in said.text)))
        page.goto(address)
        yield page
        assert errors == []


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass
class ScriptedServer:
    """Answers as a test says, and keeps what was asked."""

    answer: Callable[[dict[str, Any]], Response] = lambda _: Response(status_code=500)
    models: list[dict[str, Any]] = field(default_factory=lambda: [MODEL])
    key: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    allowed: int = 10**6
    """Tokens that a stream may send before it waits."""
    open: set[str] = field(default_factory=set)
    """Texts whose streams are not over."""
    left: list[str] = field(default_factory=list)
    """Texts whose streams ended because nobody listened any more."""
    address: str = ""

    def stream(self, asked: dict[str, Any], tokens: list[str], *, breaks: bool = False) -> Response:
        """Tokens one by one, then the result; with `breaks`, the connection ends before it."""
        return StreamingResponse(self._events(asked["text"], tokens, breaks), media_type="text/event-stream")

    async def _events(self, text: str, tokens: list[str], breaks: bool) -> AsyncIterator[bytes]:
        self.open.add(text)
        try:
            for number, token in enumerate(tokens):
                while self.allowed <= number:
                    await asyncio.sleep(0.005)
                step = {"id": number, "token": token, "text": token, "log_prob": -0.1}
                yield format_sse_event(event="step", data_str=JSONResponse(step).body.decode())
            while self.allowed <= len(tokens):
                await asyncio.sleep(0.005)
            if not breaks:
                yield format_sse_event(event="result", data_str=JSONResponse(result_of(tokens)).body.decode())
        except asyncio.CancelledError:
            self.left.append(text)
            raise
        finally:
            self.open.discard(text)

    def app(self) -> FastAPI:
        app = FastAPI()
        add_page(app)

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            return self._refusal(request) or JSONResponse({"status": "ready", "models": self.models})

        @app.post("/v1/translate")
        async def translate(asked: TranslateRequest, request: Request) -> Response:
            given = asked.model_dump(exclude_unset=True)
            self.asked.append(given)
            return self._refusal(request) or self.answer(given)

        return app

    def _refusal(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": "this key is not known here"}, 401)

    @contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        """In a thread, at `address`."""
        port = free_port()
        server = uvicorn.Server(uvicorn.Config(self.app(), port=port, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run)
        thread.start()
        self.address = f"http://127.0.0.1:{port}/"
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join()


MODEL: dict[str, Any] = {
    "name": "de-en",
    "source": "de",
    "target": "en",
    "task": "translate",
    "runtime": "ort-cpu",
    "precision": "fp32",
    "attention": False,
    "certified": True,
}


def result_of(tokens: list[str], **more: Any) -> dict[str, Any]:
    """A result whose only hypothesis has these tokens."""
    text = "".join(tokens)
    hypothesis = {"text": text, "tokens": tokens, "ids": list(range(len(tokens))), "score": -1.0, "log_prob": -1.0}
    return {"status": "ok", "hypotheses": [{**hypothesis, "finished": True, **more}]}
