"""Workers: concurrent searches over one runtime, with one copy of the weights in memory.

On a CPU, several workers with one thread are faster than one worker with several threads, because no part of a step waits
for another.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from threading import Event
from typing import TypeVar

from tfexport.errors import TfexportError
from tfexport.runtimes.base import Runtime
from tfexport.search.search import Hypothesis, SearchOptions, Source, search
from tfexport.system.processes import end_with_parent, return_freed_memory, usable_cpus

CAN_FORK = sys.platform == "linux"

SECONDS_TO_END = 5
"""Time limit for the end of the process pool's thread after its processes were killed; it takes some milliseconds."""

Value = TypeVar("Value")
Batch = Sequence[Source | Sequence[int]]
Outputs = list[list[list[Hypothesis]]]
"""The hypotheses for each source of each batch."""


@dataclass(frozen=True)
class CpuSplit:
    """The division of the CPUs: `workers` concurrent searches with `threads` threads each."""

    workers: int
    threads: int

    def __str__(self) -> str:
        def some(count: int, noun: str) -> str:
            return f"{count} {noun}{'' if count == 1 else 's'}"

        return f"{some(self.workers, 'worker')} of {some(self.threads, 'thread')}"

    @classmethod
    def choose(cls, workers: int | None, threads: int | None, *, at_once: bool) -> CpuSplit:
        """The requested split. A number that is None is chosen for the CPUs that this process may use.

        Args:
            at_once: many sentences are available. Otherwise all CPUs work on one batch.
        """
        cpus = usable_cpus()
        if workers is None:
            workers = max(1, cpus // (threads or 1)) if at_once else 1
        return cls(workers, threads or max(1, cpus // workers))


class WorkerPool:
    """Workers that search concurrently over one runtime.

    Workers are forks of this process if possible, which share its memory until one writes to it; otherwise they are threads.
    (A step of a small model takes less time than a switch between Python's threads.) A single worker is this process itself.

    Args:
        options: the options of the searches to prepare the runtime for. Other searches load what they need when they begin.
        forks: False to use threads in any case.
    """

    def __init__(self, runtime: Runtime, workers: int, options: SearchOptions, *, forks: bool = True):
        self.runtime, self.workers = runtime, workers
        self._pool: Executor | None = None
        self._processes: list[BaseProcess] = []
        self._stopped = Event()
        # Load now, not in the first search: another bundle may be in the folder by then.
        runtime.prepare(options.needs)
        if workers == 1:
            return
        if forks and CAN_FORK and runtime.capabilities.fork:
            # A garbage collection writes to every object that it visits, and written memory is no longer shared.
            gc.freeze()
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(
                workers, context, initializer=_begin_process, initargs=(runtime, os.getpid())
            )
        else:
            self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tfexport")

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)

    def close(self, *, at_once: bool = False) -> None:
        """End the workers after their current work, or `at_once`: a batch may take many seconds."""
        if self._pool is None:
            return
        self._stopped.set()
        if isinstance(self._pool, ProcessPoolExecutor):
            gc.unfreeze()
        if at_once:
            for process in self._processes:
                process.kill()
        killed = at_once and self._processes
        # Before this thread has ended, Python's exit may write into a pipe that the thread closes, and print a traceback.
        manager = getattr(self._pool, "_executor_manager_thread", None)
        self._pool.shutdown(wait=not killed, cancel_futures=True)
        if killed and manager is not None:
            manager.join(SECONDS_TO_END)  # with a time limit: the thread waits for the answers of killed workers

    def search(self, batches: Sequence[Batch], options: SearchOptions) -> Future[Outputs]:
        """Let the next free worker decode `batches` in order.

        Raises:
            TfexportError: the system or a user ended a worker process. The future may raise BrokenProcessPool for the same
                reason; see `worker_ended_error`.
        """
        if isinstance(self._pool, ProcessPoolExecutor):
            return self._submitted(self._pool, _search_in_process, batches, options)
        if self._pool is not None:
            return self._pool.submit(_search_all, self.runtime, batches, options, self._stopped)
        done: Future[Outputs] = Future()
        done.set_result(_search_all(self.runtime, batches, options))
        return done

    def begin(self) -> None:
        """Start the processes now instead of with the first search."""
        if isinstance(self._pool, ProcessPoolExecutor):
            self._submitted(self._pool, os.getpid)

    def _submitted(
        self, pool: ProcessPoolExecutor, function: Callable[..., Value], *arguments: object
    ) -> Future[Value]:
        others = [] if self._processes else multiprocessing.active_children()
        try:
            return pool.submit(function, *arguments)
        except BrokenProcessPool as error:
            raise worker_ended_error() from error
        finally:  # the first submission forks all of them
            self._processes = self._processes or [c for c in multiprocessing.active_children() if c not in others]


_runtime: Runtime | None = None
"""The runtime of a worker process, inherited by the fork."""


def _begin_process(runtime: Runtime, parent: int) -> None:
    global _runtime
    end_with_parent()
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _runtime = runtime


def _search_in_process(batches: Sequence[Batch], options: SearchOptions) -> Outputs:
    assert _runtime is not None
    outputs = _search_all(_runtime, batches, options)
    return_freed_memory()
    return outputs


def _search_all(
    runtime: Runtime, batches: Sequence[Batch], options: SearchOptions, stopped: Event | None = None
) -> Outputs:
    return [search(runtime, batch, options) for batch in batches if stopped is None or not stopped.is_set()]


def worker_ended_error() -> TfexportError:
    """The error for a worker process that was killed."""
    return TfexportError(
        "a worker process ended. The system ends processes when memory runs out. Use fewer --workers, or a smaller "
        "--batch-size."
    )
