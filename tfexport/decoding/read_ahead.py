"""Reads lines from a source that produces them slowly, such as a service: lines that have arrived are taken together."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from threading import Condition, Thread
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")

PAUSE = 0.02
"""Seconds without a new line after which a window ends. A fast source fills a whole window without such a pause."""

PATIENCE = 0.2
"""The largest number of seconds that the first line of a window waits for others."""


class ReadAhead(Generic[Item]):
    """Reads a source in its own thread, which begins with the block.

    The thread ends with the source, or at the next item after the end of the block. Nothing waits for a silent source.

    Args:
        most: the largest number of items to store until they are taken.
    """

    def __init__(self, items: Iterator[Item], most: int):
        self._items, self._most = items, most
        self._ready: deque[Item] = deque()
        self._error: BaseException | None = None
        self._is_over = self._is_closed = False
        self._changed = Condition()

    def __enter__(self) -> ReadAhead[Item]:
        Thread(target=self._read, name="tfexport reads ahead", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()

    def has_news(self) -> bool:
        """Whether `window` would return at once: there is an item, or the source has ended."""
        with self._changed:
            return bool(self._ready) or self._is_over

    def window(self, most: int) -> Iterator[Item]:
        """The next items. It waits for the first item, and briefly for others. Empty when the source has ended.

        An error of the source is raised after all items that came before it.
        """
        until: float | None = None
        for _ in range(most):
            with self._changed:
                left = None if until is None else max(0.0, min(PAUSE, until - time.monotonic()))
                self._changed.wait_for(lambda: self._ready or self._is_over, left)
                if not self._ready:
                    break
                item = self._ready.popleft()
                self._changed.notify_all()
            until = until or time.monotonic() + PATIENCE
            yield item
        if until is None and self._error is not None:
            raise self._error

    def _read(self) -> None:
        try:
            for item in self._items:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._most)
                    if self._is_closed:
                        return
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as error:  # the reader of the next item must get any error
            self._error = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
