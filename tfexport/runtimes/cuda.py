"""The memory of an NVIDIA GPU, through the CUDA runtime API (`cuda-bindings`)."""

from __future__ import annotations

import gc
from typing import Any

from cuda import pathfinder
from cuda.bindings import runtime as cudart
from numpy.typing import NDArray

from tfexport.errors import RuntimeUnavailable
from tfexport.runtimes.device import Call, DeviceTensor, host_array
from tfexport.system.gpu import checked, find_gpu

LIBRARIES = ("cudart", "cublasLt", "cublas", "curand", "cudnn")
"""The libraries that ONNX Runtime's CUDA provider loads, by their names in `cuda.pathfinder`."""
COMPILER = "nvrtc"
"""The runtime compiler of CUDA, which cuDNN needs for some of its kernels."""


def load_libraries() -> None:
    """Load the libraries of CUDA and cuDNN, also from where pip installs them, which is on no search path.

    Raises:
        RuntimeUnavailable: one is missing.
    """
    for name in (*LIBRARIES, COMPILER):
        try:
            pathfinder.load_nvidia_dynamic_lib(name)
        except pathfinder.DynamicLibNotFoundError as error:
            if name == COMPILER:
                continue
            raise RuntimeUnavailable(
                f"the library {name} of CUDA 13 and cuDNN 9 was not found, which ort-cuda needs: pip install "
                "'tfexport[cuda]', or add its folder to LD_LIBRARY_PATH."
            ) from error


class CudaMemory:
    """One `cudaMalloc`."""

    def __init__(self, nbytes: int):
        self.address = int(checked(cudart.cudaMalloc(nbytes)))
        self.nbytes = nbytes

    def __del__(self) -> None:
        if hasattr(self, "address"):
            cudart.cudaFree(self.address)


class PinnedMemory:
    """Pinned host memory, which the GPU can access."""

    def __init__(self, nbytes: int):
        self.address = int(checked(cudart.cudaMallocHost(nbytes)))
        self.nbytes = nbytes

    def __del__(self) -> None:
        if hasattr(self, "address"):
            cudart.cudaFreeHost(self.address)


class CudaMirror:
    """A pinned host array beside a tensor on the GPU."""

    def __init__(self, tensor: DeviceTensor, stream: int):
        self._tensor, self._stream = tensor, stream
        self._memory = PinnedMemory(max(tensor.nbytes, 1))
        self.array: NDArray[Any] = host_array(tensor._replace(address=self._memory.address))

    def push(self) -> None:
        self._copy(self._tensor.address, self._memory.address, cudart.cudaMemcpyKind.cudaMemcpyHostToDevice)

    def pull(self) -> None:
        self._copy(self._memory.address, self._tensor.address, cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def _copy(self, target: int, source: int, kind: Any) -> None:
        checked(cudart.cudaMemcpyAsync(target, source, self._tensor.nbytes, kind, self._stream))


class CudaGraph:
    """Work that was recorded once and is enqueued as a whole.

    It keeps a reference to the recorded call, which owns the memory that the work uses.
    """

    def __init__(self, graph: Any, stream: int, recorded: Call):
        self._stream, self._recorded = stream, recorded
        self._graph = checked(cudart.cudaGraphInstantiate(graph, 0))
        checked(cudart.cudaGraphDestroy(graph))

    def __call__(self) -> None:
        checked(cudart.cudaGraphLaunch(self._graph, self._stream))

    def __del__(self) -> None:
        if hasattr(self, "_graph"):
            cudart.cudaGraphExecDestroy(self._graph)


class CudaDevice:
    """The GPU that CUDA names first (choose with CUDA_VISIBLE_DEVICES), with a stream of its own.

    Raises:
        RuntimeUnavailable: there is no GPU, or its driver is too old.
    """

    name = "cuda"

    def __init__(self) -> None:
        self.gpu = find_gpu()
        # Non-blocking: the legacy default stream, which other libraries use, cannot be captured.
        self.stream = int(checked(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking)))

    def allocate(self, nbytes: int) -> CudaMemory:
        return CudaMemory(max(nbytes, 1))

    def mirror(self, tensor: DeviceTensor) -> CudaMirror:
        return CudaMirror(tensor, self.stream)

    def zero(self, tensor: DeviceTensor) -> None:
        checked(cudart.cudaMemsetAsync(tensor.address, 0, tensor.nbytes, self.stream))

    def copy_prefixes(self, target: int, source: int, *, count: int, width: int, steps: tuple[int, int]) -> None:
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        checked(cudart.cudaMemcpy2DAsync(target, steps[0], source, steps[1], width, count, kind, self.stream))

    def capture(self, enqueue: Call) -> Call:
        """Record `enqueue`. It must have run once before, so that its lazy setup is not recorded."""
        mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        collecting = gc.isenabled()
        gc.disable()  # a collection could free memory, which would end the recording
        checked(cudart.cudaStreamBeginCapture(self.stream, mode))
        try:
            enqueue()
        except BaseException:
            cudart.cudaStreamEndCapture(self.stream)
            cudart.cudaGetLastError()  # or the next work on the stream would seem to fail
            raise
        finally:
            if collecting:
                gc.enable()
        return CudaGraph(checked(cudart.cudaStreamEndCapture(self.stream)), self.stream, enqueue)

    def synchronize(self) -> None:
        checked(cudart.cudaStreamSynchronize(self.stream))
