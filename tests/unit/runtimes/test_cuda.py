"""The CUDA device, over a stand-in for the CUDA runtime that does nothing before it is waited for."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
from cuda import pathfinder
from cuda.bindings import runtime as cudart

from tests.support.fake_cuda import FakeCudart, contents, use
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.runtimes.cuda import CudaDevice, load_libraries
from tfexport.runtimes.device import DeviceTensor
from tfexport.system.gpu import find_gpu

KNOWN_LIBRARIES = (*pathfinder.SUPPORTED_NVIDIA_LIBNAMES, "cudnn")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    return use(FakeCudart(), monkeypatch)


def tensor_of(device: CudaDevice, array: np.ndarray) -> tuple[DeviceTensor, object]:
    """The array on the device, and what keeps it there."""
    memory = device.allocate(array.nbytes)
    tensor = DeviceTensor(memory.address, array.shape, str(array.dtype))
    mirror = device.mirror(tensor)
    mirror.array[:] = array
    mirror.push()
    device.synchronize()
    return tensor, memory


def test_a_mirror_goes_there_and_back(gpu: FakeCudart) -> None:
    device = CudaDevice()
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor, _memory = tensor_of(device, numbers)
    other = device.mirror(tensor)
    other.pull()
    assert np.isnan(other.array).all(), "nothing is there before the stream was waited for"
    device.synchronize()
    assert np.array_equal(other.array, numbers)


def test_prefixes_are_copied_and_the_rest_is_left(gpu: FakeCudart) -> None:
    device = CudaDevice()
    source, _one = tensor_of(device, np.arange(12, dtype=np.int64).reshape(3, 4))
    target, _two = tensor_of(device, np.full((3, 6), -1, dtype=np.int64))
    device.copy_prefixes(target.address, source.address, count=3, width=16, steps=(48, 32))
    device.synchronize()
    assert contents(target).tolist() == [[row * 4, row * 4 + 1, -1, -1, -1, -1] for row in range(3)]


def test_zero_clears_every_byte(gpu: FakeCudart) -> None:
    device = CudaDevice()
    tensor, _memory = tensor_of(device, np.ones((2, 3), dtype=np.float32))
    device.zero(tensor)
    device.synchronize()
    assert not contents(tensor).any()


def test_recorded_work_is_not_done_until_it_is_called_and_then_as_often_as_that(gpu: FakeCudart) -> None:
    device, done = CudaDevice(), []
    call = device.capture(lambda: gpu.enqueue(lambda: done.append(len(done))))
    device.synchronize()
    assert done == []
    call()
    call()
    device.synchronize()
    assert done == [0, 1]


def test_nothing_is_collected_while_work_is_recorded(gpu: FakeCudart) -> None:
    """A collection could free memory of the GPU, which would end the recording."""
    device, enabled = CudaDevice(), []

    def record(then: Callable[[], object]) -> None:
        enabled.append(gc.isenabled())
        then()

    device.capture(lambda: record(lambda: None))
    with pytest.raises(ZeroDivisionError):
        device.capture(lambda: record(lambda: 1 // 0))
    assert enabled == [False, False]
    assert gc.isenabled()


def test_a_recording_ends_also_when_what_is_recorded_fails(gpu: FakeCudart) -> None:
    device = CudaDevice()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        device.capture(fail)
    device.synchronize()  # the stand-in refuses this while it records


def test_memory_is_freed_with_its_last_reference(gpu: FakeCudart) -> None:
    device = CudaDevice()
    tensor, memory = tensor_of(device, np.ones(100, dtype=np.float32))
    assert gpu.in_use >= 400
    del memory, tensor
    gc.collect()
    assert gpu.in_use == 0


def test_a_full_gpu_is_one_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeCudart(memory=1000), monkeypatch)
    with pytest.raises(TfexportError, match=r"the GPU's memory is full\. Decode with a smaller --batch-size"):
        CudaDevice().allocate(2000)


def test_a_failing_call_names_its_error(gpu: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice()
    error = cudart.cudaError_t.cudaErrorIllegalAddress
    monkeypatch.setattr(gpu, "cudaStreamSynchronize", lambda stream: (error,))
    with pytest.raises(TfexportError, match="CUDA failed with cudaErrorIllegalAddress"):
        device.synchronize()


def test_no_gpu_is_one_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeCudart(devices=0), monkeypatch)
    for look in (find_gpu, CudaDevice):
        with pytest.raises(RuntimeUnavailable, match=r"no NVIDIA GPU can be used here \(cudaErrorNoDevice\)\. Run on"):
            look()


def test_a_gpu_is_told_by_its_generation(gpu: FakeCudart) -> None:
    found = find_gpu()
    assert (found.name, found.generation, found.memory) == ("A fake GPU", "sm89", 1 << 30)


def lose(monkeypatch: pytest.MonkeyPatch, *missing: str) -> list[str]:
    """Let these libraries be on no path; returns the names that are asked for."""
    asked = []

    def load(name: str) -> None:
        asked.append(name)
        if name in missing:
            raise pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", load)
    return asked


def test_libraries_are_found_wherever_they_are_and_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = lose(monkeypatch, "nvrtc")  # cuDNN loads it for some of its kernels alone
    load_libraries()
    assert {"cublas", "cublasLt", "cudart", "cudnn", "curand"} < set(asked) <= set(KNOWN_LIBRARIES)
    assert capfd.readouterr() == ("", "")


def test_a_missing_library_is_one_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, "cudnn")
    with pytest.raises(RuntimeUnavailable, match=r"the library cudnn of CUDA 13 and cuDNN 9 was not found.*LD_LIBRARY"):
        load_libraries()


def test_the_stand_in_has_the_names_of_the_real_api() -> None:
    """A misspelt or made-up function would work in the stand-in only."""
    for name in (name for name in vars(FakeCudart) if name.startswith("cuda")):
        assert callable(getattr(cudart, name)), name
    properties = cudart.cudaDeviceProp()
    assert all(hasattr(properties, name) for name in ("name", "major", "minor", "totalGlobalMem"))
