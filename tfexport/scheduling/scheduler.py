"""Decides which sentence begins when, and on which worker. It does not decode, start processes or wait.

    submit ──> queue ──take──> worker: a `Decoder` ──report──> listener of the request
                 └── cancelled, expired, rejected

Between its steps a worker takes orders (`take`) and reports their results (`report`). The clock is an argument, so that
tests can drive the scheduler step by step.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tfexport.errors import DeadlineError, QueueFullError, UnavailableError
from tfexport.scheduling.fair_queue import Waiting
from tfexport.scheduling.metrics import Counters
from tfexport.scheduling.options import ServingOptions
from tfexport.scheduling.queue import Queue
from tfexport.scheduling.sentences import Decided, Finished, Orders, Report, Sentence
from tfexport.scheduling.speed import Speed
from tfexport.search.hypothesis import Hypothesis, Source
from tfexport.search.options import SearchOptions

ADMITTED_PART = 5
"""A running batch takes new sentences at once if they fill one part in this number of the slots, and so many are free:
the sentences share their encoding and their search. Fewer sentences wait for others."""

MOST_STEPS = 4
"""The largest number of steps that sentences wait for others."""

MOST_STARTS = 2
"""The largest number of times that a sentence begins: it may be the reason why a worker ended."""

FIRST_ESTIMATE = 1.0
"""Seconds after which a rejected request should be sent again, while the speed is not known yet."""


class Listener(Protocol):
    """Receives the results of a request. It is called by one thread at a time."""

    def decided(self, index: int, ids: tuple[int, ...], log_probs: tuple[float, ...]) -> None:
        """All tokens with which the best output of sentence `index` certainly begins: never fewer than before."""
        ...

    def finished(self, outputs: list[list[Hypothesis]]) -> None:
        """The request is finished: `outputs` has the hypotheses of each sentence."""
        ...

    def failed(self, error: Exception) -> None:
        """The request failed, and will not be finished."""
        ...


@dataclass
class _Request:
    number: int
    sentences: list[Sentence]
    bulk: bool
    since: float
    listener: Listener
    outputs: dict[int, list[Hypothesis]] = field(default_factory=dict)
    n_reported: dict[int, int] = field(default_factory=dict)
    """The number of tokens of each sentence that the listener has: a sentence that begins again reports them again."""


@dataclass
class _Running:
    """A sentence that a worker decodes."""

    waiting: Waiting
    tokens: int
    """The largest number of slots of a row: source ids and output tokens."""
    starts: int


@dataclass
class _Worker:
    running: dict[Hashable, _Running] = field(default_factory=dict)
    rows: int = 0
    """The rows of its sentences."""
    drop: list[Hashable] = field(default_factory=list)
    steps: int = MOST_STEPS
    """The steps since sentences last began."""
    heard: float = 0.0
    """The time of its last report, or of the orders that it got while idle."""

    def begin(self, running: _Running) -> None:
        self.running[running.waiting.sentence.key] = running
        self.rows += running.waiting.sentence.rows

    def end(self, key: Hashable) -> _Running | None:
        """Remove a sentence; None if it was removed before."""
        running = self.running.pop(key, None)
        if running is not None:
            self.rows -= running.waiting.sentence.rows
        return running


class Scheduler:
    """The requests of one model.

    Args:
        output_limit: the largest number of output tokens for a source and options.
        clock: returns seconds, as `time.monotonic`.
    """

    def __init__(
        self,
        options: ServingOptions,
        output_limit: Callable[[Source, SearchOptions], int],
        clock: Callable[[], float],
    ):
        self.counters = Counters()
        self._options = options
        self._output_limit = output_limit
        self._clock = clock
        self._queue = Queue(options.bulk_share)
        self._requests: dict[int, _Request] = {}
        self._starts: dict[Hashable, int] = {}
        self._workers: dict[int, _Worker] = {}
        self._numbers = itertools.count()
        self._deadlines: list[tuple[float, int]] = []  # a heap
        self._speed = Speed(clock)
        self._begun = self._heard = clock()
        """The times at which a sentence last began, and at which any worker last reported or all were idle."""

    # For callers.

    def submit(
        self,
        sources: Sequence[Source],
        options: SearchOptions,
        listener: Listener,
        *,
        bulk: bool = False,
        streams: bool = False,
        timeout: float | None = None,
        client: str = "",
    ) -> int:
        """Queue a request; returns its number.

        Args:
            sources: its sentences, at least one.
            client: who sent it, if that is known. Clients take turns, and none has more than half of the queue.
            bulk: other requests take precedence; see `scheduling/queue.py`.
            streams: call `listener.decided`.
            timeout: seconds from now to the deadline; by default that of the serving options.

        Raises:
            QueueFullError: the queue is full, or the request would wait longer than `max_wait`.
        """
        self._expire()
        refusal = self.refusal(sum(map(len, sources)), client, bulk=bulk)
        if refusal is not None:
            self.counters.rejected += 1
            raise refusal
        now, number = self._clock(), next(self._numbers)
        timeout = self._options.timeout if timeout is None else timeout
        sentences = [Sentence((number, index), source, options, streams) for index, source in enumerate(sources)]
        if timeout is not None:
            heapq.heappush(self._deadlines, (now + timeout, number))
        if not self._requests:
            self._heard = now
        self._requests[number] = _Request(number, sentences, bulk, now, listener)
        for sentence in sentences:
            self._queue.push(Waiting(number, sentence, bulk, now, client))
        self.counters.accepted += 1
        self._note()
        return number

    def cancel(self, number: int) -> None:
        """Cancel a request. Its listener is not called any more, and its sentences leave at the next step."""
        if self._remove(number) is not None:
            self.counters.cancelled += 1
        self._note()

    def refusal(self, tokens: int, client: str = "", *, bulk: bool = False) -> QueueFullError | None:
        """Decide whether to reject a new request of `tokens` source ids; returns the error, or None to accept it."""
        if self._is_full(tokens) or (client and self._is_full_for(client, tokens)):
            seconds = self.retry_after()
            text = f"{self._queue.requests} requests wait already. Send this one again in {seconds:.1f} seconds."
            return QueueFullError(text, seconds, bulk=bulk)
        wait, most = self.expected_wait(client, bulk=bulk), self._options.max_wait
        if most is None or wait <= most:
            return None
        seconds = max(0.1, min(60.0, wait - 0.5 * most))
        text = (
            f"this request would wait {wait:.1f} seconds, longer than {most:g}. Send it again in {seconds:.1f} seconds."
        )
        return QueueFullError(text, seconds, bulk=bulk)

    def _is_full(self, tokens: int) -> bool:
        queue, options = self._queue, self._options
        return queue.requests >= options.max_queue or (
            queue.requests > 0 and queue.tokens + tokens > options.max_queue_tokens
        )

    def _is_full_for(self, client: str, tokens: int) -> bool:
        """Whether a client has its half of the queue."""
        requests, options = self._queue.requests_of(client), self._options
        return requests >= -(-options.max_queue // 2) or (
            requests > 0 and self._queue.tokens_of(client) + tokens > options.max_queue_tokens // 2
        )

    def expected_wait(self, client: str = "", *, bulk: bool = False) -> float:
        """The estimated number of seconds that a request of this client would wait before it begins, if it arrived now.

        This is the number of queued tokens before it, divided by the speed of the last seconds. It is at least the time that
        the client's first request of this kind has waited so far, or the time since a sentence last began if only others
        wait. That estimate also works before the speed is known, and when workers have stopped.
        """
        if not len(self._queue):
            return 0.0
        since, speed = self._queue.waiting_since(client, bulk=bulk), self._speed.value()
        before = self._queue.tokens_before(client, bulk=bulk)
        waited = self._clock() - (self._begun if since is None else since) if before else 0.0
        return waited if speed is None else max(waited, before / speed)

    def retry_after(self) -> float:
        """The estimated number of seconds until the queue has room, i.e. until half of the queued tokens have begun."""
        speed = self._speed.value()
        return FIRST_ESTIMATE if speed is None else max(0.1, min(60.0, 0.5 * self._queue.tokens / speed))

    def close(self, error: Exception) -> None:
        """Fail all requests with an error."""
        for number in list(self._requests):
            self._fail(number, error)
        self._note()

    # For workers.

    def join(self, worker: int) -> None:
        """Add an idle worker."""
        self._workers[worker] = _Worker()

    def take(self, worker: int) -> Orders:
        """The orders for a worker before its next step."""
        self._expire()
        mine = self._workers[worker]
        drop, mine.drop = tuple(mine.drop), []
        add: list[Sentence] = []
        encoded, longest = 0, max((running.tokens for running in mine.running.values()), default=0)
        share = -(-(self._queue.rows + sum(each.rows for each in self._workers.values())) // len(self._workers))
        while add or self._may_begin(mine):
            first = self._queue.first()
            if first is None:
                break
            sentence = first.sentence
            tokens = len(sentence.source) + self._output_limit(sentence.source, sentence.options)
            longest, rows = max(longest, tokens), mine.rows + sentence.rows
            encoded += len(sentence.source)
            # A sentence that is too large for a worker's limits gets a worker of its own.
            fits = rows <= min(share, self._options.slots) and rows * longest <= self._options.cache_tokens
            if (mine.running and not fits) or (add and encoded > self._options.step_tokens):
                break
            self._queue.pop()
            if not mine.running:
                mine.heard = self._clock()
            self._begun = self._clock()
            mine.begin(_Running(first, tokens, self._starts.get(sentence.key, 0) + 1))
            self.counters.waiting_seconds.add(self._clock() - first.since)
            add.append(sentence)
        if add:
            mine.steps = 0
        self._speed.waits(len(self._queue) > 0)
        self._note()
        return Orders(tuple(add), drop)

    def report(self, worker: int, report: Report) -> None:
        """Process the report of a worker."""
        mine = self._workers[worker]
        mine.heard = self._heard = self._clock()
        for rows, seconds in report.steps:
            self.counters.step_rows.add(rows)
            self.counters.step_seconds.add(seconds)
            mine.steps += 1
        for event in report.events:
            if isinstance(event, Decided):
                self._decided(event)
                continue
            running = mine.end(event.key)
            if running is None:  # it was cancelled in the meantime
                continue
            self._starts.pop(event.key, None)
            if isinstance(event, Finished):
                self._finished(event, len(running.waiting.sentence.source))
            else:
                self._fail(running.waiting.request, event.error)
        self._expire()
        self._note()

    def lose(self, worker: int) -> None:
        """Remove a worker that ended. Its sentences begin again on another worker, unless they did so before."""
        self.counters.restarts += 1
        gone = self._workers.pop(worker)
        for running in reversed(list(gone.running.values())):
            request, sentence = running.waiting.request, running.waiting.sentence
            if request not in self._requests:
                continue
            if running.starts >= MOST_STARTS:
                self._fail(request, _worker_ended())
                continue
            self._starts[sentence.key] = running.starts
            self._queue.push(running.waiting, front=True)
        self._note()

    def silent(self) -> list[int]:
        """The workers that have sentences and have not reported for `worker_timeout` seconds."""
        late = self._clock() - self._options.worker_timeout
        return [number for number, worker in self._workers.items() if worker.running and worker.heard < late]

    @property
    def is_stalled(self) -> bool:
        """Whether sentences run or wait, and no worker has reported for `worker_timeout` seconds."""
        return bool(self._requests) and self._heard < self._clock() - self._options.worker_timeout

    def idle(self) -> list[int]:
        """The workers without sentences."""
        return [number for number, worker in self._workers.items() if not worker.running]

    def _may_begin(self, worker: _Worker) -> bool:
        """Whether enough sentences that fit wait to begin together, or sentences have waited long enough."""
        if worker.steps >= MOST_STEPS or not worker.rows:
            return True
        together = min(self._options.slots - worker.rows, self._queue.rows)
        return together * ADMITTED_PART >= self._options.slots

    def _decided(self, event: Decided) -> None:
        request, index = self._of(event.key)
        if request is not None and len(event.ids) > request.n_reported.get(index, 0):
            request.n_reported[index] = len(event.ids)
            request.listener.decided(index, event.ids, event.log_probs)

    def _finished(self, event: Finished, source_tokens: int) -> None:
        self.counters.sentences += 1
        self.counters.source_tokens += source_tokens
        self._speed.decoded(source_tokens)
        self.counters.tokens += len(event.hypotheses[0].ids)
        request, index = self._of(event.key)
        if request is None:
            return
        request.outputs[index] = event.hypotheses
        if len(request.outputs) == len(request.sentences):
            del self._requests[request.number]
            self.counters.finished += 1
            self.counters.request_seconds.add(self._clock() - request.since)
            request.listener.finished([request.outputs[place] for place in range(len(request.sentences))])

    def _fail(self, number: int, error: Exception) -> None:
        request = self._remove(number)
        if request is not None:
            expired = isinstance(error, DeadlineError)
            self.counters.expired += expired
            self.counters.failed += not expired
            request.listener.failed(error)

    def _remove(self, number: int) -> _Request | None:
        request = self._requests.pop(number, None)
        if request is None:
            return None
        self._queue.remove({number})
        for sentence in request.sentences:
            self._starts.pop(sentence.key, None)
        keys = [sentence.key for sentence in request.sentences]
        for worker in self._workers.values():
            worker.drop += [key for key in keys if worker.end(key) is not None]
        return request

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            if number in self._requests:
                seconds = now - self._requests[number].since
                text = f"this request was not answered within {seconds:.1f} seconds. Give it more time, or send fewer."
                self._fail(number, DeadlineError(text))

    def _of(self, key: Hashable) -> tuple[_Request | None, int]:
        assert isinstance(key, tuple)
        number, index = key
        return self._requests.get(number), index

    def _note(self) -> None:
        self.counters.queued, self.counters.queued_tokens = self._queue.requests, self._queue.tokens
        self.counters.live_rows = sum(worker.rows for worker in self._workers.values())


def _worker_ended() -> UnavailableError:
    return UnavailableError(
        "the workers that decoded this request ended or hung. The system ends workers when memory runs out. Use fewer "
        "workers, or fewer slots."
    )
