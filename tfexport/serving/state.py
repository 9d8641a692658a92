"""The state of the whole server."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from tfexport.errors import QueueFullError

ServerStatus = Literal["ready", "draining"]

PAUSE = 0.05
"""Seconds in which requests are rejected unread after a scheduler rejected one. The scheduler's queue has about a second
of work, and does not run empty in this time."""


@dataclass
class State:
    """The state of one server."""

    is_draining: bool = False
    """The server ends when all accepted requests are answered."""
    active: int = 0
    """The number of requests that are being answered."""
    unanswered: int = 0
    """The number of requests that were cancelled at the end of the server."""

    full: tuple[str, float] | None = None
    """The message and the seconds of the last rejection by a scheduler. The error object itself would keep its stack frames
    and the request alive."""
    full_until: float = 0.0
    """The time until which other requests are rejected because of it."""

    def note_full(self, error: QueueFullError) -> None:
        """Record that a scheduler rejected a request."""
        if not error.bulk:
            self.full, self.full_until = (str(error), error.retry_after), time.monotonic() + PAUSE

    def refusal(self) -> QueueFullError | None:
        """The error of requests that are rejected unread, if any. Reading a request takes a fraction of a translation's
        time: under heavy overload the server would do little else."""
        is_full = self.full is not None and time.monotonic() < self.full_until
        return QueueFullError(*self.full) if is_full and self.full is not None else None

    @property
    def status(self) -> ServerStatus:
        """The status for load balancers."""
        return "draining" if self.is_draining else "ready"
