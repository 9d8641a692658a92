"""ONNX graphs to TensorRT engines, with `tensorrt` on the GPU itself or ahead of time with `tensorrt_rtx`.

TensorRT for RTX builds for a named GPU generation on any machine, also one without a GPU. Full TensorRT times its kernels
on the GPU that it builds for. In both, the graph determines all precisions (strongly typed networks).

Graphs that TensorRT would silently compute wrongly are rejected before the build (`refuse_traps`, `check_network`). Graphs
that it cannot build as they are in the bundle are converted (`engine_graphs`).
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx

from tfexport import contract, graph_contract
from tfexport.bundle.reader import PORTABLE, Bundle, Engine, Library, open_bundle
from tfexport.bundle.writer import with_engines
from tfexport.contract import GraphSpec, Precision
from tfexport.errors import EngineError
from tfexport.exporter.engine_graphs import prepare
from tfexport.exporter.engine_plan import LengthPlan, Profile
from tfexport.system import disk_cache
from tfexport.system.gpu import find_gpu
from tfexport.system.imports import import_failure

HERE = "here"
"""Name for the GPU of the machine that builds."""


def build_engines(
    directory: Path,
    plan: LengthPlan,
    *,
    precisions: Sequence[Precision],
    gpus: Sequence[str],
    library: Library,
    built: Callable[[Engine, int], None],
) -> list[Engine]:
    """Build engines for a bundle and add them to it. Its engines for other GPUs and precisions stay.

    Args:
        gpus: generations such as `sm89` or `portable` with `tensorrt_rtx`; `here` with both libraries.
        built: called with each engine and its size in bytes as soon as it is built.

    Returns:
        The new engines.

    Raises:
        BundleError: the bundle has no graphs of a precision, or cannot be written.
        EngineError: TensorRT rejects a graph, or would not compute what the graph defines.
        RuntimeUnavailable: the library is not installed.
    """
    bundle = open_bundle(directory)
    for precision in precisions:
        bundle.graph("decoder_step", precision)
    builder = Builder(library)
    new: list[Engine] = []
    engines: list[Engine] = []
    with with_engines(bundle, engines) as folder:
        for gpu in dict.fromkeys(builder.generation(gpu) for gpu in gpus):
            for precision in precisions:
                for engine, content in _variant(builder, bundle, plan, precision, gpu):
                    path = folder / engine.file
                    path.write_bytes(content)
                    new.append(engine)
                    built(engine, len(content))
        variants = {(engine.precision, engine.gpu, engine.library) for engine in new}
        engines += [e for e in bundle.engines if (e.precision, e.gpu, e.library) not in variants] + new
    return new


def _variant(
    builder: Builder, bundle: Bundle, plan: LengthPlan, precision: Precision, gpu: str
) -> Iterator[tuple[Engine, memoryview]]:
    """Build the engines of one precision for one GPU generation, one after the other."""
    fitted = plan.fitted(bundle.config, precision)
    graphs = {graph.role: graph for graph in graph_contract.graphs_of(bundle.config, precision)}
    for role, cache in fitted.jobs():
        profile = fitted.profile(graphs[role], bundle.config, cache)
        started = time.monotonic()
        workspace = fitted.workspace(bundle.config)
        content = builder.build(bundle.graph(role, precision), graphs[role], profile, cache, gpu, workspace)
        variant = [contract.short_name(precision), *([f"cache{cache}"] if cache else []), gpu, builder.library]
        engine = Engine(
            file=".".join([role, *variant, "engine"]),
            role=role,
            precision=precision,
            library=builder.library,
            version=builder.trt.__version__,
            gpu=gpu,
            cache=cache,
            profile=profile,
            seconds=round(time.monotonic() - started, 2),
        )
        yield engine, content


WITHOUT_FLOAT32_PRODUCTS = ("sm75",)
"""Generations that TensorRT for RTX names, but cannot build float32 matrix products for. Every decoder step needs them."""


def refuse_elsewhere(library: Library, gpu: str) -> None:
    """Raise EngineError if full TensorRT is requested for a GPU other than that of this machine."""
    if library == "tensorrt" and gpu != HERE:
        raise EngineError(
            f"full TensorRT builds on the GPU itself, not ahead of time for {gpu}. Use --gpu here, or --library "
            "tensorrt_rtx."
        )


class Builder:
    """One of the two libraries, ready to build.

    Raises:
        RuntimeUnavailable: the library is not installed.
        EngineError: the library is too old for the operators of the graphs.
    """

    def __init__(self, library: Library):
        self.library = library
        try:
            self.trt: Any = importlib.import_module(library)
        except ImportError as error:
            absent = (
                f"building engines needs {library}, which is not installed: pip install "
                f"'tfexport[{library.replace('_', '-')}]'."
            )
            raise import_failure(error, library, absent) from error
        if not hasattr(self.trt, "IKVCacheUpdateLayer"):
            raise EngineError(f"{library} {self.trt.__version__} has no TensorScatter. Upgrade it.")
        self._messages: list[str] = []
        self._logger = _logger(self.trt, self._messages)
        self._builder = self.trt.Builder(self._logger)

    def generation(self, gpu: str) -> str:
        """The name of `gpu` in the manifest.

        Raises:
            EngineError: this library cannot build for the GPU.
        """
        refuse_elsewhere(self.library, gpu)
        gpu = find_gpu().generation if gpu == HERE else gpu
        if self.library == "tensorrt":
            return gpu
        names = [name.lower() for name in self.trt.ComputeCapability.__members__ if name.startswith("SM")]
        known = [name for name in names if name not in WITHOUT_FLOAT32_PRODUCTS]
        if gpu not in (*known, PORTABLE):
            raise EngineError(
                f"TensorRT for RTX {self.trt.__version__} does not build for {gpu}. It knows {', '.join(known)} and "
                f"{PORTABLE}; for another GPU build on it with full TensorRT, --library tensorrt --gpu here."
            )
        return gpu

    def build(self, path: Path, graph: GraphSpec, profile: Profile, cache: int, gpu: str, workspace: int) -> memoryview:
        """Build the graph at `path`; returns the serialised engine. Its workspace has at most `workspace` bytes.

        Raises:
            EngineError: TensorRT rejects the graph, or would compute something else.
        """
        model = onnx.load(path, load_external_data=False)
        prepare(model, profile, cache)
        refuse_traps(model, graph)
        network = self.parse(model, path)
        check_network(self.trt, network, graph, profile)
        settings = self._settings(gpu, workspace)
        shapes = self._builder.create_optimization_profile()
        for name, sizes in profile.items():
            shapes.set_shape(name, *sizes)
        settings.add_optimization_profile(shapes)
        if self.library == "tensorrt":  # TensorRT for RTX times nothing when it builds
            self._use_timings(settings)
        engine = self._builder.build_serialized_network(network, settings)
        if engine is None:
            raise EngineError(f"TensorRT cannot build {path.name} for {gpu}: {self._complaints()}")
        if self.library == "tensorrt" and (timings := settings.get_timing_cache()) is not None:
            disk_cache.keep(self._timings, memoryview(timings.serialize()))
        return memoryview(engine)

    @property
    def _timings(self) -> str:
        """Name of the file of kernel timings, which are valid for one version on one GPU."""
        return f"timings-{self.trt.__version__}-{re.sub(r'[^A-Za-z0-9]+', '-', find_gpu().name)}"

    def _use_timings(self, settings: Any) -> None:
        for content in (disk_cache.load(self._timings), b""):  # empty if TensorRT rejects the earlier timings
            timings = settings.create_timing_cache(content)
            if timings is not None and settings.set_timing_cache(timings, ignore_mismatch=False):
                return

    def parse(self, model: onnx.ModelProto, path: Path) -> Any:
        """Parse `model` into a TensorRT network whose attention layers may be decomposed. The weights are next to `path`.

        Raises:
            EngineError: the parser rejects the model.
        """
        trt = self.trt
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = self._builder.create_network(flags)
        parser = trt.OnnxParser(network, self._logger)
        self._messages.clear()
        if not parser.parse(model.SerializeToString(), str(path)):
            errors = [parser.get_error(index) for index in range(parser.num_errors)]
            problems = [f"{error.node_name()} ({error.node_operator()}): {error.desc()}" for error in errors]
            raise EngineError(f"TensorRT cannot read {path.name}: {'; '.join(problems)}. {_UPGRADE}")
        # No fused kernel supports float32 with several queries, and other runtimes would not load the ONNX attribute.
        for attention in attentions(trt, network):
            attention.decomposable = True
        return network

    def _settings(self, gpu: str, workspace: int) -> Any:
        trt = self.trt
        settings = self._builder.create_builder_config()
        settings.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
        settings.clear_flag(trt.BuilderFlag.TF32)  # it would round float32 factors to 10 bits
        if self.library == "tensorrt_rtx" and gpu != PORTABLE:
            settings.num_compute_capabilities = 1
            settings.set_compute_capability(getattr(trt.ComputeCapability, gpu.upper()), 0)
        return settings

    def _complaints(self) -> str:
        return f"{'; '.join(self._messages) or 'it gives no reason'}. {_UPGRADE}"


_UPGRADE = "Upgrade the library, or decode with ort-cuda."


def refuse_traps(model: onnx.ModelProto, graph: GraphSpec) -> None:
    """Reject graphs that TensorRT would silently compute differently.

    Raises:
        EngineError: an attention has no mask or keeps its own cache; or the
            cache of `graph` is not written in place, from an input of fixed length directly to an output.
    """
    for node in model.graph.node:
        if node.op_type == "Attention":
            places = [index for index, name in enumerate(node.input) if name]
            if 3 not in places:
                raise EngineError(f"{node.name} has no mask: it would attend to padding. Build from the onnx24 graph.")
            if {4, 5} & set(places) or len(node.output) > 1:
                raise EngineError(
                    f"{node.name} keeps its own cache, which TensorRT rejects. Build from the onnx24 graph."
                )
    fixed = {value.name: _is_fixed(value, axis=2) for value in model.graph.input}
    for past, present in graph.caches.items():
        readers = [node for node in model.graph.node if past in node.input]
        writers = [node for node in readers if node.op_type == "TensorScatter" and node.input[0] == past]
        is_aliased = len(writers) == 1 and list(writers[0].output) == [present] and _axis(writers[0]) in (-2, 2)
        if not is_aliased or any(node.op_type not in ("TensorScatter", "Shape") for node in readers):
            raise EngineError(
                f"{past} is not written in place: TensorRT needs one TensorScatter on axis -2 from it to {present}, and "
                "no other node may read it. Build from the onnx24 graph."
            )
        if not fixed[past]:
            raise EngineError(
                f"{past} has no fixed length, which TensorRT needs for a cache. Freeze it before building."
            )


def _is_fixed(value: onnx.ValueInfoProto, axis: int) -> bool:
    dims = value.type.tensor_type.shape.dim
    return len(dims) > axis and dims[axis].dim_value > 0


def _axis(node: onnx.NodeProto) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), -2)


def attentions(trt: Any, network: Any) -> Iterator[Any]:
    """The `IAttention` of each attention in a network."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_OUTPUT:
            layer.__class__ = trt.IAttentionOutputLayer
            yield layer.attention


def check_network(trt: Any, network: Any, graph: GraphSpec, profile: Profile) -> None:
    """Compare the parsed network of a graph with the contract.

    Raises:
        EngineError: an attention lost its mask or may not be decomposed; a cache is not updated in place; a tensor has
            another name or type; or the profile leaves an axis open.
    """
    for attention in attentions(trt, network):
        if attention.mask is None:
            raise EngineError(f"TensorRT dropped the mask of an attention in {graph.file}. {_UPGRADE}")
        if not attention.decomposable:
            raise EngineError(f"an attention in {graph.file} may not be decomposed, and float32 has no other kernel.")
    updates = sum(network.get_layer(i).type == trt.LayerType.KV_CACHE_UPDATE for i in range(network.num_layers))
    if updates != len(graph.caches):
        raise EngineError(
            f"TensorRT updates {updates} of the {len(graph.caches)} caches of {graph.file} in place. {_UPGRADE}"
        )
    sides = (
        ("input", [network.get_input(i) for i in range(network.num_inputs)], graph.inputs),
        ("output", [network.get_output(i) for i in range(network.num_outputs)], graph.outputs),
    )
    types = {"int64": trt.int64, "float32": trt.float32, "float16": trt.float16, "bfloat16": trt.bfloat16}
    for side, tensors, wanted in sides:
        got = {tensor.name: tensor.dtype for tensor in tensors}
        if got != {tensor.name: types[tensor.dtype] for tensor in wanted}:
            raise EngineError(f"TensorRT reads other {side}s in {graph.file} than the contract has: {got}. {_UPGRADE}")
    for tensor in sides[0][1]:
        _check_profile(tensor.name, list(tensor.shape), profile)


def _check_profile(name: str, shape: list[int], profile: Profile) -> None:
    if name not in profile:
        raise EngineError(f"the profile has no shapes for {name} {shape}. Give its smallest, usual and largest.")
    smallest, usual, largest = profile[name]
    for axis, size in enumerate(shape):
        sizes = [shape[axis] if axis < len(shape) else 0 for shape in (smallest, usual, largest)]
        fits = sizes == sorted(sizes) and sizes[0] > 0 if size == -1 else sizes == [size] * 3
        if not fits or not len(smallest) == len(usual) == len(largest) == len(shape):
            raise EngineError(
                f"the profile's shapes {profile[name]} do not fit {name} {shape}. Correct its smallest, usual and largest."
            )


def _logger(trt: Any, messages: list[str]) -> Any:
    """A logger that collects errors for the message of an exception, and drops other messages."""

    class Collector(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                messages.append(" ".join(text.split()))

    return Collector()
