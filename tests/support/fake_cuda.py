"""The CUDA runtime API over host memory, as late as a GPU may be: nothing happens before the stream is waited for.

So a host array that is written again before its copy was made, a result that is read too early, or memory that is used
before anything was written to it (fresh memory is full of NaN) gives wrong numbers here too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import runtime as real

from tfexport.runtimes.device import DeviceTensor, HostMemory, host_array

SUCCESS = real.cudaError_t.cudaSuccess
STREAM = 7


class FakeCudart:
    """What `tfexport.runtimes.cuda` calls of `cuda.bindings.runtime`; everything else of it is the real module's."""

    def __init__(self, *, devices: int = 1, memory: int = 1 << 30) -> None:
        self.devices, self.memory = devices, memory
        self.allocations: dict[int, HostMemory] = {}
        self.freed: list[HostMemory] = []  # kept: what still refers to it must read garbage, not crash
        self.queue: list[Callable[[], None]] = []
        self.recording: list[Callable[[], None]] | None = None
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.last_error = SUCCESS
        self.copies = {"to_device": 0, "to_host": 0}
        self.counts = {"malloc": 0, "host_malloc": 0, "launch": 0, "capture": 0, "wait": 0}

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def enqueue(self, work: Callable[[], None]) -> None:
        (self.queue if self.recording is None else self.recording).append(work)

    @property
    def in_use(self) -> int:
        return sum(memory.nbytes for memory in self.allocations.values())

    def cudaGetDeviceCount(self) -> tuple[Any, int]:
        return (SUCCESS if self.devices else real.cudaError_t.cudaErrorNoDevice), self.devices

    def cudaGetDeviceProperties(self, device: int) -> tuple[Any, Any]:
        return SUCCESS, SimpleNamespace(name=b"A fake GPU", major=8, minor=9, totalGlobalMem=self.memory)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, int]:
        assert flags == real.cudaStreamNonBlocking, "the default stream cannot be captured"
        return SUCCESS, STREAM

    def cudaMalloc(self, nbytes: int) -> tuple[Any, int]:
        assert self.recording is None, "an allocation cannot be part of a recorded graph"
        self.counts["malloc"] += 1
        if self.in_use + nbytes > self.memory:
            return real.cudaError_t.cudaErrorMemoryAllocation, 0
        return SUCCESS, self._allocate(nbytes)

    def cudaMallocHost(self, nbytes: int) -> tuple[Any, int]:
        self.counts["host_malloc"] += 1
        return SUCCESS, self._allocate(nbytes)

    def _allocate(self, nbytes: int) -> int:
        memory = HostMemory(nbytes)
        ctypes.memset(memory.address, 0xFF, nbytes)  # NaN in every float format, -1 as an id
        self.allocations[memory.address] = memory
        return memory.address

    def cudaFree(self, address: int) -> tuple[Any]:
        memory = self.allocations.pop(int(address), None)
        if memory is None:  # of an earlier test's device, which only now went out of use
            return (SUCCESS,)
        self.freed.append(memory)
        self.enqueue(lambda: ctypes.memset(memory.address, 0xFF, memory.nbytes))
        return (SUCCESS,)

    cudaFreeHost = cudaFree

    def cudaMemcpyAsync(self, target: int, source: int, nbytes: int, kind: Any, stream: int) -> tuple[Any]:
        assert stream == STREAM
        kinds = real.cudaMemcpyKind
        self.copies[{kinds.cudaMemcpyHostToDevice: "to_device", kinds.cudaMemcpyDeviceToHost: "to_host"}[kind]] += 1
        self.enqueue(lambda: ctypes.memmove(target, source, nbytes))
        return (SUCCESS,)

    def cudaMemcpy2DAsync(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        kind: Any,
        stream: int,
    ) -> tuple[Any]:
        assert stream == STREAM
        assert kind == real.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        assert width <= min(target_pitch, source_pitch)

        def copy() -> None:
            for row in range(height):
                ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

        self.enqueue(copy)
        return (SUCCESS,)

    def cudaMemsetAsync(self, address: int, value: int, nbytes: int, stream: int) -> tuple[Any]:
        assert stream == STREAM
        self.enqueue(lambda: ctypes.memset(address, value, nbytes))
        return (SUCCESS,)

    def cudaStreamBeginCapture(self, stream: int, mode: Any) -> tuple[Any]:
        assert stream == STREAM
        assert self.recording is None
        self.counts["capture"] += 1
        self.recording = []
        return (SUCCESS,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, int]:
        assert self.recording is not None
        number = len(self.graphs) + 1
        self.graphs[number], self.recording = self.recording, None
        return SUCCESS, number

    def cudaGetLastError(self) -> tuple[Any]:
        error, self.last_error = self.last_error, SUCCESS
        return (error,)

    def cudaGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, int]:
        return SUCCESS, graph

    def cudaGraphDestroy(self, graph: int) -> tuple[Any]:
        return (SUCCESS,)

    cudaGraphExecDestroy = cudaGraphDestroy

    def cudaGraphLaunch(self, graph: int, stream: int) -> tuple[Any]:
        assert stream == STREAM
        self.counts["launch"] += 1
        self.queue += self.graphs[graph]
        return (SUCCESS,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any]:
        assert stream == STREAM
        assert self.recording is None, "waiting cannot be part of a recorded graph"
        self.counts["wait"] += 1
        queue, self.queue = self.queue, []
        for work in queue:
            work()
        return (SUCCESS,)


def use(fake: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    """Let `CudaDevice` and `find_gpu` meet `fake` instead of the real CUDA."""
    import cuda.bindings

    import tfexport.runtimes.cuda

    monkeypatch.setattr(tfexport.runtimes.cuda, "cudart", fake)
    monkeypatch.setattr(cuda.bindings, "runtime", fake)
    return fake


def contents(tensor: DeviceTensor) -> np.ndarray:
    """A copy of what lies at a fake device's address."""
    return host_array(tensor).copy()
