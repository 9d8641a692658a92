"""Speed and memory of the peers: forced output lengths, warm-up, repeats that go round robin over the peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.peers.decoders import Peer, one_line
from tfexport.errors import TfexportError
from tfexport.search.search import SearchOptions


@dataclass(frozen=True)
class Setting:
    """What is decoded: `sources` as one batch, each to exactly `tokens` tokens."""

    sources: Sequence[Sequence[int]]
    beam: int
    tokens: int

    @property
    def options(self) -> SearchOptions:
        """eos may come as the last token only, which is where the limit ends all others."""
        return SearchOptions(beam=self.beam, min_length=self.tokens - 1, max_length=self.tokens)


@dataclass
class Runs:
    """The timed runs of one peer in one setting."""

    seconds: list[float] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    """Seconds of each step of each run."""
    memory: dict[str, Any] | None = None
    error: str | None = None


class Meter:
    """GPU memory that a peer takes, in MiB: what it holds since before it was loaded, in the settings up to this one.

    PyTorch's allocator is asked for the peak of what it gave out. Other libraries are measured by how far the free memory
    of the GPU falls, which they return late or never, so that it is near their peak. Nothing else may run meanwhile.
    """

    def __init__(self, device: str, uses_torch: bool):
        self._on, self._uses_torch = device == "cuda", uses_torch
        self._held = 0

    def around(self, work: Callable[[], None]) -> dict[str, Any] | None:
        """Do `work` and measure; None without a GPU."""
        if not self._on:
            work()
            return None
        import torch

        torch.cuda.synchronize()
        if self._uses_torch:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
            torch.cuda.synchronize()
            peak = self._held + torch.cuda.max_memory_allocated() - before
            self._held += torch.cuda.memory_allocated() - before
            return {"mib": peak / 2**20, "how": "torch.cuda.max_memory_allocated"}
        before = torch.cuda.mem_get_info()[0]
        work()
        torch.cuda.synchronize()
        self._held += before - torch.cuda.mem_get_info()[0]
        return {"mib": self._held / 2**20, "how": "cudaMemGetInfo"}


def measure(
    peers: Sequence[Peer], meters: Mapping[str, Meter], setting: Setting, *, warmup: int, repeats: int
) -> dict[str, Runs]:
    """Runs of each peer by its name. A peer that fails keeps its error and is left out from then on."""
    runs = {peer.name: Runs() for peer in peers}
    for peer in peers:
        with _noted(runs[peer.name]):
            runs[peer.name].memory = meters[peer.name].around(lambda peer=peer: _warm_up(peer, setting, warmup))  # type: ignore[misc]
    for repeat in range(repeats):
        # Another one begins each time, so that none always runs on a machine that the same other one has warmed.
        shift = repeat % max(1, len(peers))
        for peer in (*peers[shift:], *peers[:shift]):
            mine = runs[peer.name]
            if mine.error is None:
                with _noted(mine):
                    seconds, steps = _run(peer, setting)
                    mine.seconds.append(seconds)
                    mine.steps.append(steps)
    return runs


@contextmanager
def _noted(runs: Runs) -> Iterator[None]:
    """Keeps an exception as the error of `runs`."""
    try:
        yield
    except Exception as error:
        runs.error = one_line(error)


def _warm_up(peer: Peer, setting: Setting, count: int) -> None:
    for _ in range(count):
        _run(peer, setting)


def _run(peer: Peer, setting: Setting) -> tuple[float, list[float]]:
    """Seconds of one decode, whose results are on the host, and of each of its steps."""
    start = time.perf_counter()
    outputs = peer.decode(setting.sources, setting.options)
    seconds = time.perf_counter() - start
    lengths = {len(output) for output in outputs}
    if lengths != {setting.tokens}:
        raise TfexportError(f"it gave outputs of {sorted(lengths)} tokens where {setting.tokens} were asked for.")
    return seconds, list(peer.steps)


def summary(runs: Runs, baseline: Runs, tokens: int) -> dict[str, Any]:
    """One row of the benchmark table, raw numbers included.

    Args:
        baseline: of the peer that this one's speed is a ratio to, round by round.
        tokens: tokens of one run, over all its sentences.
    """
    row: dict[str, Any] = {"error": runs.error, "memory": runs.memory, "seconds": runs.seconds}
    row["step_seconds"] = runs.steps
    steps = [seconds * 1e3 for run in runs.steps for seconds in run]
    whole = runs.error is None and bool(runs.seconds)
    row["tokens_per_second"] = spread([tokens / seconds for seconds in runs.seconds]) if whole else None
    row["step_ms"] = spread(steps) if whole and steps else None
    row["ratio"] = None
    if whole and baseline.error is None:
        row["ratio"] = spread([theirs / mine for mine, theirs in zip(runs.seconds, baseline.seconds, strict=True)])
    return row


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and 10th and 90th percentile."""
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return {"median": float(median), "p10": float(p10), "p90": float(p90)}
