"""A scheduler with its workers. Requests come from any thread, and their answers are futures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tfexport.errors import DeadlineError, UnavailableError
from tfexport.runtimes.base import Runtime
from tfexport.scheduling.options import ServingOptions
from tfexport.scheduling.scheduler import Scheduler
from tfexport.scheduling.sentences import Report
from tfexport.scheduling.usage import current
from tfexport.scheduling.workers import Worker, fork_server, start_worker
from tfexport.search.hypothesis import Hypothesis, Source
from tfexport.search.options import SearchOptions

Outputs = list[list[Hypothesis]]
"""The hypotheses of each sentence of a request."""

OnDecided = Callable[[int, tuple[int, ...], tuple[float, ...]], None]
"""A function with the arguments of `Listener.decided`. It is called in a thread of the service and must not block."""


LATE = 0.5
"""Seconds after a deadline in which workers may still report the request."""


class Service:
    """Decodes requests on workers until it is closed.

    Args:
        prepared: options of the searches whose graphs are loaded now. Other searches load their graphs when they begin.
    """

    def __init__(self, runtime: Runtime, options: ServingOptions, prepared: SearchOptions | None = None):
        runtime.prepare((prepared or SearchOptions()).needs)
        self.options, self._runtime = options, runtime
        self._scheduler = Scheduler(options, self._output_limit, time.monotonic)
        self._lock, self._closed = threading.RLock(), False
        self._server = fork_server(runtime, options)
        self._workers: dict[int, Worker] = {}
        self._numbers: dict[Worker, int] = {}
        self._delivered: list[_Delivery] = []
        with self._lock:
            for number in range(options.workers):
                self._start(number)
        self._ends = threading.Event()
        threading.Thread(target=self._watch, name="tfexport watches workers", daemon=True).start()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(
        self,
        sources: Sequence[Source],
        options: SearchOptions,
        listener: _Listener,
        *,
        bulk: bool = False,
        timeout: float | None = None,
    ) -> int:
        with self._lock:
            if self._closed:
                raise UnavailableError("this model's scheduler is closed. Load the model again.")
            usage = current.get()
            client = "" if usage is None else usage.client
            number = self._scheduler.submit(
                sources, options, listener, bulk=bulk, streams=listener.streams, timeout=timeout, client=client
            )
            self._push(self._scheduler.idle())  # busy workers take orders between their steps
            self._deliver()
        return number

    async def decode(self, sources: Sequence[Source], options: SearchOptions, **more: Any) -> Outputs:
        """The hypotheses of each sentence of a request. To cancel it, cancel the task: its sentences leave at the next step.

        Args:
            sources: the sentences of the request, at least one.
            more: `bulk`, which lets interactive requests go first; `timeout`, the seconds to the deadline; and `on_decided`,
                which is called with the tokens of each sentence as soon as they are decided.

        Raises:
            QueueFullError: too many requests wait; it has the seconds after which to try again.
            DeadlineError: the request was not answered before its deadline.
            UnavailableError: the service is closed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outputs] = loop.create_future()
        on_decided = more.pop("on_decided", None)
        number = self._submit(sources, options, _Listener(future, self._delivered, on_decided), **more)
        timeout = self.options.timeout if more.get("timeout") is None else more["timeout"]
        try:
            # The scheduler ends a request at its deadline when a worker reports. Stopped workers do not report.
            async with asyncio.timeout(None if timeout is None else timeout + LATE):
                outputs = await future
            if (usage := current.get()) is not None:
                usage.sentences += len(outputs)
                usage.source_tokens += sum(map(len, sources))
                usage.tokens += sum(len(hypotheses[0].ids) for hypotheses in outputs)
            return outputs
        except TimeoutError:
            raise DeadlineError(
                f"this request was not answered within {timeout:g} seconds. Give it more time, or send fewer."
            ) from None
        finally:
            if future.cancelled():
                self._cancel(number)

    def metrics(self) -> dict[str, object]:
        """The fields of `Counters`, JSON-ready."""
        with self._lock:
            return self._scheduler.counters.to_dict()

    @property
    def is_closed(self) -> bool:
        """Whether the service has stopped: it was closed, or a worker that ended cannot be replaced."""
        return self._closed

    @property
    def is_stalled(self) -> bool:
        """Whether requests wait and no worker has reported for `worker_timeout` seconds, or none has started for as long."""
        late = time.monotonic() - self.options.worker_timeout
        # Without the lock, which a large request holds for long.
        starting = [worker.waits_since for worker in list(self._workers.values())]
        return self._scheduler.is_stalled or all(since is not None and since < late for since in starting)

    def close(self) -> None:
        """End the workers. Unanswered requests fail."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ends.set()
            workers = list(self._workers.values())
            self._scheduler.close(
                UnavailableError("the model was closed before this request was answered. Send it again.")
            )
        # End the fork server first. The system then ends its workers, including one that hangs or was stopped.
        if self._server is not None:
            self._server.close()
        for worker in workers:
            worker.close()

    def _start(self, number: int) -> None:
        worker = start_worker(self._runtime, self._server, self._reported, self._ended)
        self._workers[number], self._numbers[worker] = worker, number
        self._scheduler.join(number)

    def _push(self, numbers: Sequence[int]) -> None:
        """Send orders to workers."""
        for number in numbers:
            orders = self._scheduler.take(number)
            if orders:
                self._workers[number].send(orders)

    def _watch(self) -> None:
        """Replace workers that hang, until the service is closed."""
        while not self._ends.wait(min(1.0, self.options.worker_timeout / 4)):
            with self._lock:
                if self._closed:
                    return
                hanging = [self._workers[number] for number in self._scheduler.silent()]
            for worker in hanging:
                worker.kill()

    def _cancel(self, number: int) -> None:
        with self._lock:
            self._scheduler.cancel(number)

    def _reported(self, worker: Worker, report: Report) -> None:
        with self._lock:
            if not self._closed:
                number = self._numbers[worker]
                self._scheduler.report(number, report)
                self._push([number])
                self._deliver()

    def _ended(self, worker: Worker, error: BaseException | None) -> None:
        """Replace a worker that ended by itself; another takes its sentences."""
        with self._lock:
            if self._closed:
                return
            number = self._numbers.pop(worker)
            self._scheduler.lose(number)
            try:
                self._start(number)
            except Exception as failure:
                self._closed = True
                self._scheduler.close(failure)
                return
            finally:
                self._deliver()
            self._push(self._scheduler.idle())

    def _deliver(self) -> None:
        """Wake each event loop once for all answers, because a call into another thread costs more than an answer."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Delivery]] = {}
        for delivery in self._delivered:
            by_loop.setdefault(delivery.future.get_loop(), []).append(delivery)
        self._delivered.clear()
        for loop, several in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed, so no task waits
                loop.call_soon_threadsafe(_resolve, several)

    def _output_limit(self, source: Source, options: SearchOptions) -> int:
        most = min(options.max_new_tokens, self._runtime.config.max_target_length, self._runtime.capacity.target)
        return most if source.most is None else min(most, source.most)


@dataclass(frozen=True)
class _Delivery:
    """An answer for a future of an event loop."""

    future: asyncio.Future[Outputs]
    outputs: Outputs | None = None
    error: Exception | None = None


def _resolve(several: Sequence[_Delivery]) -> None:
    for delivery in several:
        if delivery.future.done():
            continue
        if delivery.error is not None:
            delivery.future.set_exception(delivery.error)
        else:
            delivery.future.set_result(delivery.outputs or [])


class _Listener:
    """Sends the result of a request to a future of an event loop, together with other answers."""

    def __init__(self, future: asyncio.Future[Outputs], delivered: list[_Delivery], on_decided: OnDecided | None):
        self._future, self._delivered = future, delivered
        self._on_decided, self.streams = on_decided, on_decided is not None

    def decided(self, index: int, ids: tuple[int, ...], log_probs: tuple[float, ...]) -> None:
        if self._on_decided is not None:
            self._on_decided(index, ids, log_probs)

    def finished(self, outputs: Outputs) -> None:
        self._delivered.append(_Delivery(self._future, outputs))

    def failed(self, error: Exception) -> None:
        self._delivered.append(_Delivery(self._future, error=error))
