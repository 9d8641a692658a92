"""Error responses: `{"error": "..."}` with a status, in every protocol."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from tfexport.errors import DeadlineError, QueueFullError, TfexportError, UnavailableError
from tfexport.scheduling.usage import current
from tfexport.serving.catalog import UnknownModelError
from tfexport.serving.record import without_folder


class Error(BaseModel):
    """The reason why a request was not answered."""

    error: str


PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "An option cannot be used."},
    401: {"model": Error, "description": "The server needs an API key."},
    403: {"model": Error, "description": "Pages of this origin may not call the server."},
    404: {"model": Error, "description": "There is no such bundle."},
    408: {"model": Error, "description": "The body was not there in time."},
    413: {"model": Error, "description": "The body is too large."},
    421: {"model": Error, "description": "The server does not answer for this host name."},
    422: {"model": Error, "description": "The request is not as the schema says."},
    429: {"model": Error, "description": "Too much waits. Try again after the seconds of Retry-After."},
    500: {"model": Error, "description": "A fault of the server."},
    503: {"model": Error, "description": "The bundle cannot answer now. Try again."},
    504: {"model": Error, "description": "The request was not answered within its time."},
}
"""The error responses of every route, for OpenAPI."""

_STATUS: dict[type[TfexportError], int] = {
    QueueFullError: 429,
    DeadlineError: 504,
    UnavailableError: 503,
    UnknownModelError: 404,
}


@dataclass(frozen=True)
class Problem:
    """An error response: its status, message and headers."""

    status: int
    message: str
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: TfexportError) -> Problem:
        """The problem that a client gets for an error."""
        status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 400)
        headers = {"Retry-After": str(math.ceil(error.retry_after))} if isinstance(error, QueueFullError) else {}
        return cls(status, without_folder(str(error)), headers)

    def to_json(self) -> str:
        """The problem as an event of a stream."""
        return Error(error=self.message.encode("utf-8", "replace").decode()).model_dump_json()

    def response(self) -> JSONResponse:
        """The problem as a response."""
        # Errors quote the client's text, which may contain lone surrogates, which are not UTF-8.
        message = self.message.encode("utf-8", "replace").decode()
        return JSONResponse({"error": message}, self.status, self.headers)


def answer_problems(app: FastAPI, on_full: Callable[[QueueFullError, str], None] = lambda *_: None) -> None:
    """Add handlers for errors to an app. `Observe` answers faults of the server.

    Args:
        on_full: called for each request that a scheduler rejects, with its client.
    """

    @app.exception_handler(TfexportError)
    async def _ours(_: Request, error: TfexportError) -> JSONResponse:
        if isinstance(error, QueueFullError):
            usage = current.get()
            on_full(error, "" if usage is None else usage.client)
        return Problem.of(error).response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return Problem(422, "; ".join(_message(problem) for problem in error.errors()[:3])).response()

    @app.exception_handler(HTTPException)
    async def _other(_: Request, error: HTTPException) -> JSONResponse:
        return Problem(error.status_code, str(error.detail), dict(error.headers or {})).response()


def _message(problem: dict[str, Any]) -> str:
    """The message of one of Pydantic's errors, with the field that it is about."""
    field = ".".join(str(part) for part in problem["loc"] if part != "body")
    own = problem.get("ctx", {}).get("error") if problem["type"] == "value_error" else None
    message = str(own or problem["msg"])
    return f"{field}: {message}" if field else message
