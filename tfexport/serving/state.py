"""What the whole server is doing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from tfexport.errors import QueueFullError

ServerStatus = Literal["ready", "draining"]

PAUSE = 0.05
"""Seconds in which requests are refused unread after a scheduler refused one. Its queue holds about a second of work, and
does not run empty in this time."""


@dataclass
class State:
    """Of one server."""

    is_draining: bool = False
    """It ends when what it has is answered."""
    active: int = 0
    """Requests that are being answered."""
    unanswered: int = 0
    """Requests that were ended, as the server did not wait for them any longer."""

    full: tuple[str, float] | None = None
    """The message and the seconds of the last refusal of a scheduler, and when others stop to be refused because of it. The
    error itself would keep the frames that it passed through, with the request."""
    full_until: float = 0.0

    def note_full(self, error: QueueFullError) -> None:
        """A scheduler refused a request."""
        if not error.bulk:
            self.full, self.full_until = (str(error), error.retry_after), time.monotonic() + PAUSE

    def refusal(self) -> QueueFullError | None:
        """Why a request is refused unread. To read one takes as long as a part of a translation: under many times the
        requests that a server can answer, it would do little else."""
        is_full = self.full is not None and time.monotonic() < self.full_until
        return QueueFullError(*self.full) if is_full and self.full is not None else None

    @property
    def status(self) -> ServerStatus:
        """For load balancers."""
        return "draining" if self.is_draining else "ready"
