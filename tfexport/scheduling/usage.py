"""The client and the work of a call, for example for a server that logs its requests.

Set `current` before a call, and read it afterwards. Tasks and threads that the call starts see the same object.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Usage:
    """Sums over all decoded sentences."""

    client: str = ""
    """The name of the client. The sentences of several clients take turns."""
    sentences: int = 0
    source_tokens: int = 0
    tokens: int = 0
    """The tokens of the best outputs."""


current: ContextVar[Usage | None] = ContextVar("tfexport usage", default=None)
