"""Requests that would wait too long are rejected at once: what is known of the speed, and of what is before them."""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import pytest

from makers.scheduling import Answer
from tests.support.fakes import EOS
from tfexport.errors import QueueFullError, TfexportError
from tfexport.scheduling.fair_queue import Waiting
from tfexport.scheduling.options import ServingOptions
from tfexport.scheduling.queue import Queue
from tfexport.scheduling.scheduler import Scheduler
from tfexport.scheduling.sentences import Finished, Report, Sentence
from tfexport.scheduling.speed import MEMORY, Speed
from tfexport.search.hypothesis import Hypothesis, Source
from tfexport.search.search import SearchOptions

TEN_STEPS = SearchOptions(suppress=(), min_length=9, max_length=10)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Fixed:
    """A scheduler with one worker that decodes each sentence in ten steps, of a hundredth of a second."""

    def __init__(self, **options: Any):
        self.now = 0.0
        self.scheduler = Scheduler(ServingOptions(**options), lambda *_: 10, lambda: self.now)
        self.scheduler.join(0)
        self._left: dict[Hashable, int] = {}

    def turn(self) -> None:
        for sentence in self.scheduler.take(0).add:
            self._left[sentence.key] = 10
        self._left = {key: left - 1 for key, left in self._left.items()}
        done = [key for key, left in self._left.items() if not left]
        self._left = {key: left for key, left in self._left.items() if left}
        best = Hypothesis((4,), 0.0, 0.0, True)
        self.scheduler.report(0, Report([Finished(key, [best]) for key in done], []))

    def run_for(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.01)):
            self.turn()
            self.now += 0.01

    def ask(self, *, bulk: bool = False) -> Answer:
        answer = Answer([Source([4, 4, 4, 4, EOS])], TEN_STEPS)
        self.scheduler.submit(answer.sources, TEN_STEPS, answer, bulk=bulk)
        return answer


def test_a_speed_is_that_of_times_with_a_queue() -> None:
    clock = Clock()
    speed = Speed(clock)
    for _ in range(100):
        clock.now += 0.1
        speed.waits(False)
        speed.decoded(1)  # an idle server: slow because little comes
    assert speed.value() is None
    speed.waits(True)
    for _ in range(40):
        clock.now += 0.1
        speed.decoded(50)
        speed.waits(True)
    assert speed.value() == pytest.approx(500, rel=0.02)
    clock.now += 0.5
    known = speed.value()
    assert known is not None
    assert known < 480  # nothing came out for a while


def test_a_speed_is_forgotten() -> None:
    clock = Clock()
    speed = Speed(clock)
    speed.waits(True)
    for _ in range(100):
        clock.now += 0.1
        speed.decoded(1)
        speed.waits(True)
    assert speed.value() == pytest.approx(10, rel=0.05)
    speed.waits(False)
    clock.now += 3 * MEMORY
    assert speed.value() is None


def test_what_is_before_a_request() -> None:
    queue = Queue(0.2)

    def push(number: int, size: int, *, bulk: bool) -> None:
        sentence = Sentence((number, 0), Source([4] * size), TEN_STEPS)
        queue.push(Waiting(number, sentence, bulk, float(number)))

    assert (queue.tokens_before(bulk=False), queue.tokens_before(bulk=True)) == (0, 0)
    for number in range(10):
        push(number, 10, bulk=True)
    assert queue.tokens_before(bulk=False) == 0  # interactive requests go before all of these
    assert queue.tokens_before(bulk=True) == 100
    assert queue.waiting_since(bulk=False) is None
    for number in range(10, 14):
        push(number, 20, bulk=False)
    assert queue.tokens_before(bulk=False) == pytest.approx(80 + 20)  # a fifth of those that begin are bulk
    assert queue.tokens_before(bulk=True) == pytest.approx(100 + 80)
    assert (queue.waiting_since(bulk=False), queue.waiting_since(bulk=True)) == (10.0, 0.0)
    queue.remove({0, 10})
    queue.pop()
    assert queue.tokens_before(bulk=False) == pytest.approx(40 + 10)


def test_under_overload_what_waits_stays_below_the_limit_and_the_rest_is_told_when_to_come() -> None:
    it = Fixed(slots=4, max_wait=1.0, max_queue=10_000)
    rejected: list[QueueFullError] = []
    for _ in range(1000):  # ten seconds: 40 sentences a second are decoded, 200 come
        for _ in range(2):
            try:
                it.ask()
            except QueueFullError as error:
                rejected.append(error)
        it.run_for(0.01)
    waits = it.scheduler.counters.waiting_seconds
    beyond = sum(waits.counts[waits.bounds.index(2.5) + 1 :])
    assert beyond == 0
    assert it.scheduler.counters.finished > 0.9 * 10 * 40
    assert len(rejected) == it.scheduler.counters.rejected > 1400
    assert all(0.1 <= error.retry_after <= 2 and math.isfinite(error.retry_after) for error in rejected)
    assert "longer than 1. Send it again in" in str(rejected[-1])
    it.run_for(1.5)
    it.ask()  # soon after, there is room


def test_a_full_queue_says_when_half_of_it_will_have_begun() -> None:
    it = Fixed(slots=4, max_wait=None, max_queue=200)
    for _ in range(300):  # three seconds: 40 sentences a second are decoded, 100 come
        with suppress(QueueFullError):
            it.ask()
        it.run_for(0.01)
    while it.scheduler.counters.queued < 200:
        it.ask()
    with pytest.raises(QueueFullError, match="wait already") as found:
        it.ask()
    assert found.value.retry_after == pytest.approx(0.5 * 200 / 40, rel=0.1)


def test_bulk_requests_do_not_keep_interactive_ones_out() -> None:
    it = Fixed(slots=4, max_wait=1.0, max_queue=10_000)
    it.ask()
    for _ in range(200):
        try:
            it.ask(bulk=True)
        except QueueFullError:
            break
        it.run_for(0.01)
    else:
        raise AssertionError("all bulk requests were taken")
    it.ask()
    assert it.scheduler.expected_wait() < 0.3
    with pytest.raises(QueueFullError):
        it.ask(bulk=True)


def test_workers_that_stopped_are_noticed() -> None:
    it = Fixed(slots=1, max_wait=1.0)
    it.ask()
    it.ask()
    it.turn()
    it.now += 1.1
    with pytest.raises(QueueFullError, match=r"would wait 1\.1 seconds"):
        it.ask()
    it.run_for(0.5)
    it.ask()


def test_without_a_limit_nothing_is_rejected_by_time() -> None:
    it = Fixed(slots=1, max_queue=10_000)
    for _ in range(500):
        it.ask()
        it.run_for(0.01)
    assert it.scheduler.counters.rejected == 0
    with pytest.raises(TfexportError, match="max_wait is 0"):
        ServingOptions(max_wait=0.0)
