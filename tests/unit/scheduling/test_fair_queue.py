"""Clients take turns, and each client's sentences keep their order."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from tfexport.scheduling.fair_queue import FairQueue, Waiting
from tfexport.scheduling.sentences import Sentence
from tfexport.search.hypothesis import Source
from tfexport.search.search import SearchOptions


def waiting(client: str, number: int, tokens: int = 4, beam: int = 1) -> Waiting:
    sentence = Sentence((number, 0), Source([4] * tokens), SearchOptions(beam=beam))
    return Waiting(number, sentence, False, float(number), client)


def begun(queue: FairQueue, count: int) -> list[tuple[str, int]]:
    return [(first.client, first.request) for first in (queue.pop() for _ in range(count))]


def test_a_client_that_sends_little_waits_for_little() -> None:
    queue = FairQueue()
    for number in range(100):
        queue.push(waiting("heavy", number, tokens=40, beam=8))
    assert begun(queue, 1) == [("heavy", 0)]
    queue.push(waiting("light", 100))
    assert queue.tokens_before("light") <= 40 < queue.tokens_before("heavy")
    assert ("light", 100) in begun(queue, 2)


def test_clients_begin_the_same_work() -> None:
    queue = FairQueue()
    for number in range(200):
        queue.push(waiting("wide", number, beam=8))
        queue.push(waiting("narrow", 1000 + number, beam=2))
    counts = Counter(client for client, _ in begun(queue, 50))
    assert counts == {"narrow": 40, "wide": 10}


def test_an_idle_client_saves_no_turns() -> None:
    queue = FairQueue()
    for number in range(20):
        queue.push(waiting("early", number))
    begun(queue, 10)
    for number in range(20, 40):
        queue.push(waiting("late", number))
    assert Counter(client for client, _ in begun(queue, 10)) == {"early": 5, "late": 5}


def test_one_client_is_first_in_first_out_but_for_the_front() -> None:
    queue = FairQueue()
    for number in range(3):
        queue.push(waiting("a", number, tokens=3 - number))
    queue.push(waiting("a", 8), front=True)
    queue.push(waiting("a", 7), front=True)
    assert queue.waiting_since("a") == 7
    assert [number for _, number in begun(queue, 5)] == [7, 8, 0, 1, 2]
    assert queue.first() is None
    assert queue.waiting_since("a") is None


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_and_each_client_keeps_its_order(seed: int) -> None:
    chooser, queue, wanted = random.Random(seed), FairQueue(), dict[str, deque[int]]()
    number = 0
    for _ in range(400):
        act = chooser.random()
        if act < 0.5:
            client = chooser.choice("abcde")
            queue.push(waiting(client, number, chooser.randint(0, 9), chooser.randint(1, 4)))
            wanted.setdefault(client, deque()).append(number)
            number += 1
        elif act < 0.85 and len(queue):
            first = queue.first()
            assert queue.pop() is first
            assert first is not None
            assert wanted[first.client].popleft() == first.request
        elif any(wanted.values()):
            client = chooser.choice([name for name, own in wanted.items() if own])
            gone = chooser.choice(wanted[client])
            assert [one.request for one in queue.remove({gone})] == [gone]
            wanted[client].remove(gone)
        assert len(queue) == sum(map(len, wanted.values()))
        assert sorted(one.request for one in queue) == sorted(one for own in wanted.values() for one in own)
        assert sum(map(queue.tokens_of, "abcde")) == sum(len(one.sentence.source) for one in queue)
        assert all(0 <= queue.tokens_before(client) <= sum(map(queue.tokens_of, "abcde")) + 1e-6 for client in "abcdef")
