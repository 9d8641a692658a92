"""The memory of a device, for runtimes with fixed buffers (`runtimes/loop.py`); the host is one such device.

All work is enqueued on one stream: a `push`, a graph and a `pull` run in this order, and `synchronize` waits for them.
On the host all work is done at once, and a `Mirror` is the memory itself.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import ALIGNMENT, ITEM_SIZES

Call = Callable[[], None]

ATTEMPTS = 2
"""The number of attempts to record work. CUDA refuses to record a run in which a library allocates; the next run may not."""


class DeviceTensor(NamedTuple):
    """The address, shape and type of a tensor. It does not own the memory."""

    address: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class Memory(Protocol):
    """One allocation, freed with the last reference to it."""

    address: int
    nbytes: int


class Mirror(Protocol):
    """A host array beside a tensor of the device. bfloat16 is represented by its bits, uint16."""

    array: NDArray[Any]

    def push(self) -> None:
        """Enqueue the copy from the array to the device."""

    def pull(self) -> None:
        """Enqueue the copy from the device to the array. It is done after `synchronize`."""


class Device(Protocol):
    """The memory and the stream of a runtime."""

    name: str
    stream: int
    """The CUDA stream that all work goes to, 0 on the host."""

    def allocate(self, nbytes: int) -> Memory:
        """Memory at an address that is a multiple of `ALIGNMENT`."""
        ...

    def mirror(self, tensor: DeviceTensor) -> Mirror: ...

    def zero(self, tensor: DeviceTensor) -> None:
        """Enqueue setting all bytes to 0."""

    def copy_prefixes(self, target: int, source: int, *, count: int, width: int, steps: tuple[int, int]) -> None:
        """Enqueue `count` copies of `width` bytes. `steps` are the bytes between two of them, in target and source."""

    def capture(self, enqueue: Call) -> Call:
        """A call that does the work of `enqueue` with less host time, where the device can record it (a CUDA graph)."""
        ...

    def synchronize(self) -> None:
        """Wait until all enqueued work is done."""


class HostMemory:
    """Memory of this process."""

    def __init__(self, nbytes: int):
        self._buffer = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
        start: int = self._buffer.ctypes.data
        self.address = -(-start // ALIGNMENT) * ALIGNMENT
        self.nbytes = nbytes


class HostMirror:
    """The memory itself, as an array."""

    def __init__(self, array: NDArray[Any]):
        self.array = array

    def push(self) -> None:
        pass

    def pull(self) -> None:
        pass


class HostDevice:
    """The host's memory, for runtimes that compute on the CPU.

    Args:
        fill: the value that `zero` writes, to test that no result depends on it.
    """

    name = "cpu"
    stream = 0

    def __init__(self, fill: float = 0.0):
        self._fill = fill

    def allocate(self, nbytes: int) -> HostMemory:
        return HostMemory(nbytes)

    def mirror(self, tensor: DeviceTensor) -> HostMirror:
        return HostMirror(host_array(tensor))

    def zero(self, tensor: DeviceTensor) -> None:
        if self._fill:
            host_array(tensor)[:] = self._fill
        else:
            ctypes.memset(tensor.address, 0, tensor.nbytes)

    def copy_prefixes(self, target: int, source: int, *, count: int, width: int, steps: tuple[int, int]) -> None:
        to, of = (
            _host_array(address, (count, step), np.dtype(np.uint8))[:, :width]
            for address, step in zip((target, source), steps, strict=True)
        )
        to[:] = of

    def capture(self, enqueue: Call) -> Call:
        return enqueue

    def synchronize(self) -> None:
        pass


def host_array(tensor: DeviceTensor) -> NDArray[Any]:
    """The array at a host address; the memory must outlive it."""
    dtype = np.dtype("uint16" if tensor.dtype == "bfloat16" else tensor.dtype)
    return _host_array(tensor.address, tensor.shape, dtype)


def _host_array(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(memoryview((ctypes.c_char * n_bytes).from_address(address)), dtype).reshape(shape)


def to_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """The values of a mirror of a float tensor, in float32."""
    if array.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def warn_unrecorded(what: str, error: Exception | str) -> None:
    """Log that `what` is not recorded, which costs host time in each step."""
    reason = str(error).splitlines()[0]
    logging.getLogger(__name__).warning("warning: %s is not recorded as a CUDA graph: %s", what, reason)
