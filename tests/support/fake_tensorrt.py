"""TensorRT over ONNX Runtime: an `engine` is the very graph that the real one is built from.

It is as strict as the documentation of the real one: shapes within the profile, aligned addresses for every tensor, and
past and present at one address. `tensorrt` and `tensorrt_rtx` differ as the real ones do.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx

from tfexport.bundle.reader import Bundle, Engine, open_bundle
from tfexport.bundle.writer import with_engines
from tfexport.contract import Precision, short_name
from tfexport.exporter.engine_graphs import prepare
from tfexport.exporter.engine_plan import LengthPlan
from tfexport.graph_checks.session import session_of
from tfexport.graph_contract import graphs_of

VERSION = "99.1"
TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(float16)": np.float16}


def engine_file(graph: Path, cache: int, profile: Mapping[str, Any]) -> bytes:
    return json.dumps({"graph": str(graph), "cache": cache, "profile": profile}).encode()


def add_engines(
    directory: Path,
    plan: LengthPlan,
    *,
    precision: Precision = "float32",
    library: str = "tensorrt_rtx",
    gpu: str = "sm89",
    version: str = VERSION,
) -> Bundle:
    """Put such engines into a bundle."""
    bundle = open_bundle(directory)
    fitted = plan.fitted(bundle.config, precision)
    graphs = {graph.role: graph for graph in graphs_of(bundle.config, precision)}
    engines = list(bundle.engines)
    with with_engines(bundle, engines) as folder:
        for role, cache in fitted.jobs():
            profile = fitted.profile(graphs[role], bundle.config, cache)
            name = f"{role}.{short_name(precision)}.cache{cache}.{gpu}.{library}.engine"
            (folder / name).write_bytes(engine_file(bundle.graph(role, precision), cache, profile))
            engines.append(
                Engine(
                    file=name,
                    role=role,
                    precision=precision,
                    library=library,  # type: ignore[arg-type]
                    version=version,
                    gpu=gpu,
                    cache=cache,
                    profile=profile,
                    seconds=0.0,
                )
            )
    return open_bundle(directory)


def module(enqueue: Callable[[Callable[[], None]], None], *, rtx: bool) -> Any:
    """A stand-in for `import tensorrt` or `import tensorrt_rtx`, whose work goes to `enqueue`."""
    library = SimpleNamespace(
        __version__=VERSION,
        Logger=SimpleNamespace(ERROR=1),
        TensorIOMode=SimpleNamespace(INPUT="input", OUTPUT="output"),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user"),
        ComputeCapability=SimpleNamespace(SM75=0, SM80=1, SM89=2, SM120=3),
        DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager"),
        contexts=[],
    )
    library.Logger = lambda severity: None
    library.Logger.ERROR = 1  # type: ignore[attr-defined]
    if rtx:
        library.CudaGraphStrategy = SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole")
    library.Runtime = lambda logger: SimpleNamespace(
        deserialize_cuda_engine=lambda content: FakeEngine(json.loads(content), library, enqueue)
    )
    return library


class FakeEngine:
    device_memory_size_v2 = 4096
    aliases = True

    def __init__(self, content: Mapping[str, Any], library: Any, enqueue: Callable[[Callable[[], None]], None]):
        path = Path(content["graph"])
        model = onnx.load(path, load_external_data=False)
        prepare(model, content["profile"], content["cache"])
        self.session = session_of(model, path.parent)
        self.profile, self.library, self.enqueue = content["profile"], library, enqueue
        self.inputs = {node.name: node for node in self.session.get_inputs()}
        self.outputs = {node.name: node for node in self.session.get_outputs()}
        self.names = [*self.inputs, *self.outputs]
        self.num_io_tensors = len(self.names)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name in self.inputs else "output"

    def get_aliased_input_tensor(self, name: str) -> str | None:
        past = name.replace("present.", "past.")
        return past if self.aliases and name in self.outputs and past in self.inputs else None

    def create_runtime_config(self) -> Any:
        assert hasattr(self.library, "CudaGraphStrategy"), "only TensorRT for RTX has this"
        cache = SimpleNamespace(serialize=lambda: b"kernels", deserialize=lambda content: content == b"kernels")
        settings = Settings()
        settings.create_runtime_cache = lambda: cache
        settings.set_runtime_cache = lambda given: setattr(settings, "cache", given)
        settings.set_execution_context_allocation_strategy = lambda given: setattr(settings, "strategy", given)
        return settings

    def create_execution_context(self, given: Any) -> FakeContext:
        if hasattr(self.library, "CudaGraphStrategy"):
            assert (given.strategy, given.cuda_graph_strategy) == ("user", "whole")
            assert given.dynamic_shapes_kernel_specialization_strategy == "eager"
            assert given.cache is not None
        else:
            assert given == "user"
        context = FakeContext(self, given)
        self.library.contexts.append(weakref.ref(context))
        return context


class Settings(SimpleNamespace):
    """An `IRuntimeConfig`."""


class FakeContext:
    def __init__(self, engine: FakeEngine, settings: Any):
        self.engine = engine
        self.settings = weakref.ref(settings) if isinstance(settings, Settings) else lambda: self
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.scratch = 0
        self.runs = 0

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % 256 == 0
        assert size >= self.engine.device_memory_size_v2
        self.scratch = address

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        smallest, _, largest = self.engine.profile[name]
        self.shapes[name] = shape
        return len(shape) == len(largest) and all(
            low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True)
        )

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert name in self.engine.names
        assert address % 256 == 0
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        engine = self.engine
        assert set(self.addresses) == set(engine.names), "a tensor has no address"
        assert set(self.shapes) == set(engine.inputs), "an input has no shape"
        assert self.scratch, "the context has no memory to compute in"
        for name in engine.outputs:
            if past := engine.get_aliased_input_tensor(name):
                assert self.addresses[name] == self.addresses[past], f"{past} is not written in place"
        # What is recorded here computes in the context's memory, but does not keep the context.
        context = weakref.ref(self)
        engine.enqueue(lambda: FakeContext._run(context()))
        return True

    def _run(self: FakeContext | None) -> None:
        assert self is not None, "a context was freed though its recorded graph is still in use"
        assert self.settings() is not None, "the runtime config was freed before its context"
        self.runs += 1
        binding = self.engine.session.io_binding()
        for name, node in self.engine.inputs.items():
            binding.bind_input(name, "cpu", 0, TYPES[node.type], self.shapes[name], self.addresses[name])
        for name, node in self.engine.outputs.items():
            binding.bind_output(name, "cpu", 0, TYPES[node.type], self._shape(name, node.shape), self.addresses[name])
        self.engine.session.run_with_iobinding(binding)

    def _shape(self, name: str, axes: list[int | str]) -> tuple[int, ...]:
        """The shape of an output, by the axes that inputs have too."""
        sizes: dict[Any, int] = {}
        for given, node in self.engine.inputs.items():
            sizes |= dict(zip(node.shape, self.shapes[given], strict=True))
        return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in axes)
