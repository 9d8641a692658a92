"""How fast waiting sentences begin, for the time that one more will wait."""

from __future__ import annotations

import math
from collections.abc import Callable

MEMORY = 5.0
"""Seconds after which a measurement counts for a third: requests of other kinds are decoded at other speeds."""

LEAST = 0.5
"""Seconds with a queue within this memory, below which nothing is known: a speed is only that of full batches while
sentences wait, and what is decoded in a moment says little of it."""


class Speed:
    """Source ids that are decoded in a second while more of them wait.

    An idle server decodes little and is not slow, so other times do not count. Measurements are forgotten with the time on
    the clock: what a kind of request did some time ago cannot keep others out.

    Args:
        clock: seconds, as `time.monotonic` gives them.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._tokens = self._seconds = 0.0
        self._until, self._is_waiting = clock(), False

    def waits(self, is_waiting: bool) -> None:
        """A worker took what it has room for; `is_waiting` where that was not all."""
        self._pass()
        self._is_waiting = is_waiting

    def decoded(self, tokens: int) -> None:
        """A sentence with so many source ids is decoded."""
        if self._is_waiting:
            self._tokens += tokens

    def value(self) -> float | None:
        """Source ids in a second; None where it is not known."""
        self._pass()
        return self._tokens / self._seconds if self._seconds >= LEAST and self._tokens >= 1 else None

    def _pass(self) -> None:
        """Count the time until now."""
        now = self._clock()
        seconds, self._until = now - self._until, now
        kept = math.exp(-seconds / MEMORY)
        self._tokens *= kept
        # What is forgotten of these seconds themselves is left out of the sum, as of the tokens that they brought.
        self._seconds = self._seconds * kept + (MEMORY * (1 - kept) if self._is_waiting else 0.0)
