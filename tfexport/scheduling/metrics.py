"""The metrics of a scheduler."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(slots=True)
class Histogram:
    """A histogram: the number of values up to each bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    """The number of values up to each bound and above the one before. The last number counts values above all bounds."""
    total: float = 0.0
    """The sum of all values."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total, "count": self.count}


def _seconds() -> Histogram:
    return Histogram(SECONDS)


def _rows() -> Histogram:
    return Histogram(ROWS)


@dataclass(slots=True)
class Counters:
    """Counters, and gauges of the current state."""

    queued: int = 0
    """Requests with a waiting sentence, now."""
    queued_tokens: int = 0
    """Waiting source ids, now."""
    live_rows: int = 0
    """Rows of the sentences in workers, now."""
    accepted: int = 0
    """Requests that were accepted into the queue."""
    rejected: int = 0
    """Requests that a full queue rejected."""
    finished: int = 0
    """Requests that were answered."""
    failed: int = 0
    """Requests that an error ended."""
    cancelled: int = 0
    """Requests that their callers cancelled."""
    expired: int = 0
    """Requests that were not answered by their deadline."""
    restarts: int = 0
    """Workers that ended and were replaced."""
    sentences: int = 0
    """Sentences that were decoded."""
    source_tokens: int = 0
    """Source ids of the sentences that were decoded."""
    tokens: int = 0
    """Tokens of their best outputs."""
    step_rows: Histogram = field(default_factory=_rows)
    """The rows of each step."""
    step_seconds: Histogram = field(default_factory=_seconds)
    """The seconds of each step, including the encoding before it."""
    waiting_seconds: Histogram = field(default_factory=_seconds)
    """The seconds from the request of each sentence to its beginning."""
    request_seconds: Histogram = field(default_factory=_seconds)
    """The seconds from each answered request to its answer."""

    def to_dict(self) -> dict[str, object]:
        """A JSON-ready copy."""
        values = {metric.name: getattr(self, metric.name) for metric in fields(self)}
        return {name: value.to_dict() if isinstance(value, Histogram) else value for name, value in values.items()}
