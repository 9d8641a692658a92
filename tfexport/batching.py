"""Many sentences to batches, and batches to workers.

Sentences of about one length share a batch, so that little of it is padding. Workers are threads that search over one
runtime, each in a state of its own: weights are in memory once, and while one worker is in Python the others are in ONNX
Runtime, which lets Python go. On a CPU several workers of one thread beat one worker of several threads, because nothing in
a step has to wait for anything else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tfexport.cpus import usable_cpus
from tfexport.runtimes.base import Runtime
from tfexport.search import Hypothesis, SearchOptions, search

MOST_IDS = 16_384
"""Source ids of a batch, padding included: long sentences come in smaller batches, so that memory stays bounded."""

AHEAD = 1
"""Windows that are begun while an earlier one is not done, so that no worker waits at its end."""

Ids = Sequence[int]


@dataclass(frozen=True)
class Split:
    """How the CPUs are used: `workers` searches at once, each with `threads` threads."""

    workers: int
    threads: int

    def __str__(self) -> str:
        def some(count: int, noun: str) -> str:
            return f"{count} {noun}{'' if count == 1 else 's'}"

        return f"{some(self.workers, 'worker')} of {some(self.threads, 'thread')}"

    @classmethod
    def of(cls, workers: int | None, threads: int | None, *, at_once: bool) -> Split:
        """The split that is asked for; what is not said is chosen for the CPUs that this process may use.

        Args:
            at_once: whether many sentences are there to be decoded at once. If not, all CPUs work at one.
        """
        cpus = usable_cpus()
        if workers is None:
            workers = max(1, cpus // (threads or 1)) if at_once else 1
        return cls(workers, threads or max(1, cpus // workers))


def decode_all(
    runtime: Runtime[Any], sources: Sequence[Ids], options: SearchOptions, *, batch_size: int, workers: int = 1
) -> list[list[Hypothesis]]:
    """The hypotheses of each of `sources` (encoder ids), decoded in batches of up to `batch_size`."""
    return next(decode_windows(runtime, [sources], options, batch_size=batch_size, workers=workers))


def decode_windows(
    runtime: Runtime[Any],
    windows: Iterable[Sequence[Ids]],
    options: SearchOptions,
    *,
    batch_size: int,
    workers: int = 1,
) -> Iterator[list[list[Hypothesis]]]:
    """The hypotheses of each source of each window, in order.

    Args:
        windows: sources that may share batches, as many as may be in memory; one window more than this is read ahead.
        workers: threads that search; 1 searches in this one. More only over a runtime that several threads may use.
    """
    size = runtime.capacity.batch_size(batch_size, options.beam)

    def work(sources: Sequence[Ids], places: list[int]) -> list[list[Hypothesis]]:
        return search(runtime, [sources[place] for place in places], options)

    if workers == 1:
        for sources in windows:
            split = batches([len(source) for source in sources], size)
            yield _placed([(places, work(sources, places)) for places in split])
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="tfexport")
    begun: deque[list[tuple[list[int], Future[list[list[Hypothesis]]]]]] = deque()
    try:
        for sources in windows:
            split = batches([len(source) for source in sources], size)
            begun.append([(places, pool.submit(work, sources, places)) for places in split])
            if len(begun) > AHEAD:
                yield _placed([(places, future.result()) for places, future in begun.popleft()])
        while begun:
            yield _placed([(places, future.result()) for places, future in begun.popleft()])
    finally:
        pool.shutdown(cancel_futures=True)


def batches(lengths: Sequence[int], batch_size: int, most_ids: int = MOST_IDS) -> list[list[int]]:
    """Indices into `lengths`, in batches of like length, the longest first: so the last ones, which decide when all workers
    are done, are short."""
    found: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        batch = found[-1] if found else []
        if batch and len(batch) < batch_size and lengths[batch[0]] * (len(batch) + 1) <= most_ids:
            batch.append(index)
        else:
            found.append([index])
    return found


def _placed(pieces: Sequence[tuple[list[int], list[list[Hypothesis]]]]) -> list[list[Hypothesis]]:
    """The outputs in the order of their places."""
    by_place = {place: output for places, outputs in pieces for place, output in zip(places, outputs, strict=True)}
    return [by_place[place] for place in range(len(by_place))]
