"""Requests of several clients, and workers that hang."""

from __future__ import annotations

from typing import Any

import pytest

from makers.scheduling import Answer
from tfexport.errors import QueueFullError
from tfexport.scheduling.options import ServingOptions
from tfexport.scheduling.scheduler import Scheduler
from tfexport.scheduling.sentences import Finished, Report
from tfexport.search.hypothesis import Hypothesis, Source
from tfexport.search.search import SearchOptions

HEAVY = SearchOptions(beam=32)


class Slow:
    """A scheduler with one worker, which ends its sentences one second after it took them."""

    def __init__(self, **options: Any):
        self.now = 0.0
        self.scheduler = Scheduler(ServingOptions(**options), lambda *_: 10, lambda: self.now)
        self.scheduler.join(0)

    def ask(self, client: str, options: SearchOptions | None = None, tokens: int = 5) -> Answer:
        options = options or SearchOptions()
        answer = Answer([Source([4] * tokens)], options)
        answer.number = self.scheduler.submit(answer.sources, options, answer, client=client)
        return answer

    def second(self) -> None:
        taken = self.scheduler.take(0).add
        self.now += 1
        best = Hypothesis((4,), 0.0, 0.0, True)
        self.scheduler.report(0, Report([Finished(one.key, [best]) for one in taken]))


def test_a_client_with_heavy_requests_keeps_its_wait_to_itself() -> None:
    server = Slow(slots=32, max_wait=2.5)
    server.ask("heavy", HEAVY)
    for _ in range(4):  # so that the speed is known: one of these sentences in a second
        server.ask("heavy", HEAVY)
        server.second()
    heavy = []
    while server.scheduler.expected_wait("heavy") <= 2.5:
        heavy.append(server.ask("heavy", HEAVY))
    with pytest.raises(QueueFullError):
        server.ask("heavy", HEAVY)
    light = [server.ask("light") for _ in range(3)]
    for _ in range(3):
        server.second()
    assert all(answer.outputs for answer in light)
    assert not all(answer.outputs for answer in heavy)


def test_a_client_has_at_most_half_of_the_queue() -> None:
    server = Slow(max_queue=10)
    for _ in range(5):
        server.ask("many")
    with pytest.raises(QueueFullError):
        server.ask("many")
    for _ in range(5):
        server.ask("few")
    unknown = Slow(max_queue=10)
    for _ in range(10):
        unknown.ask("")  # callers of the Python API are no clients
    tokens = Slow(max_queue_tokens=100)
    tokens.ask("long", tokens=80)  # an empty half accepts a larger request
    with pytest.raises(QueueFullError):
        tokens.ask("long", tokens=1)
    tokens.ask("short", tokens=20)


def test_a_worker_that_does_not_report_is_silent() -> None:
    server = Slow(worker_timeout=30)
    assert not server.scheduler.is_stalled
    server.now = 1000  # idle for long
    server.ask("a")
    server.scheduler.take(0)
    server.now = 1029
    assert server.scheduler.silent() == []
    server.now = 1031
    assert server.scheduler.silent() == [0]
    assert server.scheduler.is_stalled
    server.scheduler.report(0, Report())
    assert server.scheduler.silent() == []
    assert not server.scheduler.is_stalled


def test_an_idle_worker_beside_a_busy_one_is_not_silent() -> None:
    server = Slow(worker_timeout=30)
    server.scheduler.join(1)
    server.ask("a")
    server.scheduler.take(0)
    for _ in range(10):
        server.now += 20
        server.scheduler.report(0, Report())
    assert server.scheduler.silent() == []
    server.now += 40
    assert server.scheduler.silent() == [0]
