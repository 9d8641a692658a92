"""The record of a request for logs and metrics. It never has the request's text."""

from __future__ import annotations

import random
import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from tfexport.scheduling.usage import Usage

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(slots=True)
class Record:
    """The record of one request."""

    id: str
    model: str | None = None
    """The bundle of the request."""
    folder: str | None = None
    """The folder of the bundle. Messages to clients do not have it."""
    key: str | None = None
    """The name of the request's key."""
    is_gone: bool = False
    """The client closed the connection before the answer."""
    usage: Usage = field(default_factory=Usage)


current_record: ContextVar[Record | None] = ContextVar("tfexport request", default=None)


def request_id(header: str | None) -> str:
    """The client's id if it is safe in a log, otherwise a new one. It is not secret, so it uses no slow system call."""
    return header if header is not None and _ID.fullmatch(header) else f"{random.getrandbits(128):032x}"


def note_model(name: str, folder: Path) -> None:
    """Record that the current request uses this bundle."""
    if (record := current_record.get()) is not None:
        record.model, record.folder = name, str(folder)


def without_folder(message: str) -> str:
    """A message for the client of the current request: the name of its bundle in place of the folder."""
    record = current_record.get()
    if record is None or record.model is None or record.folder is None:
        return message
    return message.replace(record.folder, record.model)
