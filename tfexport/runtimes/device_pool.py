"""Device memory that is used again: batch after batch needs the same sizes, and a recorded graph its old addresses."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping

from tfexport.contract import ALIGNMENT
from tfexport.errors import DeviceMemoryError
from tfexport.runtimes.device import Device, DeviceTensor, Memory


class Pool:
    """Pieces of memory for whoever needs one of their size.

    Args:
        kept: pieces that wait for their next use; of more than these the one longest unused is freed.
    """

    def __init__(self, device: Device, kept: int):
        self.device, self.kept = device, kept
        self._free: list[Memory] = []  # the longest unused first
        # A piece is given back when its last reference goes, in whatever thread and in the middle of anything.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> Memory:
        """A piece of this size class, a new one if there is none."""
        size = size_class(nbytes)
        with self._lock:
            fitting = [memory for memory in self._free if memory.nbytes == size]
            if not fitting:
                return self._allocate(size)
            # Always the lowest: a batch like the last one then meets the same addresses, and what was recorded for them.
            memory = min(fitting, key=lambda piece: piece.address)
            self._free.remove(memory)
            return memory

    def _allocate(self, size: int) -> Memory:
        try:
            return self.device.allocate(size)
        except DeviceMemoryError:
            if not self._free:
                raise
        self._free.clear()  # what waits for its next use must not be what is missing now
        return self.device.allocate(size)

    def give_back(self, memory: Memory) -> None:
        with self._lock:
            self._free.append(memory)
            del self._free[: -self.kept]


def size_class(nbytes: int) -> int:
    """`nbytes` rounded up to one of four sizes an octave, so that lengths that differ a little share memory."""
    step = max(ALIGNMENT, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


class Region:
    """Named tensors in one piece of a pool's memory, which it gives back when nothing refers to it any more."""

    def __init__(self, pool: Pool, **tensors: tuple[tuple[int, ...], str]):
        offsets: dict[str, int] = {}
        end = 0
        for name, (shape, dtype) in tensors.items():
            offsets[name] = end
            end += -(-DeviceTensor(0, shape, dtype).nbytes // ALIGNMENT) * ALIGNMENT
        memory = pool.take(end)
        weakref.finalize(self, pool.give_back, memory).atexit = False
        self.tensors: Mapping[str, DeviceTensor] = {
            name: DeviceTensor(memory.address + offsets[name], shape, dtype) for name, (shape, dtype) in tensors.items()
        }

    def __getitem__(self, name: str) -> DeviceTensor:
        return self.tensors[name]
