"""Arrays that come and go with every batch, in memory that is used again.

Freed arrays of some MiB wait in the C library's heap, where those of the next batch, of other sizes, do not quite fit: over
many batches a process would grow, and what is given back to the system is soon missing, at a page fault for each 4 KiB.
Tensors of a GPU have to come back to the addresses that were recorded (`runtimes/device_pool.py`).
Here any piece will do that is large enough, so that there are never more of them than were in use at once.
"""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque

import numpy as np
from numpy.typing import NDArray

from tfexport.runtimes.base import FloatArray

SMALLEST, LARGEST = 2**17, 2**25
"""Bytes of the arrays that are worth it. What is smaller finds its place in any heap; what is larger glibc never keeps, and
one very long sentence should not cost its memory for ever."""


class Buffers:
    """Memory for float arrays; several threads may take from it. A piece comes back when nothing refers to its array, or to
    views of it, any more."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []  # the smallest first
        # A piece comes back in whatever thread, and in the middle of anything: only what is one step may be done then.
        self._returned: deque[NDArray[np.uint8]] = deque()
        self._turn = threading.Lock()

    @property
    def free(self) -> list[int]:
        """Bytes of the pieces that wait for their next use."""
        return sorted(len(piece) for piece in (*self._free, *self._returned))

    def empty(self, shape: tuple[int, ...]) -> FloatArray:
        """A float32 array that holds anything."""
        count = math.prod(shape)
        if not SMALLEST <= 4 * count <= LARGEST:
            return np.empty(shape, dtype=np.float32)
        piece = self._piece(4 * count)
        # Not a slice of the piece: views of a slice refer to the piece alone, and the slice would end before they do.
        array = np.frombuffer(piece.data, dtype=np.float32, count=count)
        weakref.finalize(array, self._returned.append, piece).atexit = False
        return array.reshape(shape)

    def _piece(self, nbytes: int) -> NDArray[np.uint8]:
        """The smallest that is free and large enough, or a new one in place of the largest that is not."""
        with self._turn:
            while self._returned:
                insort(self._free, self._returned.popleft(), key=len)
            place = bisect_left(self._free, nbytes, key=len)
            if place < len(self._free):
                return self._free.pop(place)
            if self._free:
                self._free.pop()
        return np.empty(nbytes, dtype=np.uint8)
