"""A pool of memory for the arrays of a batch.

The C library keeps freed arrays of some MiB in its heap, but the arrays of the next batch have other sizes and may not fit:
over many batches a process would grow. Memory that is returned to the system is missing soon after, at a page fault for each
4 KiB. In this pool any free piece that is large enough is taken, so that there are never more pieces than were in use at the
same time. (On a GPU, tensors must get the addresses that were recorded: see `runtimes/device_pool.py`.)
"""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque

import numpy as np
from numpy.typing import NDArray

from tfexport.runtimes.outputs import FloatArray

SMALLEST, LARGEST = 2**17, 2**25
"""Bytes of the arrays in the pool. Smaller ones fit into any heap. Larger ones are not kept by glibc either, and one very
long sentence should not cost its memory for ever."""


class Buffers:
    """Memory for float arrays, for several threads. A piece is free again when nothing refers to its array or a view."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []  # the smallest first
        # Pieces come back in any thread and at any point of the code, also while the lock is held: append is atomic.
        self._returned: deque[NDArray[np.uint8]] = deque()
        self._lock = threading.Lock()

    @property
    def free(self) -> list[int]:
        """The sizes of the free pieces in bytes, ascending."""
        return sorted(len(piece) for piece in (*self._free, *self._returned))

    def empty(self, shape: tuple[int, ...]) -> FloatArray:
        """A float32 array, not initialized."""
        count = math.prod(shape)
        if not SMALLEST <= 4 * count <= LARGEST:
            return np.empty(shape, dtype=np.float32)
        piece = self._piece(4 * count)
        # Not a slice of the piece: a view of a slice keeps the piece alive, but not the slice that `finalize` watches.
        array = np.frombuffer(piece.data, dtype=np.float32, count=count)
        weakref.finalize(array, self._returned.append, piece).atexit = False
        return array.reshape(shape)

    def _piece(self, nbytes: int) -> NDArray[np.uint8]:
        """The smallest free piece that is large enough, or a new one, which replaces the largest free piece."""
        with self._lock:
            while self._returned:
                insort(self._free, self._returned.popleft(), key=len)
            place = bisect_left(self._free, nbytes, key=len)
            if place < len(self._free):
                return self._free.pop(place)
            if self._free:
                self._free.pop()
        return np.empty(nbytes, dtype=np.uint8)
