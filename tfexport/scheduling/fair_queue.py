"""A queue in which clients take turns, so that a client that sends much does not delay the others.

This is start-time fair queuing (Goyal, Vin and Cheng, 1996, section 2). Each sentence has a cost, and a start tag: the
virtual time at which it would begin if all waiting clients were served at the same speed. The smallest tag begins next.

    client A  cost 8   [0  ][8  ][16 ]         begin: A0 B0 B1 A8 A16
    client B  cost 2   [0][2]

The sentences of one client keep their order of arrival. With a single client this is a first-in, first-out queue.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tfexport.scheduling.sentences import Sentence

MOST_CLIENTS = 4096
"""Clients above which those without waiting sentences are forgotten, with what they had more than their share."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sentence in the queue."""

    request: int
    sentence: Sentence
    bulk: bool
    since: float
    """The time of its request."""
    client: str = ""
    """The name of the client that sent the request; empty if unknown."""

    @property
    def cost(self) -> int:
        """The work of the sentence: its source ids, times its rows."""
        return max(1, len(self.sentence.source)) * self.sentence.rows


@dataclass(frozen=True, slots=True)
class _Tagged:
    start: float
    order: int
    waiting: Waiting


@dataclass(slots=True)
class _Client:
    waiting: deque[_Tagged] = field(default_factory=deque)
    tokens: int = 0
    """The source ids of its waiting sentences."""
    finish: float = 0.0
    """The virtual time at which all its sentences would be done."""


class FairQueue:
    """Waiting sentences. `push` and `pop` take O(log clients), `tokens_before` O(clients); `remove` visits all sentences."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._heads: list[tuple[float, int, str]] = []  # a heap of each client's first tag, and of outdated ones
        self._time = 0.0
        self._count = 0
        self._orders = itertools.count()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Waiting]:
        return (tagged.waiting for client in self._clients.values() for tagged in client.waiting)

    def push(self, waiting: Waiting, *, front: bool = False) -> None:
        """Add a sentence behind the others of its client, or before all sentences if it had begun already."""
        if len(self._clients) > MOST_CLIENTS:
            self._clients = {name: client for name, client in self._clients.items() if client.waiting}
        client = self._clients.setdefault(waiting.client, _Client())
        order = next(self._orders)
        if front:
            tagged = _Tagged(-math.inf, -order, waiting)
            client.waiting.appendleft(tagged)
        else:
            tagged = _Tagged(max(self._time, client.finish), order, waiting)
            client.finish = tagged.start + waiting.cost
            client.waiting.append(tagged)
        if client.waiting[0] is tagged:
            heapq.heappush(self._heads, (tagged.start, tagged.order, waiting.client))
        client.tokens += len(waiting.sentence.source)
        self._count += 1

    def first(self) -> Waiting | None:
        """The sentence that begins next."""
        while self._heads:
            start, order, name = self._heads[0]
            waiting = self._clients[name].waiting if name in self._clients else ()
            if waiting and (waiting[0].start, waiting[0].order) == (start, order):
                return waiting[0].waiting
            heapq.heappop(self._heads)
        return None

    def pop(self) -> Waiting:
        """Remove and return `first`."""
        first = self.first()
        assert first is not None
        heapq.heappop(self._heads)
        client = self._clients[first.client]
        tagged = client.waiting.popleft()
        client.tokens -= len(first.sentence.source)
        self._time = max(self._time, tagged.start)
        self._count -= 1
        self._settle(first.client)
        return first

    def remove(self, requests: set[int]) -> list[Waiting]:
        """Remove and return all sentences of these requests."""
        removed = [waiting for waiting in self if waiting.request in requests]
        self._count -= len(removed)
        for name in {waiting.client for waiting in removed}:
            client = self._clients[name]
            first = client.waiting[0]
            client.waiting = deque(tagged for tagged in client.waiting if tagged.waiting.request not in requests)
            client.tokens = sum(len(tagged.waiting.sentence.source) for tagged in client.waiting)
            if client.waiting and client.waiting[-1].start > -math.inf:
                client.finish = client.waiting[-1].start + client.waiting[-1].waiting.cost
            else:
                client.finish = self._time
            if not client.waiting or client.waiting[0] is not first:
                self._settle(name)
        return removed

    def _settle(self, name: str) -> None:
        """Enter a client's new first sentence, or forget a client that owes nothing."""
        client = self._clients[name]
        if client.waiting:
            heapq.heappush(self._heads, (client.waiting[0].start, client.waiting[0].order, name))
        elif client.finish <= self._time:
            del self._clients[name]
        if not self._count:
            self._clients = {}
            self._heads = []
            self._time = 0.0

    def waiting_since(self, client: str) -> float | None:
        """The time of the request of a client's first waiting sentence; None if none waits."""
        waiting = self._clients[client].waiting if client in self._clients else None
        return waiting[0].waiting.since if waiting else None

    def tokens_before(self, client: str) -> float:
        """The source ids that begin before a sentence of a client that arrives now."""
        own = self._clients.get(client)
        start = self._time if own is None else max(self._time, own.finish)
        tokens = 0.0
        for other in self._clients.values():
            if other.waiting:
                begins = max(self._time, other.waiting[0].start)
                part = (start - begins) / (other.finish - begins) if other.finish > begins else 1.0
                tokens += other.tokens * (1.0 if other is own else min(1.0, max(0.0, part)))
        return tokens

    def tokens_of(self, client: str) -> int:
        """The source ids of a client's waiting sentences."""
        return self._clients[client].tokens if client in self._clients else 0
