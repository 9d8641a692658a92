"""The state of the whole server."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from tfexport.errors import QueueFullError

ServerStatus = Literal["ready", "draining"]

PAUSE = 0.05
"""Seconds in which requests are rejected unread after a scheduler rejected one. The scheduler's queue has about a second
of work, and does not run empty in this time."""


MOST_FULL = 4096
"""Clients whose rejections are remembered. Older ones are forgotten, and their next requests are read."""


@dataclass
class State:
    """The state of one server."""

    is_draining: bool = False
    """The server ends when all accepted requests are answered."""
    active: int = 0
    """The number of requests that are being answered."""
    active_of: Counter[str] = field(default_factory=Counter)
    """The same by client."""
    held: int = 0
    """The bytes that the bodies of these requests may have."""
    held_of: Counter[str] = field(default_factory=Counter)
    """The same by client."""
    unanswered: int = 0
    """The number of requests that were cancelled at the end of the server."""

    full: dict[str, tuple[str, float, float]] = field(default_factory=dict)
    """By client, the message and the seconds of the last rejection by a scheduler, and the time until which further requests
    are rejected because of it. The error object itself would keep its stack frames and the request alive."""

    def begin(self, client: str, size: int = 0) -> None:
        """Count a request that is being answered, whose body may have so many bytes."""
        self._count(client, 1, size)

    def end(self, client: str, size: int = 0) -> None:
        """The request is answered."""
        self._count(client, -1, -size)

    def _count(self, client: str, requests: int, size: int) -> None:
        self.active += requests
        self.active_of[client] += requests
        self.held += size
        self.held_of[client] += size
        if not self.active_of[client]:
            del self.active_of[client], self.held_of[client]

    def note_full(self, error: QueueFullError, client: str = "") -> None:
        """Record that a scheduler rejected a request of a client."""
        if not error.bulk:
            if len(self.full) >= MOST_FULL:
                self.full.clear()
            self.full[client] = (str(error), error.retry_after, time.monotonic() + PAUSE)

    def repeated_refusal(self, client: str = "") -> QueueFullError | None:
        """The error with which a scheduler rejected a request of this client in the last moment, if any. It is repeated to
        the client's next requests, which are not read: under heavy overload the server would do little else."""
        message, seconds, until = self.full.get(client, ("", 0.0, 0.0))
        return QueueFullError(message, seconds) if time.monotonic() < until else None

    @property
    def status(self) -> ServerStatus:
        """The status for load balancers."""
        return "draining" if self.is_draining else "ready"
