"""Which rate is measured next: up until the limit is broken, twice at one rate, then between the last two."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

FIRST = 0.6
"""Part of the closed loop's rate at which the search begins."""
STEP = 1.3
"""From a rate to the next one, where the limit is known from one side."""


TRIES = 2
"""Runs that have to break the limit until a rate counts as broken: a pause of a shared machine breaks one of them."""


@dataclass
class Ladder:
    """The highest rate at which a system keeps the limit.

    Attributes:
        start: answers per second of a closed loop: most that the system can do.
        kept: rates of runs that kept the limit.
        missed: rates of runs that did not; one that came twice may be in it twice.
    """

    start: float
    kept: list[float] = field(default_factory=list)
    missed: list[float] = field(default_factory=list)

    @property
    def broken(self) -> set[float]:
        """Rates that no run kept, of as many as a rate has."""
        return {rate for rate in self.missed if self.missed.count(rate) >= TRIES and rate not in self.kept}

    @property
    def best(self) -> float:
        """The highest rate that was kept, below all that are broken; 0 where there is none."""
        worst = min(self.broken, default=float("inf"))
        return max((rate for rate in self.kept if rate < worst), default=0.0)

    @property
    def next(self) -> float:
        """The rate to measure now."""
        if not self.kept and not self.missed:
            return FIRST * self.start
        if open_rates := set(self.missed) - self.broken - set(self.kept):
            return min(open_rates)
        if not self.broken:
            return max(self.kept) * STEP
        worst = min(self.broken)
        return sqrt(self.best * worst) if self.best else worst / STEP

    def note(self, rate: float, *, kept: bool) -> None:
        """What a run found."""
        (self.kept if kept else self.missed).append(rate)


def keeps(p99: float, failed: int, requests: int, limit: float) -> bool:
    """Whether a run kept the limit: all but one in a thousand requests were answered, 99 of 100 in time."""
    return requests > 0 and p99 <= limit and failed <= requests / 1000
