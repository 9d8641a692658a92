"""Sessions on a GPU: what they are asked for, and how they are recorded, over a stand-in for CUDA and for the session."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
from cuda.bindings import runtime as cudart

from tests.support.fake_cuda import FakeCudart, use
from tfexport.errors import RuntimeUnavailable
from tfexport.runtimes.cuda import CudaDevice
from tfexport.runtimes.device import DeviceTensor
from tfexport.runtimes.ort import CUDA, SWITCH, OrtExecutable

TENSORS = {"x": DeviceTensor(1024, (2,), "float32"), "y": DeviceTensor(2048, (2,), "float32")}


class FakeSession:
    """A session of `onnxruntime.InferenceSession` whose runs go to the stream of a fake GPU."""

    gpu: FakeCudart
    nodes: tuple[tuple[str, str], ...] = (("node", CUDA),)
    refusals: int = 0
    """Recordings that fail before one succeeds."""
    made: list[FakeSession]

    def __init__(self, graph: Any, options: Any, *, providers: list[Any], disabled_optimizers: list[str]):
        self.options = options
        self.settings = dict(providers)[CUDA] if isinstance(providers[0], str) else providers[0][1]
        self.runs, self.done, self.released = 0, 0, []  # type: tuple[int, int, list[int]]  # type: ignore[assignment]
        FakeSession.made.append(self)

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="x")]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name="y")]

    def get_providers(self) -> list[str]:
        return [CUDA]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [
            SimpleNamespace(ep_name=provider, get_nodes=lambda name=name: [SimpleNamespace(name=name, op_type="Op")])
            for name, provider in self.nodes
        ]

    def disable_fallback(self) -> None:
        pass

    def io_binding(self) -> Any:
        return SimpleNamespace(bind_input=lambda *_: None, bind_output=lambda *_: None)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        self.runs += 1
        if self.refusals and self.gpu.recording is not None:
            self.refusals -= 1
            self.gpu.last_error = cudart.cudaError_t.cudaErrorStreamCaptureUnsupported
            raise ValueError("not while recording\nmore")
        self.gpu.enqueue(self._work)

    def _work(self) -> None:
        self.done += 1

    def release_captured_graph(self, number: int) -> None:
        self.released.append(number)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = use(FakeCudart(), monkeypatch)
    monkeypatch.setattr(FakeSession, "gpu", fake, raising=False)
    monkeypatch.setattr(FakeSession, "made", [], raising=False)
    monkeypatch.setattr(onnxruntime, "InferenceSession", FakeSession)
    monkeypatch.delenv(SWITCH, raising=False)
    return fake


def bound() -> tuple[Any, FakeSession, CudaDevice]:
    device = CudaDevice()
    call = OrtExecutable(Path("step.onnx"), device).bind(TENSORS)
    return call, FakeSession.made[-1], device


def test_a_graph_runs_once_and_is_recorded_once_for_all_threads(gpu: FakeCudart) -> None:
    call, session, device = bound()
    assert (session.settings["enable_cuda_graph"], session.runs, gpu.counts["capture"]) == ("0", 2, 1)
    assert session.done == 1
    for _ in range(3):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    device.synchronize()
    assert (session.runs, session.done, gpu.counts["capture"], gpu.counts["launch"]) == (2, 4, 1, 3)


def test_attention_does_not_ask_cudnn(gpu: FakeCudart) -> None:
    """cuDNN would build a plan for each shape, also in the middle of a run."""
    flash, memory_efficient = 1, 2
    _, session, _ = bound()
    assert session.settings["sdpa_kernel"] == str(flash | memory_efficient)


def test_a_graph_with_nodes_of_the_host_is_not_recorded(gpu: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would not run them. Nodes that compute shapes may be there: shapes are those of the binding."""
    monkeypatch.setattr(FakeSession, "nodes", (("node", CUDA), ("other", "CPUExecutionProvider")))
    call, session, _ = bound()
    call()
    assert (session.runs, gpu.counts["capture"]) == (1, 0)
    monkeypatch.setattr(FakeSession, "nodes", (("node", CUDA), ("shape/other", "CPUExecutionProvider")))
    bound()
    assert gpu.counts["capture"] == 1


def test_what_cannot_be_recorded_runs_unrecorded(
    gpu: FakeCudart, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeSession, "refusals", 2)
    call, session, device = bound()
    assert gpu.last_error == cudart.cudaError_t.cudaSuccess, "ONNX Runtime would report it of the next node"
    call()
    device.synchronize()
    assert (session.runs, session.done, gpu.counts["launch"]) == (5, 3, 0)
    assert caplog.messages == ["warning: step.onnx is not recorded as a CUDA graph: not while recording"]


def test_a_recording_that_had_to_allocate_is_tried_again(gpu: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSession, "refusals", 1)
    call, session, device = bound()
    assert not session.options.enable_mem_pattern, "the second run would allocate otherwise than the first"
    call()
    device.synchronize()
    assert (session.runs, session.done, gpu.counts["launch"]) == (4, 3, 1)


@pytest.mark.parametrize(("recorder", "enabled"), [("onnxruntime", "1"), ("none", "0")])
def test_onnx_runtime_or_nobody_may_record(
    gpu: FakeCudart, monkeypatch: pytest.MonkeyPatch, recorder: str, enabled: str
) -> None:
    monkeypatch.setenv(SWITCH, recorder)
    call, session, _ = bound()
    call()
    assert (session.settings["enable_cuda_graph"], session.runs, gpu.counts["capture"]) == (enabled, 1, 0)
    del call
    assert session.released == ([1] if recorder == "onnxruntime" else [])


def test_another_recorder_is_refused(gpu: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "yes")
    with pytest.raises(RuntimeUnavailable, match=r"TFEXPORT_CUDA_GRAPHS is 'yes'\. Set it to one of: tfexport, "):
        bound()
