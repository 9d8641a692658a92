"""Many sentences to batches, and batches to workers.

Sentences of about one length share a batch, so that little of it is padding. Workers search over one runtime, each in a
state of its own; weights are in memory once. On a CPU several workers of one thread beat one worker of several threads,
because nothing in a step has to wait for anything else.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from threading import Event
from typing import Any, Protocol, runtime_checkable

from tfexport.decoding.search import Hypothesis, SearchOptions, Source, search
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Needs, Runtime
from tfexport.system.processes import end_with_parent, return_freed_memory, usable_cpus

MOST_IDS = 16_384
"""Source ids of a batch, padding included: long sentences come in smaller batches, so that memory stays bounded."""

AHEAD = 1
"""Windows that are begun while an earlier one is not done, so that no worker waits at its end."""

TASKS = 2
"""Of each worker in a window: several batches are one task, because giving one to a process takes some tenths of a
millisecond; but not all of them, so that who is done early helps the others."""

SECONDS_TO_END = 5
"""For the thread that looks after workers, when they were killed; it takes some milliseconds."""

Ids = Source | Sequence[int]
Found = list[list[list[Hypothesis]]]
"""Of batches, of sources, the hypotheses."""


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


@runtime_checkable
class Prepared(Protocol):
    """A runtime that loads what it needs before a search, and whose process may be forked then, if it says so."""

    def prepare(self, needs: Needs) -> bool:
        """Load what such a search needs, so that it is in memory once; whether the process may be forked then."""
        ...


class Team:
    """Workers that search over one runtime at once.

    They are forks of this process where that is possible, which share its memory as long as nobody writes to it, and
    threads elsewhere. A step of a small model takes less time than it takes Python's threads to wait for one another.
    One worker works right here.

    Args:
        options: of the searches that the runtime is loaded for; others load what they need by themselves.
        forks: False for threads in any case.
    """

    def __init__(self, runtime: Runtime[Any], workers: int, options: SearchOptions, *, forks: bool = True):
        self.runtime, self.workers = runtime, workers
        self._pool: Executor | None = None
        self._processes: list[BaseProcess] = []
        self._stopped = Event()
        # Now, not in the first search: the bundle may be another one by then.
        forkable = isinstance(runtime, Prepared) and runtime.prepare(options.needs)
        if workers == 1:
            return
        if forks and CAN_FORK and forkable:
            # A garbage collection writes into every object that it looks at, and what is written is shared no more.
            gc.freeze()
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(runtime, os.getpid()))
        else:
            self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tfexport")

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)

    def close(self, *, at_once: bool = False) -> None:
        """End the workers, when they are done or `at_once`: a batch may take many seconds."""
        if self._pool is None:
            return
        self._stopped.set()
        if isinstance(self._pool, ProcessPoolExecutor):
            gc.unfreeze()
        if at_once:
            for process in self._processes:
                process.kill()
        killed = at_once and self._processes
        # Until it has ended, Python's exit may write into a pipe that it closes, and print a traceback.
        manager = getattr(self._pool, "_executor_manager_thread", None)
        self._pool.shutdown(wait=not killed, cancel_futures=True)
        if killed and manager is not None:
            manager.join(SECONDS_TO_END)  # not for ever: it waits for what a killed worker was about to say

    def search(self, several: Sequence[Sequence[Ids]], options: SearchOptions) -> Future[Found]:
        """The hypotheses of each source of each batch, decoded one batch after the other by the next worker that is free.

        Raises:
            TfexportError: the workers were ended from outside; so may what is returned.
        """
        if isinstance(self._pool, ProcessPoolExecutor):
            others = [] if self._processes else multiprocessing.active_children()
            try:
                return self._pool.submit(_search_forked, several, options)
            except BrokenProcessPool as error:
                raise _ended() from error
            finally:  # the first submission forks all of them
                self._processes = self._processes or [c for c in multiprocessing.active_children() if c not in others]
        if self._pool is not None:
            return self._pool.submit(_search, self.runtime, several, options, self._stopped)
        done: Future[Found] = Future()
        done.set_result(_search(self.runtime, several, options))
        return done


CAN_FORK = sys.platform == "linux"

_forked: Runtime[Any] | None = None
"""In a worker process its runtime, which came with the fork."""


def _begin(runtime: Runtime[Any], parent: int) -> None:
    global _forked
    end_with_parent()
    if os.getppid() != parent:  # it was ended before
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who ends the command ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _forked = runtime


def _search_forked(several: Sequence[Sequence[Ids]], options: SearchOptions) -> Found:
    assert _forked is not None
    found = _search(_forked, several, options)
    return_freed_memory()
    return found


def _search(
    runtime: Runtime[Any], several: Sequence[Sequence[Ids]], options: SearchOptions, stopped: Event | None = None
) -> Found:
    return [search(runtime, sources, options) for sources in several if stopped is None or not stopped.is_set()]


def _ended() -> TfexportError:
    return TfexportError(
        "a worker process ended, as the system does when memory runs out. Use fewer --workers, or a smaller --batch-size."
    )


def decode_all(
    runtime: Runtime[Any], sources: Sequence[Ids], options: SearchOptions, *, batch_size: int, workers: int = 1
) -> list[list[Hypothesis]]:
    """The hypotheses of each of `sources` (encoder ids), decoded in batches of up to `batch_size`."""
    with Team(runtime, workers, options) as team:
        return next(decode_windows(team, [sources], options, batch_size=batch_size))


def decode_windows(
    team: Team, windows: Iterable[Sequence[Ids]], options: SearchOptions, *, batch_size: int
) -> Iterator[list[list[Hypothesis]]]:
    """The hypotheses of each source of each window, in order.

    Args:
        windows: sources that may share batches, as many as may be in memory; with several workers one window more than this
            is read ahead.
    """
    size = team.runtime.capacity.batch_size(batch_size, options.width)
    ahead = AHEAD if team.workers > 1 else 0
    begun: deque[list[Task]] = deque()
    for sources in windows:
        # Few sentences are shared out, so that no worker is without any.
        share = max(1, min(size, -(-len(sources) // team.workers)))
        split = batches([len(source) for source in sources], share)
        count = min(len(split), TASKS * team.workers) if team.workers > 1 else 1
        tasks = [split[first::count] for first in range(count)]
        begun.append(
            [(task, team.search([[sources[i] for i in places] for places in task], options)) for task in tasks]
        )
        if len(begun) > ahead:
            yield _placed(begun.popleft())
            return_freed_memory()
    while begun:
        yield _placed(begun.popleft())


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


Task = tuple[list[list[int]], Future[Found]]
"""The places of the sources of some batches, and what is found for them."""


def _placed(tasks: Sequence[Task]) -> list[list[Hypothesis]]:
    """The outputs in the order of their places."""
    by_place: dict[int, list[Hypothesis]] = {}
    for task, future in tasks:
        try:
            found = future.result()
        except BrokenProcessPool as error:
            raise _ended() from error
        for places, outputs in zip(task, found, strict=True):
            by_place |= zip(places, outputs, strict=True)
    return [by_place[place] for place in range(len(by_place))]
