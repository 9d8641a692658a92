"""The queue of waiting sentences, in the order in which they begin.

Interactive requests precede bulk requests. While both kinds wait, the fraction `bulk_share` of the sentences that begin is
from bulk requests. So bulk requests wait longer, but not for ever. Within a kind, clients take turns (`FairQueue`).
"""

from __future__ import annotations

from collections import Counter

from tfexport.scheduling.fair_queue import FairQueue, Waiting


class Queue:
    """The waiting sentences of both kinds.

    Args:
        bulk_share: see `ServingOptions`.
    """

    def __init__(self, bulk_share: float):
        self._share, self._credit = bulk_share, 0.0
        self._interactive, self._bulk = FairQueue(), FairQueue()
        self._count: Counter[int] = Counter()  # waiting sentences by request
        self._requests: Counter[str] = Counter()  # requests with a waiting sentence, by client
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

    def requests_of(self, client: str) -> int:
        """The number of a client's requests with a waiting sentence."""
        return self._requests[client]

    def tokens_of(self, client: str) -> int:
        """The source ids of a client's waiting sentences."""
        return self._interactive.tokens_of(client) + self._bulk.tokens_of(client)

    def tokens_before(self, client: str = "", *, bulk: bool) -> float:
        """The source ids that will begin before a request of this client and kind that arrives now, if no others arrive."""
        share = self._share
        if bulk:
            before = self._bulk.tokens_before(client)
            return before + min(self.tokens - self._bulk_tokens, before * (1 - share) / share)
        before = self._interactive.tokens_before(client)
        return before + (self._bulk_tokens if share == 1 else min(self._bulk_tokens, before * share / (1 - share)))

    def waiting_since(self, client: str = "", *, bulk: bool) -> float | None:
        """The time of the request of this client's first waiting sentence of this kind; None if none waits."""
        return (self._bulk if bulk else self._interactive).waiting_since(client)

    def push(self, waiting: Waiting, *, front: bool = False) -> None:
        """Add a sentence at the end of its kind, or at the `front` if it had begun already."""
        (self._bulk if waiting.bulk else self._interactive).push(waiting, front=front)
        self.tokens += len(waiting.sentence.source)
        self._bulk_tokens += len(waiting.sentence.source) * waiting.bulk
        self.rows += waiting.sentence.rows
        self._requests[waiting.client] += waiting.request not in self._count
        self._count[waiting.request] += 1

    def first(self) -> Waiting | None:
        """The sentence that begins next."""
        bulk_is_due = self._credit >= 1 and len(self._bulk) > 0
        return (self._bulk if bulk_is_due or not len(self._interactive) else self._interactive).first()

    def pop(self) -> Waiting:
        """Remove and return `first`."""
        first = self.first()
        assert first is not None
        (self._bulk if first.bulk else self._interactive).pop()
        # Each sentence that begins while both kinds wait adds `bulk_share` of a turn for bulk requests.
        if first.bulk:
            self._credit = max(0.0, self._credit - 1)
        if len(self._bulk) and (len(self._interactive) or not first.bulk):
            self._credit = min(2.0, self._credit + self._share)
        self._forget(first)
        return first

    def remove(self, requests: set[int]) -> list[Waiting]:
        """Remove and return all sentences of these requests."""
        removed = [*self._interactive.remove(requests), *self._bulk.remove(requests)]
        for waiting in removed:
            self._forget(waiting)
        return removed

    def _forget(self, waiting: Waiting) -> None:
        self.tokens -= len(waiting.sentence.source)
        self._bulk_tokens -= len(waiting.sentence.source) * waiting.bulk
        self.rows -= waiting.sentence.rows
        self._count[waiting.request] -= 1
        if not self._count[waiting.request]:
            del self._count[waiting.request]
            self._requests[waiting.client] -= 1
            if not self._requests[waiting.client]:
                del self._requests[waiting.client]
