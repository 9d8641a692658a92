"""What is known of a request, for logs and metrics: never its text."""

from __future__ import annotations

import random
import re
from contextvars import ContextVar
from dataclasses import dataclass, field

from tfexport.scheduling.usage import Usage

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(slots=True)
class Record:
    """Of one request."""

    id: str
    model: str | None = None
    """The bundle that it used."""
    key: str | None = None
    """The name of its key."""
    is_gone: bool = False
    """The client did not wait for the answer."""
    usage: Usage = field(default_factory=Usage)


current_record: ContextVar[Record | None] = ContextVar("tfexport request", default=None)


def request_id(given: str | None) -> str:
    """The client's, where it can stand in a log, else a new one. It is no secret, and bits of the system cost a call."""
    return given if given is not None and _ID.fullmatch(given) else f"{random.getrandbits(128):032x}"


def note_model(name: str) -> None:
    """The request that is being answered uses this bundle."""
    if (record := current_record.get()) is not None:
        record.model = name
