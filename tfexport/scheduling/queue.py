"""The queue of waiting sentences, in the order in which they begin.

Interactive requests precede bulk requests. Each kind keeps the order of arrival. While both kinds wait, the fraction
`bulk_share` of the sentences that begin is from bulk requests. So bulk requests wait longer, but not for ever.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tfexport.scheduling.sentences import Sentence


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sentence in the queue."""

    request: int
    sentence: Sentence
    bulk: bool
    since: float
    """The time of its request."""


class Queue:
    """The waiting sentences of both kinds.

    Args:
        bulk_share: see `ServingOptions`.
    """

    def __init__(self, bulk_share: float):
        self._share, self._credit = bulk_share, 0.0
        self._interactive: deque[Waiting] = deque()
        self._bulk: deque[Waiting] = deque()
        self._count: dict[int, int] = {}  # number of waiting sentences by request
        self.tokens = self.rows = 0
        """The source ids of all waiting sentences, and the rows that they will take."""
        self._bulk_tokens = 0

    def __len__(self) -> int:
        """The number of waiting sentences."""
        return len(self._interactive) + len(self._bulk)

    @property
    def requests(self) -> int:
        """The number of requests with a waiting sentence."""
        return len(self._count)

    def tokens_before(self, *, bulk: bool) -> float:
        """The source ids that will begin before a request of this kind that arrives now, if no others arrive."""
        interactive, share = self.tokens - self._bulk_tokens, self._share
        if bulk:
            return self._bulk_tokens + min(interactive, self._bulk_tokens * (1 - share) / share)
        return interactive + (
            self._bulk_tokens if share == 1 else min(self._bulk_tokens, interactive * share / (1 - share))
        )

    def waiting_since(self, *, bulk: bool) -> float | None:
        """The time of the request of the first waiting sentence of this kind; None if none waits."""
        queue = self._bulk if bulk else self._interactive
        return queue[0].since if queue else None

    def push(self, waiting: Waiting, *, front: bool = False) -> None:
        """Add a sentence at the end of its kind, or at the `front` if it had begun already."""
        queue = self._bulk if waiting.bulk else self._interactive
        (queue.appendleft if front else queue.append)(waiting)
        self.tokens += len(waiting.sentence.source)
        self._bulk_tokens += len(waiting.sentence.source) * waiting.bulk
        self.rows += waiting.sentence.rows
        self._count[waiting.request] = self._count.get(waiting.request, 0) + 1

    def first(self) -> Waiting | None:
        """The sentence that begins next."""
        bulk_is_due = self._credit >= 1 and bool(self._bulk)
        queue = self._bulk if bulk_is_due or not self._interactive else self._interactive
        return queue[0] if queue else None

    def pop(self) -> Waiting:
        """Remove and return `first`."""
        found = self.first()
        assert found is not None
        (self._bulk if found.bulk else self._interactive).popleft()
        # Each sentence that begins while both kinds wait adds `bulk_share` of a turn for bulk requests.
        if found.bulk:
            self._credit = max(0.0, self._credit - 1)
        if self._bulk and (self._interactive or not found.bulk):
            self._credit = min(2.0, self._credit + self._share)
        self._forget(found)
        return found

    def remove(self, requests: set[int]) -> list[Waiting]:
        """Remove and return all sentences of these requests."""
        found = [one for one in (*self._interactive, *self._bulk) if one.request in requests]
        if found:
            self._interactive = deque(one for one in self._interactive if one.request not in requests)
            self._bulk = deque(one for one in self._bulk if one.request not in requests)
            for one in found:
                self._forget(one)
        return found

    def _forget(self, waiting: Waiting) -> None:
        self.tokens -= len(waiting.sentence.source)
        self._bulk_tokens -= len(waiting.sentence.source) * waiting.bulk
        self.rows -= waiting.sentence.rows
        self._count[waiting.request] -= 1
        if not self._count[waiting.request]:
            del self._count[waiting.request]
