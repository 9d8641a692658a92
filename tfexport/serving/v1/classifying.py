"""Classification outside of the event loop: one request at a time in a thread, with a bounded queue.

An encoder classifier does not decode step by step, so there is no batch that other requests could join.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tfexport.api.classifier import Classifier
from tfexport.decoding.classify import Classified
from tfexport.errors import DeadlineError, QueueFullError

MOST_WAITING = 256
"""The largest number of waiting requests."""


class Classifying:
    """The classification queue of one application.

    Args:
        most_waiting: the largest number of waiting requests.
    """

    def __init__(self, most_waiting: int = MOST_WAITING):
        self._most, self._waiting = most_waiting, 0
        self._seconds = 0.0
        """The moving average of the seconds of a request."""
        self._thread = ThreadPoolExecutor(1, "tfexport classifies")

    async def classify(
        self, classifier: Classifier, texts: Sequence[str], *, top: int, timeout: float | None
    ) -> list[Classified]:
        """`Classifier.classify`, without blocking the event loop.

        Raises:
            QueueFullError: too many requests wait.
            DeadlineError: the request took longer than `timeout` seconds.
        """
        if self._waiting > self._most:
            raise QueueFullError(
                f"{self._most} requests wait already. Try again later.", max(1.0, self._seconds * self._most / 2)
            )
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout):
                loop = asyncio.get_running_loop()
                # A request that was cancelled while it waited is not computed.
                return await loop.run_in_executor(self._thread, self._timed, classifier, texts, top)
        except TimeoutError:
            raise DeadlineError(f"this was not classified within {timeout:g} s. Give it more time.") from None
        finally:
            self._waiting -= 1

    def _timed(self, classifier: Classifier, texts: Sequence[str], top: int) -> list[Classified]:
        began = time.monotonic()
        try:
            return classifier.classify(texts, top=top)
        finally:
            self._seconds = 0.8 * self._seconds + 0.2 * (time.monotonic() - began)
