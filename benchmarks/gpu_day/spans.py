"""What ran on a GPU and when: records of a profiler, and what they say of a decoding step."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of PyTorch's traces."""
ATTENTION = ("flash", "fmha", "attention", "sdpa", "softmax", "mha")
MOST_NAMES = 25
LONGEST_NAME = 110


class Span(NamedTuple):
    """A kernel, a copy or a fill; times in microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def to_host(self) -> bool:
        """Whether it is a copy to the host, for which the host waits: it ends a step, or several that were made at once."""
        return "DtoH" in self.name or "Device-to-Host" in self.name


def from_torch(trace: Path) -> list[Span]:
    """The spans of a trace that `torch.profiler` exported."""
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt", encoding="utf-8") as file:
        events: Iterable[dict[str, Any]] = json.load(file)["traceEvents"]
    found = [Span(e["name"], float(e["ts"]), float(e["dur"])) for e in events if e.get("cat") in ON_GPU and "dur" in e]
    return sorted(found, key=lambda span: span.start)


def from_nsys(text: str) -> list[Span]:
    """The spans of the report `cuda_gpu_trace` of `nsys stats`, as CSV in nanoseconds."""
    lines = text.splitlines()
    head = next((index for index, line in enumerate(lines) if line.startswith("Start (ns),")), len(lines))
    rows = csv.DictReader(lines[head:])
    found = [Span(row["Name"], int(row["Start (ns)"]) / 1e3, int(row["Duration (ns)"]) / 1e3) for row in rows]
    return sorted(found, key=lambda span: span.start)


def launches_of(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans of each step, or of the steps that were made at once, which end with their copy to the host.

    What comes before the first such copy has the encoder in it and is left out; so is what follows the last one.
    """
    groups: list[list[Span]] = [[]]
    for span in spans:
        groups[-1].append(span)
        if span.to_host:
            groups.append([])
    return groups[1:-1]


def about(spans: Sequence[Span], *, at_once: int = 1) -> dict[str, Any] | None:
    """Medians over the steps of a decode, in microseconds; None where no step can be told from another.

    Args:
        at_once: steps that end with one copy to the host. What they take in all is divided by their number.
    """
    launches = launches_of(spans)
    if not launches:
        return None

    def of_step(values: Iterable[float]) -> float:
        return statistics.median(values) / at_once

    inner = [[max(0.0, after.start - before.end) for before, after in itertools.pairwise(one)] for one in launches]
    between = [after[0].start - before[-1].end for before, after in itertools.pairwise(launches)]
    durations = [span.duration for launch in launches for span in launch]
    gaps = [gap for launch in inner for gap in launch]
    return {
        "steps": len(launches) * at_once,
        "at_once": at_once,
        "nodes": of_step(len(launch) for launch in launches),
        "step_us": of_step(launch[-1].end - launch[0].start for launch in launches),
        "busy_us": of_step(sum(span.duration for span in launch) for launch in launches),
        "node_us": statistics.median(durations),
        "gap_us": statistics.median(gaps) if gaps else None,
        "gaps_us": of_step(sum(launch) for launch in inner),
        "host_us": of_step(between) if between else None,
        "kernels": _kernels(launches, at_once),
    }


def whole(spans: Sequence[Span], tokens: int) -> dict[str, float]:
    """A whole decode of `tokens` tokens, encoder included, by the token: also where several steps end with one copy."""
    return {
        "nodes_a_token": len(spans) / tokens,
        "busy_us_a_token": sum(span.duration for span in spans) / tokens,
        "us_a_token": (max(span.end for span in spans) - spans[0].start) / tokens,
    }


def _kernels(launches: Sequence[Sequence[Span]], at_once: int) -> list[dict[str, Any]]:
    """The kernels that take most time, with runs and microseconds a step."""
    times: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for launch in launches:
        for span in launch:
            times[span.name] += span.duration
            counts[span.name] += 1
    first = sorted(times, key=lambda name: -times[name])[:MOST_NAMES]
    each = len(launches) * at_once
    return [{"name": n[:LONGEST_NAME], "a_step": counts[n] / each, "us_a_step": times[n] / each} for n in first]


def attention_kernels(names: Iterable[str]) -> list[str]:
    """Those of these kernels that compute attention or a softmax, by their names."""
    found = {name[:LONGEST_NAME] for name in names if any(word in name.lower() for word in ATTENTION)}
    return sorted(found)
