"""Measures how fast waiting sentences begin, to estimate the wait of a new one."""

from __future__ import annotations

import math
from collections.abc import Callable

MEMORY = 5.0
"""Seconds after which the weight of a measurement falls to a third: other kinds of requests have other speeds."""

LEAST = 0.5
"""Smallest number of remembered seconds with a queue for which a speed is known. Only while sentences wait are batches
full, and a short time gives no good estimate."""


class Speed:
    """The number of source ids decoded per second while more of them wait.

    Times without a queue do not count: an idle server decodes little but is not slow. Measurements fade with time, so that
    earlier slow requests do not cause the rejection of new ones.

    Args:
        clock: returns seconds, as `time.monotonic`.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._tokens = self._seconds = 0.0
        self._until, self._is_waiting = clock(), False

    def waits(self, is_waiting: bool) -> None:
        """A worker took all sentences that fit; `is_waiting` if others remain in the queue."""
        self._pass()
        self._is_waiting = is_waiting

    def decoded(self, tokens: int) -> None:
        """Count a decoded sentence with this number of source ids."""
        if self._is_waiting:
            self._tokens += tokens

    def value(self) -> float | None:
        """Source ids per second; None if unknown."""
        self._pass()
        return self._tokens / self._seconds if self._seconds >= LEAST and self._tokens >= 1 else None

    def _pass(self) -> None:
        """Count the time until now."""
        now = self._clock()
        seconds, self._until = now - self._until, now
        kept = math.exp(-seconds / MEMORY)
        self._tokens *= kept
        # The new seconds fade within themselves, like the tokens that were decoded in them.
        self._seconds = self._seconds * kept + (MEMORY * (1 - kept) if self._is_waiting else 0.0)
