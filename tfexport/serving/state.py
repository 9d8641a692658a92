"""The state of the whole server."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tfexport.errors import QueueFullError

ServerStatus = Literal["ready", "draining"]

PAUSE = 0.05
"""Seconds in which requests are rejected unread after a scheduler rejected one. The scheduler's queue has about a second
of work, and does not run empty in this time."""
MOST_FULL = 4096
"""The number of clients whose rejections are kept. If there are more, all are forgotten, and the next requests are read."""


class Rejection(NamedTuple):
    """The last rejection of a client's request by a scheduler. The error object itself would keep its stack frames, and so
    the request, alive."""

    message: str
    retry_after: float
    """The seconds after which the client may try again."""
    until: float
    """The monotonic time until which further requests of the client are rejected unread."""


NO_REJECTION = Rejection("", 0.0, 0.0)


@dataclass
class State:
    """The state of one server."""

    is_draining: bool = False
    """The server ends when all accepted requests are answered."""
    active: int = 0
    """The number of requests that are being answered."""
    active_of: Counter[str] = field(default_factory=Counter)
    """The number of requests that are being answered, by client."""
    held: int = 0
    """The number of bytes that the bodies of these requests may have."""
    held_of: Counter[str] = field(default_factory=Counter)
    """The number of bytes that the bodies of these requests may have, by client."""
    unanswered: int = 0
    """The number of requests that were cancelled at the end of the server."""

    full: dict[str, Rejection] = field(default_factory=dict)
    """The last rejection of each client by a scheduler."""

    def begin(self, client: str, size: int = 0) -> None:
        """Count a request that is being answered.

        Args:
            size: the number of bytes that its body may have.
        """
        self._count(client, 1, size)

    def end(self, client: str, size: int = 0) -> None:
        """Count a request as answered."""
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
            self.full[client] = Rejection(str(error), error.retry_after, time.monotonic() + PAUSE)

    def repeated_refusal(self, client: str = "") -> QueueFullError | None:
        """The error for a request of a client that is rejected unread, if any. Reading a request takes a fraction of the
        time of a translation, and under heavy overload the server would do little else."""
        rejection = self.full.get(client, NO_REJECTION)
        if time.monotonic() >= rejection.until:
            return None
        return QueueFullError(rejection.message, rejection.retry_after)

    @property
    def status(self) -> ServerStatus:
        """The status for load balancers."""
        return "draining" if self.is_draining else "ready"
