"""The stand-in of libcudart from Python: what `tfexport` calls of `cuda.bindings.runtime`, and the counts.

`cuda-bindings` has its own copy of the CUDA runtime, so it would not meet the stand-in that the provider meets.
"""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

COUNTS = (
    *("kernels", "to_device", "to_host", "on_device", "fills", "launches", "replays", "waits", "allocations", "frees"),
    *("host_allocations", "host_frees", "recordings", "graphs", "plans", "violations"),
)
"""The order of `Kind` in counting.h."""

_LIBRARY = ctypes.CDLL("libcudart.so.13")
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class Counts(dict[str, int]):
    """How often each of `COUNTS` happened."""

    @classmethod
    def now(cls) -> Counts:
        found = np.zeros(len(COUNTS), dtype=np.uint64)
        assert _LIBRARY.dry_counts(_POINTER(found.ctypes.data)) == len(COUNTS)
        return cls(zip(COUNTS, found.tolist(), strict=True))

    def since(self, before: Counts) -> Counts:
        return Counts({name: self[name] - before[name] for name in self})

    def __add__(self, other: Counts) -> Counts:
        return Counts({name: self[name] + other[name] for name in self})


def violations() -> list[str]:
    """What CUDA would have refused while something was recorded, or would have left out of the recording."""
    return _text("dry_violations")


def kernels() -> dict[str, int]:
    """The kernels that were launched or recorded since `forget_kernels`, and how often."""
    counted = (line.split(" ", 1) for line in _text("dry_kernels"))
    return {name: int(count) for count, name in counted}


def forget_kernels() -> None:
    _LIBRARY.dry_forget_kernels()


def _text(function: str) -> list[str]:
    getattr(_LIBRARY, function).restype = ctypes.c_char_p
    return str(getattr(_LIBRARY, function)().decode()).splitlines()


class Cudart:
    """`cuda.bindings.runtime` over the stand-in. Types and everything that is not used are the real module's."""

    def __init__(self, real: Any):
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _call(self, name: str, *arguments: Any) -> tuple[Any]:
        return (self._real.cudaError_t(getattr(_LIBRARY, name)(*arguments)),)

    def _made(self, name: str, *arguments: Any) -> tuple[Any, Any]:
        """A call that writes a pointer to its first argument."""
        made = _POINTER()
        (error,) = self._call(name, ctypes.byref(made), *arguments)
        return error, made.value

    def cudaGetDeviceCount(self) -> tuple[Any, int]:
        return self._real.cudaError_t.cudaSuccess, 1

    def cudaGetDeviceProperties(self, device: int) -> tuple[Any, Any]:
        found = SimpleNamespace(name=b"stand-in", major=9, minor=0, totalGlobalMem=80 << 30)
        return self._real.cudaError_t.cudaSuccess, found

    def cudaMalloc(self, nbytes: int) -> tuple[Any, Any]:
        return self._made("cudaMalloc", _SIZE(nbytes))

    def cudaMallocHost(self, nbytes: int) -> tuple[Any, Any]:
        return self._made("cudaMallocHost", _SIZE(nbytes))

    def cudaFree(self, address: int) -> tuple[Any]:
        return self._call("cudaFree", _POINTER(address))

    def cudaFreeHost(self, address: int) -> tuple[Any]:
        return self._call("cudaFreeHost", _POINTER(address))

    def cudaMemcpyAsync(self, target: int, source: int, nbytes: int, kind: Any, stream: int) -> tuple[Any]:
        return self._call(
            "cudaMemcpyAsync", _POINTER(target), _POINTER(source), _SIZE(nbytes), _INT(int(kind)), _POINTER(stream)
        )

    def cudaMemcpy2DAsync(
        self, target: int, to: int, source: int, of: int, width: int, height: int, kind: Any, stream: int
    ) -> tuple[Any]:
        places = (_POINTER(target), _SIZE(to), _POINTER(source), _SIZE(of), _SIZE(width), _SIZE(height))
        return self._call("cudaMemcpy2DAsync", *places, _INT(int(kind)), _POINTER(stream))

    def cudaMemsetAsync(self, address: int, value: int, nbytes: int, stream: int) -> tuple[Any]:
        return self._call("cudaMemsetAsync", _POINTER(address), _INT(value), _SIZE(nbytes), _POINTER(stream))

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, Any]:
        return self._made("cudaStreamCreateWithFlags", ctypes.c_uint(flags))

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any]:
        return self._call("cudaStreamSynchronize", _POINTER(stream))

    def cudaStreamBeginCapture(self, stream: int, mode: Any) -> tuple[Any]:
        return self._call("cudaStreamBeginCapture", _POINTER(stream), _INT(int(mode)))

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, Any]:
        graph = _POINTER()
        (error,) = self._call("cudaStreamEndCapture", _POINTER(stream), ctypes.byref(graph))
        return error, graph.value

    def cudaGetLastError(self) -> tuple[Any]:
        return self._call("cudaGetLastError")

    def cudaGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, Any]:
        return self._made("cudaGraphInstantiate", _POINTER(graph), ctypes.c_ulonglong(flags))

    def cudaGraphLaunch(self, graph: int, stream: int) -> tuple[Any]:
        return self._call("cudaGraphLaunch", _POINTER(graph), _POINTER(stream))

    def cudaGraphDestroy(self, graph: int) -> tuple[Any]:
        return self._call("cudaGraphDestroy", _POINTER(graph))

    def cudaGraphExecDestroy(self, graph: int) -> tuple[Any]:
        return self._call("cudaGraphExecDestroy", _POINTER(graph))


OTHERS = ("libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudnn.so.9")


def use() -> None:
    """Let `tfexport`, which must not have been imported, meet the stand-ins."""
    for name in OTHERS:
        ctypes.CDLL(name)  # or packages of the real libraries would be found first
    import cuda.bindings
    from cuda.bindings import runtime as real

    stand_in: Any = Cudart(real)
    cuda.bindings.runtime = stand_in
    sys.modules["cuda.bindings.runtime"] = stand_in
