"""Facts about this machine, and its peak speeds of reading arrays of many sizes and of multiplying matrices.

Measure in a process whose BLAS has one thread (`ONE_THREAD`). The threads are Python's, each with its own data, so that the
peak does not include the loss of sharing one product among threads.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from tfexport.system.processes import cpu_name, usable_cpus

STAT = Path("/proc/stat")
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "VECLIB_MAXIMUM")}
"""The environment for measurements."""

READ_SIZES = tuple(2**power for power in range(20, 29))
"""Sizes of the arrays in bytes: from 1 MiB, which fits into a core's cache, to 256 MiB, which fits into no usual cache."""

GEMM_SIZE = 1024
"""The size of the square matrices. tfexport/assets/gemm.*.graph are ONNX models of one product with a constant matrix of
ones of this size, which ONNX Runtime creates when it loads them."""

PACKAGES = (
    *("tfexport", "numpy", "onnxruntime", "onnxruntime-gpu", "torch", "transformers", "tokenizers", "ctranslate2"),
    *("optimum", "optimum-onnx", "onnx"),
)


@dataclass(frozen=True)
class Peaks:
    """The peak speeds of a number of threads on this machine."""

    threads: int
    read: Mapping[int, float]
    """Bytes per second by the size of an array in bytes, for repeated reads, each thread of its own part."""
    operations: Mapping[str, float]
    """Operations per second for float32 and, with ONNX Runtime, int8; a multiply-add is two operations."""

    def bandwidth(self, size: float) -> float:
        """Bytes per second for repeated reads of `size` bytes, as every step reads the weights.

        Data that fits into a cache is read at the speed of that cache. The result is the speed of the next smaller measured
        array, or of a larger one that was faster. So a time computed from it is a lower bound.
        """
        smaller = max((measured for measured in self.read if measured <= size), default=min(self.read))
        return max(rate for measured, rate in self.read.items() if measured >= smaller)

    def or_better(self, fewer: Peaks) -> Peaks:
        """The better of these and the peaks of `fewer` threads, because the other threads could be idle."""
        read = {size: max(rate, fewer.read.get(size, 0.0)) for size, rate in self.read.items()}
        operations = {dtype: max(rate, fewer.operations.get(dtype, 0.0)) for dtype, rate in self.operations.items()}
        return Peaks(self.threads, read, operations)

    def to_dict(self) -> dict[str, Any]:
        return {
            "threads": self.threads,
            "read_bytes_per_second": {str(size): rate for size, rate in self.read.items()},
            "operations_per_second": dict(self.operations),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Peaks:
        read = {int(size): float(rate) for size, rate in fields["read_bytes_per_second"].items()}
        return cls(int(fields["threads"]), read, dict(fields["operations_per_second"]))


def measure_peaks(threads: int) -> Peaks:
    """Measure with `threads` threads. This takes a few seconds and needs an idle machine."""
    with ThreadPoolExecutor(threads) as pool:
        read = {size: _read(pool, threads, size) for size in READ_SIZES}
        operations = {"float32": _numpy_products(pool, threads)}
        for dtype in ("float32", "int8"):
            rate = _onnx_products(pool, threads, dtype)
            if rate is not None:
                operations[dtype] = max(rate, operations.get(dtype, 0.0))
        return Peaks(threads, read, operations)


def _best_rate(pool: ThreadPoolExecutor, work: Sequence[Callable[[], object]], amount: float, repeats: int) -> float:
    """`amount` of all `work` together, divided by the seconds of the fastest repeat, with one thread for each part."""
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for part in [pool.submit(task) for task in work]:
            part.result()
        best = min(best, time.perf_counter() - start)
    return amount / best


def _read(pool: ThreadPoolExecutor, threads: int, size: int) -> float:
    """Bytes per second of dot products of the halves of an array of `size` bytes."""
    length = size // threads // 8
    repeats = max(1, 2**30 // size)  # in one call, without Python between repeats

    def reader() -> Callable[[], object]:
        left, right = np.ones((2, length), dtype=np.float32)
        many = (repeats, length)
        return lambda: np.vecdot(np.broadcast_to(left, many), np.broadcast_to(right, many))

    return _best_rate(pool, [reader() for _ in range(threads)], 8.0 * length * threads * repeats, 3)


def _numpy_products(pool: ThreadPoolExecutor, threads: int) -> float:
    def product() -> Callable[[], object]:
        matrix = np.ones((GEMM_SIZE, GEMM_SIZE), dtype=np.float32)
        out = np.empty_like(matrix)
        return lambda: np.matmul(matrix, matrix, out=out)

    return _best_rate(pool, [product() for _ in range(threads)], 2.0 * GEMM_SIZE**3 * threads, 8)


def _onnx_products(pool: ThreadPoolExecutor, threads: int, dtype: str) -> float | None:
    """The same with ONNX Runtime, and a constant second matrix like weights; None if ONNX Runtime is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    model = (files("tfexport") / "assets" / f"gemm.{dtype}.graph").read_bytes()
    onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    rows = np.ones((GEMM_SIZE, GEMM_SIZE), dtype=np.uint8 if dtype == "int8" else np.float32)

    def product() -> Callable[[], object]:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, {"a": rows})

    return _best_rate(pool, [product() for _ in range(threads)], 2.0 * GEMM_SIZE**3 * threads, 8)


def facts() -> dict[str, Any]:
    """Hardware and software of this run, JSON-ready; None for unknown facts."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        # Without folders, which mean nothing on other machines.
        "command": shlex.join(_without_folder(word) for word in sys.orig_argv),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cpus": usable_cpus(),
        "last_level_cache_bytes": _last_level_cache(),
        "versions": versions(),
    }


def _without_folder(word: str) -> str:
    """Convert `/x/model` to `model`, and `name=/x/model` to `name=model`."""
    name, equals, path = word.rpartition("=")
    return f"{name}{equals}{Path(path).name}" if "/" in path else word


def busy_cpus(seconds: float = 1.0) -> float | None:
    """The number of busy CPUs while this process waits for `seconds`; None if unknown."""

    def times() -> tuple[float, float] | None:
        try:
            fields = [float(field) for field in STAT.read_text(encoding="ascii").split("\n")[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        return sum(fields) - fields[3] - fields[4], sum(fields)  # idle, and waiting for a disk

    before = times()
    time.sleep(seconds)
    after = times()
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1]) * (os.cpu_count() or 1)


def versions() -> dict[str, str]:
    """The versions of the installed packages among `PACKAGES`."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def _last_level_cache() -> int | None:
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text(encoding="ascii").strip()
            sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes, default=None)
