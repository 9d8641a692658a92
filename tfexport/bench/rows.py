"""The rows of a cell from its measurements, with every raw number, ready for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tfexport.bench.contestants import OWN, ProcessLayout
from tfexport.bench.lower_bound import lower_bound
from tfexport.bench.machine import Peaks
from tfexport.config import ModelConfig


@dataclass
class Attempt:
    """A setup with a batch size in one cell, and its measurements."""

    setup: ProcessLayout
    batch: int
    trial: float | None = None
    """The seconds of its trial; None if the trial failed."""
    seconds: list[float | None] = field(default_factory=list)
    """The seconds of each round; None for rounds without it. Empty if it was not chosen for the rounds."""
    slow: bool = False
    reason: str | None = None
    """The reason why it does not run, or no longer runs."""
    lengths: list[int] = field(default_factory=list)
    """The number of tokens of each output."""
    outputs: list[list[int]] = field(default_factory=list)
    memory: int | None = None
    """The peak memory of its process in this cell, in bytes."""
    calls: list[float] = field(default_factory=list)
    """The seconds of single calls with one batch."""
    profile: dict[str, Any] | None = None
    loaded: dict[str, Any] | None = None

    @property
    def ran(self) -> bool:
        """Whether it has a time, because it was in the rounds and did not fail."""
        return self.reason is None and any(seconds is not None for seconds in self.seconds)

    @property
    def median(self) -> float:
        return float(np.median([seconds for seconds in self.seconds if seconds is not None]))

    def trial_seconds(self) -> float:
        assert self.trial is not None
        return self.trial

    def takes_part(self, rounds: int, few: int) -> list[int]:
        """Its rounds: all, or `few` evenly spread ones if it is slow."""
        if not self.slow or rounds <= few:
            return list(range(rounds))
        return [number * rounds // few for number in range(few)]


def cell_record(
    config: ModelConfig,
    peaks: Peaks,
    stream: Sequence[Sequence[int]],
    beam: int,
    attempts: Mapping[str, Sequence[Attempt]],
    best: Mapping[str, Attempt],
) -> dict[str, Any]:
    """The sentences and rows of a cell. `best` has the attempt of each contestant that counts."""
    own = best.get(OWN)
    sources = [len(source) for source in stream]
    rows = []
    for name, attempt in best.items():
        row = _row(attempt, own, attempts[name])
        if attempt.ran:
            least = lower_bound(
                config,
                attempt.setup.precision,
                peaks,
                sources=sources,
                outputs=attempt.lengths,
                batch=attempt.batch,
                beam=beam,
            )
            row["floor"] = {**asdict(least), "tokens_per_second": sum(attempt.lengths) / least.seconds}
            row["times_floor"] = attempt.median / least.seconds
        rows.append(row)
    return {"sentences": len(stream), "source_lengths": sources, "rows": rows}


def _row(attempt: Attempt, own: Attempt | None, tried: Sequence[Attempt]) -> dict[str, Any]:
    setup = attempt.setup
    row: dict[str, Any] = {
        "contestant": setup.contestant.name,
        "reason": attempt.reason,
        "configuration": setup.about,
        "workers": setup.workers,
        "threads_of_each": setup.threads,
        "mkl": setup.mkl,
        "batch": attempt.batch,
        "trials": [
            {
                "configuration": candidate.setup.about,
                "batch": candidate.batch,
                "seconds": candidate.trial,
                "reason": candidate.reason,
            }
            for candidate in tried
        ],
        "load_seconds": attempt.loaded and attempt.loaded["seconds"],
        "versions": attempt.loaded and attempt.loaded["versions"],
        "seconds": attempt.seconds,
    }
    row |= dict.fromkeys(
        ("tokens_per_second", "sentences_per_second", "ratio", "ratios", "latency_ms", "step_ms", "parts")
    )
    row |= dict.fromkeys(("identical", "memory_mib", "floor", "times_floor"))
    if not attempt.ran:
        return row
    seconds = [duration for duration in attempt.seconds if duration is not None]
    tokens = sum(attempt.lengths)
    row["rounds"], row["fewer_rounds"] = len(seconds), attempt.slow
    row["lengths"] = attempt.lengths
    row["tokens_per_second"] = spread([tokens / duration for duration in seconds])
    row["sentences_per_second"] = spread([len(attempt.lengths) / duration for duration in seconds])
    row["memory_mib"] = attempt.memory and attempt.memory / 2**20
    row["call_seconds"] = attempt.calls
    row["latency_ms"] = percentiles(attempt.calls)
    if own is not None and own.ran and own is not attempt:
        row["ratios"] = ratios(attempt.seconds, own.seconds)
        row["ratio"] = spread(row["ratios"])
        row["identical"] = sum(ids == other for ids, other in zip(attempt.outputs, own.outputs, strict=True))
    if attempt.profile is not None:
        row |= _parts(attempt.profile, setup.workers)
    return row


def _parts(profile: Mapping[str, Any], workers: int) -> dict[str, Any]:
    """Seconds of the encoder, steps, reorders of the state, and the rest of all workers' time: search, copies, waiting."""
    parts = dict(profile["parts"])
    rest = max(0.0, profile["seconds"] * workers - sum(parts.values()))
    return {
        "parts": {**parts, "rest": rest},
        "step_ms": percentiles(profile["steps"]),
        "step_seconds": profile["steps"],
    }


def ratios(seconds: Sequence[float | None], own_seconds: Sequence[float | None]) -> list[float]:
    """`seconds` divided by `own_seconds`, for each round in which both ran."""
    both = zip(seconds, own_seconds, strict=True)
    return [value / other for value, other in both if value is not None and other is not None]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 10th and 90th percentile; None without values."""
    if not values:
        return None
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return {"median": float(median), "p10": float(p10), "p90": float(p90)}


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median, 90th and 99th percentile in milliseconds, and the number of values; None without values."""
    if not seconds:
        return None
    p50, p90, p99 = np.percentile(seconds, [50, 90, 99]) * 1e3
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "count": len(seconds)}
