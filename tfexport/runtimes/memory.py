"""Device memory that is used again: batch after batch needs the same sizes, and a recorded graph its old addresses."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from tfexport.contract import ALIGNMENT
from tfexport.runtimes.device import Device, DeviceTensor, Memory

KEPT = 32
"""Pieces of memory that wait for their next use; of more than these the smallest are freed."""


class Pool:
    """Pieces of memory for whoever needs one of their size."""

    def __init__(self, device: Device):
        self.device = device
        self._free: list[Memory] = []  # by size

    def take(self, nbytes: int) -> Memory:
        """The smallest piece that is large enough, but not more than twice as large; a new one if there is none."""
        for index, memory in enumerate(self._free):
            if nbytes <= memory.nbytes <= 2 * nbytes:
                return self._free.pop(index)
        return self.device.allocate(nbytes)

    def give_back(self, memory: Memory) -> None:
        self._free.append(memory)
        self._free.sort(key=lambda piece: (piece.nbytes, piece.address))
        del self._free[: -KEPT or None]


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
