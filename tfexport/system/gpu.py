"""Detection of this machine's NVIDIA GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfexport.errors import DeviceMemoryError, RuntimeUnavailable, TfexportError
from tfexport.system.imports import import_failure


@dataclass(frozen=True)
class Gpu:
    """CUDA's first GPU; CUDA_VISIBLE_DEVICES selects one of several."""

    name: str
    generation: str
    """Compute capability in the notation of TensorRT and nvcc, such as `sm89`."""
    memory: int
    """Bytes."""


def find_gpu() -> Gpu:
    """The GPU of this machine.

    Raises:
        RuntimeUnavailable: CUDA finds no usable GPU, or `cuda-bindings` is not installed.
    """
    try:
        from cuda.bindings import runtime as cudart
    except ImportError as error:
        absent = "looking for a GPU needs cuda-bindings, which is not installed: pip install cuda-bindings."
        raise import_failure(error, "cuda", absent) from error
    status, count = cudart.cudaGetDeviceCount()
    if status != cudart.cudaError_t.cudaSuccess or not count:
        raise RuntimeUnavailable(
            f"no NVIDIA GPU can be used here ({status.name}). Run on a machine with a GPU and a driver for CUDA 13, or "
            "decode with --runtime ort-cpu."
        )
    properties = checked(cudart.cudaGetDeviceProperties(0))
    name = properties.name if isinstance(properties.name, str) else properties.name.split(b"\0")[0].decode()
    return Gpu(name, f"sm{properties.major}{properties.minor}", int(properties.totalGlobalMem))


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a call of the CUDA runtime, which returns its error first.

    Raises:
        DeviceMemoryError: the GPU's memory is full.
        TfexportError: the call failed otherwise.
    """
    error, *values = result
    if error.name == "cudaErrorMemoryAllocation":
        raise DeviceMemoryError(
            "the GPU's memory is full. Decode with a smaller --batch-size or --beam, or end other programs on it."
        )
    if error.name != "cudaSuccess":
        raise TfexportError(
            f"CUDA failed with {error.name}. Run again with CUDA_LAUNCH_BLOCKING=1 and --debug to see where, and compare "
            "the driver with the requirements of CUDA 13."
        )
    return values[0] if values else None
