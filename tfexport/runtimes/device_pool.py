"""A pool of device memory: batches need the same sizes again, and recorded graphs the same addresses."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping

from tfexport.contract import ALIGNMENT
from tfexport.errors import DeviceMemoryError
from tfexport.runtimes.device import Device, DeviceTensor, Memory


class MemoryPool:
    """Pieces of memory that are allocated once and used again.

    Args:
        kept: the most free pieces. Of more, the least recently used piece is freed.
    """

    def __init__(self, device: Device, kept: int):
        self.device, self.kept = device, kept
        self._free: list[Memory] = []  # the least recently used first
        # Reentrant: a piece is given back when its last reference goes, in any thread and at any point of the code.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> Memory:
        """A free piece of the size class of `nbytes`, or a new one."""
        size = size_class(nbytes)
        with self._lock:
            fitting = [memory for memory in self._free if memory.nbytes == size]
            if not fitting:
                return self._allocate(size)
            # The lowest address: a batch like the last one gets the same addresses, and the graphs recorded for them.
            memory = min(fitting, key=lambda piece: piece.address)
            self._free.remove(memory)
            return memory

    def _allocate(self, size: int) -> Memory:
        try:
            return self.device.allocate(size)
        except DeviceMemoryError:
            if not self._free:
                raise
        self._free.clear()  # free pieces of other sizes may be what is missing
        return self.device.allocate(size)

    def give_back(self, memory: Memory) -> None:
        with self._lock:
            self._free.append(memory)
            del self._free[: -self.kept]


def size_class(nbytes: int) -> int:
    """`nbytes` rounded up to one of four sizes in each power of two, so that similar lengths share memory."""
    step = max(ALIGNMENT, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


class Region:
    """Named tensors in one piece of a pool's memory. The piece is given back when nothing refers to the region."""

    def __init__(self, pool: MemoryPool, **tensors: tuple[tuple[int, ...], str]):
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
