"""A pool of device memory: batches need the same sizes again, and recorded graphs the same addresses."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

from tfexport.contract import ALIGNMENT
from tfexport.errors import DeviceMemoryError
from tfexport.runtimes.device import Device, DeviceTensor, Memory, Mirror

KEPT = 1024
"""The number of layouts, and of addresses of a layout, that are kept."""


class MemoryPool:
    """Pieces of memory that are allocated once and used again.

    Args:
        kept: the largest number of free pieces. Above it, the least recently used piece is freed.
        by_use: a piece serves only the use that it was allocated for. So a batch like an earlier one gets the same
            addresses, and the graphs recorded for them, whatever came between. Without it, all uses share pieces, which
            needs less memory.
    """

    def __init__(self, device: Device, kept: int, *, by_use: bool = False):
        self.device = device
        self.kept = kept
        self._by_use = by_use
        # By size, and by use if `by_use`. Each list has the least recently used piece first, with the number of its return.
        self._free: dict[Hashable, list[tuple[int, Memory]]] = {}
        self._n_free, self._freed = 0, 0
        self._numbers: dict[int, int] = {}  # the order of allocation, by address
        # Reentrant: a piece is given back when its last reference goes, in any thread and at any point of the code.
        self._lock = threading.RLock()

    def take(self, nbytes: int, use: Hashable = "") -> Memory:
        """A free piece of the size class of `nbytes`, or a new one."""
        size = size_class(nbytes)
        kind = self._kind(size, use)
        with self._lock:
            fitting = self._free.get(kind)
            if fitting is None:
                memory = self._allocate(size)
                if self._by_use:
                    self._numbers[memory.address] = max(self._numbers.values(), default=0) + 1
                return memory
            # A batch like the last one gets the same addresses, in the same order.
            chosen = min(fitting, key=self._order)
            self._drop(kind, chosen)
            return chosen[1]

    def _drop(self, kind: Hashable, piece: tuple[int, Memory]) -> None:
        pieces = self._free[kind]
        pieces.remove(piece)
        self._n_free -= 1
        if not pieces:
            del self._free[kind]

    def _kind(self, size: int, use: Hashable) -> Hashable:
        return (size, use) if self._by_use else size

    def _order(self, piece: tuple[int, Memory]) -> int:
        address = piece[1].address
        return self._numbers[address] if self._by_use else address

    def _allocate(self, size: int) -> Memory:
        try:
            return self.device.allocate(size)
        except DeviceMemoryError:
            if not self._n_free:
                raise
        self._free.clear()  # free pieces of other sizes may be what is missing
        self._n_free = 0
        return self.device.allocate(size)

    def give_back(self, memory: Memory, use: Hashable = "") -> None:
        with self._lock:
            self._freed += 1
            self._free.setdefault(self._kind(memory.nbytes, use), []).append((self._freed, memory))
            self._n_free += 1
            if self._n_free > self.kept:
                oldest = min(self._free, key=lambda kind: self._free[kind][0][0])
                self._drop(oldest, self._free[oldest][0])


def size_class(nbytes: int) -> int:
    """`nbytes` rounded up to one of four sizes in each power of two, so that similar lengths share memory."""
    step = max(ALIGNMENT, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


class BatchNumber:
    """The lowest number that no other batch has. Batches that are decoded at the same time have memory of their own by it.

    The number is free again when nothing refers to this object.

    Args:
        taken: the numbers of other batches, to which this adds its own.
    """

    def __init__(self, taken: set[int]):
        self.value = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(self.value)
        weakref.finalize(self, taken.discard, self.value).atexit = False


Spec = tuple[tuple[int, ...], str]
"""The shape and the type of a tensor."""


class Layout:
    """The offsets of named tensors in one piece of memory: one after the other, each aligned."""

    def __init__(self, tensors: tuple[tuple[str, Spec], ...]):
        self.nbytes = 0
        self._tensors: list[tuple[str, int, Spec]] = []
        for name, spec in tensors:
            self._tensors.append((name, self.nbytes, spec))
            self.nbytes += -(-DeviceTensor(0, *spec).nbytes // ALIGNMENT) * ALIGNMENT

    @lru_cache(maxsize=KEPT)  # noqa: B019 - a layout is kept in any case
    def at(self, address: int) -> Mapping[str, DeviceTensor]:
        """The tensors at an address."""
        return {name: DeviceTensor(address + offset, *spec) for name, offset, spec in self._tensors}


@lru_cache(maxsize=KEPT)
def layout_of(tensors: tuple[tuple[str, Spec], ...]) -> Layout:
    """The layout of these tensors, always the same object."""
    return Layout(tensors)


class Region:
    """Named tensors in one piece of a pool's memory. The piece is given back when nothing refers to the region."""

    def __init__(self, pool: MemoryPool, use: str, **tensors: Spec):
        layout = layout_of(tuple(tensors.items()))
        memory = pool.take(layout.nbytes, (use, layout))
        weakref.finalize(self, pool.give_back, memory, (use, layout)).atexit = False
        self.tensors = layout.at(memory.address)
        self.key = memory.address, layout
        """Regions with the same key have the same tensors."""

    def __getitem__(self, name: str) -> DeviceTensor:
        return self.tensors[name]

    def span(self, *names: str) -> DeviceTensor:
        """The bytes from the first to the last of these consecutive tensors, as one tensor."""
        start, last = self.tensors[names[0]].address, self.tensors[names[-1]]
        return DeviceTensor(start, (last.address + last.nbytes - start,), "uint8")


class Mirrored:
    """Host arrays for some tensors of a region. One copy moves all of them. It does not own the region.

    Args:
        mirror: the mirror of the span of `names`.
    """

    def __init__(self, mirror: Mirror, region: Region, *names: str):
        self._mirror, self.names = mirror, names
        start = region[names[0]].address
        self._arrays: dict[str, NDArray[Any]] = {}
        for name in names:
            address, shape, dtype = region[name]
            span = mirror.array[address - start : address - start + region[name].nbytes]
            self._arrays[name] = span.view(dtype).reshape(shape)
        self.push, self.pull = mirror.push, mirror.pull

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]
