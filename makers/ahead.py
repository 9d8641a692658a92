"""A runtime that searches ahead over graphs on the CPU, and models to search with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from tfexport.bundle.reader import open_bundle
from tfexport.config import ModelConfig
from tfexport.contract import WEIGHTS_FILE, Role, cache_names
from tfexport.graph_contract import SEARCH_GRAPHS
from tfexport.graphs import portable
from tfexport.graphs.stored_weights import StoredWeights
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.buckets import Buckets
from tfexport.runtimes.device import Call, Device, DeviceTensor, HostDevice, host_array
from tfexport.runtimes.device_search import DeviceSearch, Recordable
from tfexport.runtimes.loop import LoopRuntime
from tfexport.runtimes.ort import OrtExecutable, OrtGraphs, cpu_session
from tfexport.runtimes.workspace import Executable
from tfexport.search.search import Hypothesis, SearchOptions, search_steps


class SharedCacheStep:
    """The `beam_step` of the dialect `ort`, as a GPU's: with as many best tokens as it is bound to, and int64 inputs."""

    records = True

    def __init__(self, graph: Path, config: ModelConfig):
        self._session, self._config = cpu_session(graph, threads=1), config

    def bind(self, tensors: Mapping[str, DeviceTensor], *, record: bool = True) -> Call:
        arrays = {name: host_array(tensor) for name, tensor in tensors.items()}
        past, present = cache_names(self._config, "past"), cache_names(self._config, "present")
        outputs = ["best.log_probs", "best.ids", "logits", *present]

        def run() -> None:
            inputs = {name: array for name, array in arrays.items() if name not in outputs}
            narrow = {name: inputs[name].astype(np.int32) for name in ("position", "src_len")}
            count = {"count": np.array([arrays["best.ids"].shape[1]])}
            found = self._session.run(outputs, {**inputs, **narrow, **count})
            for name, array in zip(outputs, found, strict=True):
                arrays[name.replace("present", "past")][:] = array
            assert all(tensors[one] == tensors[other] for one, other in zip(past, present, strict=True))

        return run


def search_graphs(config: ModelConfig, stored: StoredWeights, folder: Path) -> dict[Role, Path]:
    """The search graphs of a model, written to `folder`."""
    files: dict[Role, Path] = {}
    for graph in SEARCH_GRAPHS:
        files[graph.role] = folder / graph.file
        ir.save(portable.emit(graph, config, stored), files[graph.role])
    return files


class AheadGraphs:
    """The portable graphs of a bundle, the step of beams that share a cache, and search graphs.

    Args:
        wrap: applied to every graph that is loaded.
    """

    precision = "float32"
    position_dtype = "int64"
    has_beam_step = True
    flat = False

    def __init__(
        self,
        directory: Path,
        folder: Path,
        buckets: Buckets,
        device: Device | None = None,
        wrap: Any = lambda graph: graph,
    ):
        bundle = open_bundle(directory)
        self.device, self.buckets = device or HostDevice(), buckets
        inner = OrtGraphs(bundle, "float32", HostDevice(), "onnx24", buckets, threads=1)
        self.encoder, self.select_rows = wrap(inner.encoder), wrap(inner.select_rows)
        self._step = wrap(inner.step(0))
        self._beam_step = wrap(SharedCacheStep(bundle.graph("beam_step", "float32", "ort"), bundle.config))
        files = search_graphs(bundle.config, StoredWeights(directory / WEIGHTS_FILE), folder)

        def load(role: Role) -> Recordable:
            loaded: Recordable = wrap(OrtExecutable(files[role], HostDevice(), threads=1))
            return loaded

        self.search = DeviceSearch(self.device, load, lambda: [self._step, self._beam_step])

    def step(self, cache: int, *, attention: bool = False) -> Executable:
        assert not attention
        step: Executable = self._step
        return step

    def beam_step(self) -> Executable:
        step: Executable = self._beam_step
        return step


def ahead_runtime(directory: Path, folder: Path, buckets: Buckets) -> LoopRuntime:
    """A runtime that searches ahead on the CPU, over the bundle in `directory`; search graphs come to lie in `folder`."""
    graphs: Any = AheadGraphs(directory, folder, buckets)
    return LoopRuntime("ahead", open_bundle(directory).config, graphs)


def late_runtime(directory: Path, folder: Path, buckets: Buckets) -> LoopRuntime:
    """The same on a device that does nothing before it is waited for."""
    device = LateDevice()
    graphs: Any = AheadGraphs(directory, folder, buckets, device, lambda graph: LateExecutable(graph, device))
    return LoopRuntime("late", open_bundle(directory).config, graphs)


class LateDevice(HostDevice):
    """Memory of the host, with mirrors of their own, and a stream whose work is done when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: list[Call] = []
        self._recording: list[Call] | None = None

    def enqueue(self, work: Call) -> None:
        (self._queue if self._recording is None else self._recording).append(work)

    def mirror(self, tensor: DeviceTensor) -> Any:
        return LateMirror(tensor, self)

    def zero(self, tensor: DeviceTensor) -> None:
        self.enqueue(lambda: HostDevice.zero(self, tensor))

    def copy_prefixes(self, target: int, source: int, *, count: int, width: int, steps: tuple[int, int]) -> None:
        self.enqueue(lambda: HostDevice.copy_prefixes(self, target, source, count=count, width=width, steps=steps))

    def capture(self, enqueue: Call) -> Call:
        assert self._recording is None
        self._recording = work = []
        enqueue()
        self._recording = None
        return lambda: self._queue.extend(work)

    def synchronize(self) -> None:
        assert self._recording is None, "waiting cannot be part of a recording"
        queue, self._queue = self._queue, []
        for work in queue:
            work()


class LateMirror:
    """A host array beside a tensor."""

    def __init__(self, tensor: DeviceTensor, device: LateDevice):
        self._there, self._device = tensor, device
        self.array = host_array(tensor).copy()

    def push(self) -> None:
        self._device.enqueue(lambda: np.copyto(host_array(self._there), self.array))

    def pull(self) -> None:
        self._device.enqueue(lambda: np.copyto(self.array, host_array(self._there)))


class LateExecutable:
    """A graph whose runs are enqueued."""

    records = True

    def __init__(self, inner: Any, device: LateDevice):
        self._inner, self._device = inner, device

    def bind(self, tensors: Mapping[str, DeviceTensor], *, record: bool = True) -> Call:
        call = self._inner.bind(tensors)
        return lambda: self._device.enqueue(call)


def on_host(runtime: Runtime, sources: Sequence[Any], options: SearchOptions) -> list[list[Hypothesis]]:
    """What a search finds that sees each step."""
    steps = search_steps(runtime, sources, options)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)
