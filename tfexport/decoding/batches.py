"""Decodes many sentences in batches of similar length, so that batches have little padding."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

from tfexport.decoding.workers import Outputs, WorkerPool, worker_ended_error
from tfexport.runtimes.base import Runtime
from tfexport.search.search import Hypothesis, SearchOptions, Source
from tfexport.system.processes import return_freed_memory

MOST_IDS = 16_384
"""The largest number of source ids in a batch, padding included. It bounds the memory of batches of long sentences."""

WINDOWS_AHEAD = 1
"""Number of windows that begin before an earlier one is done, so that no worker waits at the end of a window."""

TASKS_PER_WORKER = 2
"""The number of tasks per worker in a window. A task has several batches, because a process takes some tenths of a
millisecond to receive a task. A worker gets more than one task, so that workers that finish early help the others."""

Sentence = Source | Sequence[int]
Task = tuple[list[list[int]], Future[Outputs]]
"""Batches, as the indices of their sources in the window, and the future of their outputs."""


def decode_all(
    runtime: Runtime, sources: Sequence[Sentence], options: SearchOptions, *, batch_size: int, workers: int = 1
) -> list[list[Hypothesis]]:
    """The hypotheses of each of `sources` (encoder ids), decoded in batches of up to `batch_size`."""
    with WorkerPool(runtime, workers, options) as pool:
        return next(decode_windows(pool, [sources], options, batch_size=batch_size))


def decode_windows(
    pool: WorkerPool,
    windows: Iterable[Sequence[Sentence] | None],
    options: SearchOptions,
    *,
    batch_size: int,
    max_batch_tokens: int | None = None,
) -> Iterator[list[list[Hypothesis]]]:
    """The hypotheses of each source of each window, in order.

    Args:
        max_batch_tokens: the largest number of source ids in a batch, padding included; by default `MOST_IDS`.
        windows: sources that may share batches, as many as may be in memory. With several workers the next window is read
            before the outputs of this one are returned. None means that no window is available yet: the outputs of a window
            that has begun are returned first.
    """
    size = pool.runtime.capacity.batch_size(batch_size, options.width)
    ahead = WINDOWS_AHEAD if pool.workers > 1 else 0
    begun: deque[list[Task]] = deque()
    for sources in windows:
        if sources is None:
            if begun:
                yield _in_order(begun.popleft())
            continue
        # A small window is divided among all workers.
        share = max(1, min(size, -(-len(sources) // pool.workers)))
        batches = batches_by_length([len(source) for source in sources], share, max_batch_tokens or MOST_IDS)
        count = min(len(batches), TASKS_PER_WORKER * pool.workers) if pool.workers > 1 else 1
        tasks = [batches[first::count] for first in range(count)]
        begun.append([(task, pool.search([[sources[i] for i in batch] for batch in task], options)) for task in tasks])
        if len(begun) > ahead:
            yield _in_order(begun.popleft())
            return_freed_memory()
    while begun:
        yield _in_order(begun.popleft())


def batches_by_length(lengths: Sequence[int], batch_size: int, most_ids: int = MOST_IDS) -> list[list[int]]:
    """Indices into `lengths`, in batches of similar length, the longest first. So the last batches are short, and the
    workers finish at about the same time."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        batch = batches[-1] if batches else []
        if batch and len(batch) < batch_size and lengths[batch[0]] * (len(batch) + 1) <= most_ids:
            batch.append(index)
        else:
            batches.append([index])
    return batches


def _in_order(tasks: Sequence[Task]) -> list[list[Hypothesis]]:
    """The outputs of a window, in the order of its sources.

    Raises:
        TfexportError: a worker process ended.
    """
    by_index: dict[int, list[Hypothesis]] = {}
    for task, future in tasks:
        try:
            outputs = future.result()
        except BrokenProcessPool as error:
            raise worker_ended_error() from error
        for batch, of_batch in zip(task, outputs, strict=True):
            by_index |= zip(batch, of_batch, strict=True)
    return [by_index[index] for index in range(len(by_index))]
