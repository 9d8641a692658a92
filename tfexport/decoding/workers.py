"""Workers: several searches at once over one runtime, whose weights are in memory once.

On a CPU several workers of one thread beat one worker of several threads, because nothing in a step has to wait for
anything else.
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
from typing import Any, TypeVar

from tfexport.decoding.search import Hypothesis, SearchOptions, Source, search
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Runtime
from tfexport.system.processes import end_with_parent, return_freed_memory, usable_cpus

CAN_FORK = sys.platform == "linux"

SECONDS_TO_END = 5
"""For the thread of the process pool, after its processes were killed; it takes some milliseconds."""

Given = TypeVar("Given")
Batch = Sequence[Source | Sequence[int]]
Outputs = list[list[list[Hypothesis]]]
"""The hypotheses of each source of each batch."""


@dataclass(frozen=True)
class CpuSplit:
    """How the CPUs are used: `workers` searches at once, each with `threads` threads."""

    workers: int
    threads: int

    def __str__(self) -> str:
        def some(count: int, noun: str) -> str:
            return f"{count} {noun}{'' if count == 1 else 's'}"

        return f"{some(self.workers, 'worker')} of {some(self.threads, 'thread')}"

    @classmethod
    def choose(cls, workers: int | None, threads: int | None, *, at_once: bool) -> CpuSplit:
        """The requested split; a number that is None is chosen for the CPUs that this process may use.

        Args:
            at_once: many sentences wait to be decoded. If not, all CPUs work on one batch.
        """
        cpus = usable_cpus()
        if workers is None:
            workers = max(1, cpus // (threads or 1)) if at_once else 1
        return cls(workers, threads or max(1, cpus // workers))


class WorkerPool:
    """Workers that search over one runtime at once.

    They are forks of this process where that is possible, which share its memory as long as none writes to it, and threads
    elsewhere. A step of a small model takes less time than Python's threads need to take turns. A single worker is this
    process itself.

    Args:
        options: of the searches that the runtime is prepared for; other searches load what they need when they begin.
        forks: False for threads in any case.
    """

    def __init__(self, runtime: Runtime[Any], workers: int, options: SearchOptions, *, forks: bool = True):
        self.runtime, self.workers = runtime, workers
        self._pool: Executor | None = None
        self._processes: list[BaseProcess] = []
        self._stopped = Event()
        # Now, not in the first search: another bundle may lie there by then.
        runtime.prepare(options.needs)
        if workers == 1:
            return
        if forks and CAN_FORK and runtime.capabilities.fork:
            # A garbage collection writes to every object that it visits, and memory that is written to is not shared.
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
            manager.join(SECONDS_TO_END)  # not for ever: it waits for the answers of killed workers

    def search(self, batches: Sequence[Batch], options: SearchOptions) -> Future[Outputs]:
        """Let the next free worker decode `batches`, one after the other.

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
        """Make the processes now, and not with the first search."""
        if isinstance(self._pool, ProcessPoolExecutor):
            self._submitted(self._pool, os.getpid)

    def _submitted(
        self, pool: ProcessPoolExecutor, function: Callable[..., Given], *arguments: object
    ) -> Future[Given]:
        others = [] if self._processes else multiprocessing.active_children()
        try:
            return pool.submit(function, *arguments)
        except BrokenProcessPool as error:
            raise worker_ended_error() from error
        finally:  # the first submission forks all of them
            self._processes = self._processes or [c for c in multiprocessing.active_children() if c not in others]


_runtime: Runtime[Any] | None = None
"""The runtime of a worker process, which came with the fork."""


def _begin_process(runtime: Runtime[Any], parent: int) -> None:
    global _runtime
    end_with_parent()
    if os.getppid() != parent:  # the parent ended before
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
    runtime: Runtime[Any], batches: Sequence[Batch], options: SearchOptions, stopped: Event | None = None
) -> Outputs:
    return [search(runtime, batch, options) for batch in batches if stopped is None or not stopped.is_set()]


def worker_ended_error() -> TfexportError:
    return TfexportError(
        "a worker process ended. The system ends processes when memory runs out. Use fewer --workers, or a smaller "
        "--batch-size."
    )
