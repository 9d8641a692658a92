"""The `tensorrt` runtime: engines of a bundle, with `tensorrt` or `tensorrt_rtx`, whichever they were built by."""

from __future__ import annotations

import hashlib
import importlib
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tfexport.bundle.reader import PORTABLE, Bundle, Engine
from tfexport.contract import ALIGNMENT, GraphSpec, Precision, Role, aligned_length, short_name
from tfexport.errors import EngineError, RuntimeUnavailable
from tfexport.graph_contract import graphs_of
from tfexport.runtimes.buckets import Buckets
from tfexport.runtimes.device import Call, Device, DeviceTensor, Memory
from tfexport.runtimes.loop import LoopRuntime
from tfexport.runtimes.workspace import HostSearch
from tfexport.system import disk_cache
from tfexport.system.regular_files import read_bytes

LIBRARIES = ("tensorrt", "tensorrt_rtx")
SRC_BLOCK = 32


def tensorrt(bundle: Bundle, *, precision: Precision | None = None) -> LoopRuntime:
    """The runtime `tensorrt` on the engines of a bundle that this machine can run.

    Args:
        precision: that of the engines when None; float16 before others where they have several.

    Raises:
        RuntimeUnavailable: neither library is installed, or there is no GPU.
        EngineError: the bundle has no engines for this GPU, precision and library version.
    """
    libraries = installed_libraries()
    if not libraries:
        raise RuntimeUnavailable(
            "the runtime tensorrt needs tensorrt or tensorrt_rtx, neither of which is installed: pip install "
            "'tfexport[tensorrt-rtx]', or 'tfexport[tensorrt]'."
        )
    from tfexport.runtimes.cuda import CudaDevice

    device = CudaDevice()
    engines = usable_engines(bundle, precision, libraries, device.gpu.generation)
    graphs = TensorRtGraphs(bundle, engines, libraries[engines[0].library], device)
    return LoopRuntime("tensorrt", bundle.config, graphs)


def installed_libraries() -> dict[str, Any]:
    """The modules of `LIBRARIES` that can be imported, by name."""
    installed = {}
    for name in LIBRARIES:
        with suppress(ImportError):
            installed[name] = importlib.import_module(name)
    return installed


def usable_engines(
    bundle: Bundle, precision: Precision | None, libraries: Mapping[str, Any], generation: str
) -> list[Engine]:
    """The engines of one precision, GPU generation and library that run here. Engines for this generation precede portable
    ones.

    Args:
        libraries: the installed ones, by name.
        generation: of the GPU here, such as `sm89`.

    Raises:
        EngineError: there are none. The message says what the bundle's engines were built for, and how to build others.
    """
    wanted = [engine for engine in bundle.engines if precision in (None, engine.precision)]
    rebuild = f"tfexport build {bundle.directory} --gpu {generation}" + (
        f" --precision {short_name(precision)}" if precision else ""
    )
    if not wanted:
        has = ", ".join(sorted({short_name(engine.precision) for engine in bundle.engines}))
        kind = f"{short_name(precision)} engines, only {has}" if has and precision else "engines"
        raise EngineError(f"{bundle.directory} has no TensorRT {kind}. Build them: {rebuild}.")
    of_gpu = [
        engine
        for engine in wanted
        if engine.gpu == generation
        or (engine.gpu == PORTABLE and runs_portable_engines(libraries.get(engine.library), generation))
    ]
    if not of_gpu:
        built = ", ".join(sorted({engine.gpu for engine in wanted}))
        raise EngineError(
            f"the engines in {bundle.directory} are for {built}, this GPU is {generation}. Rebuild: {rebuild}."
        )
    versions = {name: library.__version__ for name, library in libraries.items()}
    usable = [engine for engine in of_gpu if versions.get(engine.library) == engine.version]
    if not usable:
        built = ", ".join(sorted({f"{engine.library} {engine.version}" for engine in of_gpu}))
        here = ", ".join(f"{name} {version}" for name, version in versions.items())
        raise EngineError(
            f"the engines in {bundle.directory} were built by {built}, installed is {here}. Install that version, or "
            f"rebuild: {rebuild}."
        )
    order = ("float16", "bfloat16", "float32")
    known = [engine for engine in usable if engine.precision in order]
    if not known:
        raise EngineError(
            f"the manifest of {bundle.directory} has engines of no known precision. Build again: {rebuild}."
        )
    best = min(known, key=lambda engine: (order.index(engine.precision), engine.gpu == PORTABLE))
    same = ("precision", "gpu", "library")
    return [engine for engine in usable if all(getattr(engine, field) == getattr(best, field) for field in same)]


def runs_portable_engines(library: Any, generation: str) -> bool:
    """Whether portable engines run on a GPU generation: TensorRT for RTX must know it, from Ampere (`sm80`) on."""
    if library is None:  # not installed; the error about versions follows
        return True
    known = getattr(library, "ComputeCapability", None)
    return hasattr(known, generation.upper()) and generation != "sm75"


class TensorRtGraphs(HostSearch):
    """The engines of a bundle on one device.

    Raises:
        EngineError: a role is missing, or an engine cannot be loaded or would not write the cache in place.
    """

    def __init__(self, bundle: Bundle, engines: Sequence[Engine], library: Any, device: Device):
        self.device = device
        self.precision: Precision = engines[0].precision
        graphs = {graph.role: graph for graph in graphs_of(bundle.config, self.precision)}
        _check_profiles(bundle, engines, graphs)
        self._runtime = library.Runtime(library.Logger(library.Logger.ERROR))
        with bundle.loading():
            loaded = {
                (e.role, e.cache): TensorRtExecutable(
                    bundle.engine(e), e, graphs[e.role], library, self._runtime, device
                )
                for e in engines
            }
        # All contexts share it, because they run one after the other on one stream. By default each would have its own.
        scratch = device.allocate(max(executable.scratch for executable in loaded.values()))
        for executable in loaded.values():
            executable.use_scratch(scratch)
        missing = [role for role in ("encoder", "select_rows") if (role, 0) not in loaded]
        self._steps = {cache: executable for (role, cache), executable in loaded.items() if role == "decoder_step"}
        if missing or not self._steps:
            lost = ", ".join(missing or ["decoder_step"])
            raise EngineError(
                f"{bundle.directory} has no {lost} engine. Build again: tfexport build {bundle.directory}."
            )
        self.encoder, self.select_rows = loaded["encoder", 0], loaded["select_rows", 0]
        self.buckets = buckets_of(bundle, engines)

    def step(self, cache: int, *, attention: bool = False) -> TensorRtExecutable:
        if attention:
            raise RuntimeUnavailable(
                "the runtime tensorrt has no cross-attention weights, because engines are built of the plain steps. Use "
                "--runtime ort-cpu, torch or torch-cuda."
            )
        return self._steps[cache]


def _check_profiles(bundle: Bundle, engines: Sequence[Engine], graphs: Mapping[Role, GraphSpec]) -> None:
    for engine in engines:
        inputs = graphs[engine.role].inputs if engine.role in graphs else ()
        axes = {tensor.name: len(tensor.axes) for tensor in inputs}
        profiled = {
            name: {len(shape) for shape in shapes} for name, shapes in engine.profile.items() if len(shapes) == 3
        }
        if not axes or profiled != {name: {count} for name, count in axes.items()}:
            raise EngineError(
                f"the manifest of {bundle.directory} does not say what {engine.file} was built for. Build again: "
                f"tfexport build {bundle.directory}."
            )


def buckets_of(bundle: Bundle, engines: Sequence[Engine]) -> Buckets:
    """The sizes that `engines` were built for."""
    encoder = next(engine for engine in engines if engine.role == "encoder")
    steps = [engine for engine in engines if engine.role == "decoder_step"]
    most_batch, most_src = encoder.profile["src_ids"][2]
    block = max(SRC_BLOCK, aligned_length(bundle.config.d_attention, encoder.precision))
    batch = [2**power for power in range(most_batch.bit_length()) if 2**power < most_batch]
    return Buckets(
        tuple(sorted(engine.cache for engine in steps)),
        (*batch, most_batch),
        (*range(block, most_src, block), most_src),
        rows=min(engine.profile["tokens"][2][0] for engine in steps),
        remedy=f"Build for larger sizes: tfexport build {bundle.directory} with --max-batch, --max-beam, --max-source, "
        "--cache; or ask for less.",
    )


class TensorRtExecutable:
    """One engine. Each set of tensors that it is bound to has its own execution context, recorded as a CUDA graph.

    Raises:
        EngineError: it cannot be loaded, or would not write the caches of `graph` in place.
    """

    def __init__(self, path: Path, engine: Engine, graph: GraphSpec, library: Any, runtime: Any, device: Device):
        self._trt, self._device = library, device
        content = read_bytes(path)
        self._engine = runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise EngineError(
                f"TensorRT cannot load {path.name}, built by {engine.library} {engine.version} for {engine.gpu}. Build "
                f"again: tfexport build {path.parent}."
            )
        self._inputs = [name for name in self._names() if self._is_input(name)]
        for past, present in graph.caches.items():
            if self._engine.get_aliased_input_tensor(present) != past:
                raise EngineError(
                    f"{path.name} does not write {past} in place. Build again: tfexport build {path.parent}."
                )
        self._is_rtx = hasattr(library, "CudaGraphStrategy")
        if self._is_rtx:
            self._settings = self._runtime_settings(f"kernels-{hashlib.sha256(content).hexdigest()[:16]}")

    def _names(self) -> list[str]:
        return [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]

    def _is_input(self, name: str) -> bool:
        return bool(self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT)

    def bind(self, tensors: Mapping[str, DeviceTensor], *, record: bool = True) -> Call:
        context = self._context()
        for name, tensor in tensors.items():
            assert tensor.address % ALIGNMENT == 0, f"{name} is not aligned"
            if name in self._inputs and not context.set_input_shape(name, tensor.shape):
                raise EngineError(f"{name} of shape {list(tensor.shape)} is not in the engine's profile. Build again.")
            if not context.set_tensor_address(name, tensor.address):
                raise EngineError(f"TensorRT takes no {name}. Build again, or decode with ort-cuda.")

        def enqueue() -> None:
            if not context.execute_async_v3(self._device.stream):
                raise EngineError("TensorRT failed to run an engine. Run again with --debug, or decode with ort-cuda.")

        enqueue()  # once before recording, so that lazy setup and compilation are not recorded
        self._device.synchronize()
        # TensorRT for RTX records by itself. Running twice writes the same values to the same places.
        return enqueue if self._is_rtx else self._device.capture(enqueue)

    @property
    def scratch(self) -> int:
        """Bytes that a run needs for intermediate results."""
        return int(self._engine.device_memory_size_v2)

    def use_scratch(self, scratch: Memory) -> None:
        """Use this memory for intermediate results."""
        self._scratch = scratch

    def _runtime_settings(self, name: str) -> Any:
        """The settings of TensorRT for RTX for this engine. The kernels that it compiles are cached in the file `name`."""
        trt = self._trt
        settings = self._engine.create_runtime_config()
        settings.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        settings.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        # By default kernels for a shape are compiled in the background, and change during a run.
        strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        settings.dynamic_shapes_kernel_specialization_strategy = strategy
        self._compiled = settings.create_runtime_cache()
        before = disk_cache.load(name)
        if before:
            self._compiled.deserialize(before)  # it ignores what it cannot use
        settings.set_runtime_cache(self._compiled)
        weakref.finalize(self, _keep_kernels, name, self._compiled)
        return settings

    def _context(self) -> Any:
        if self._is_rtx:
            return self._in_scratch(self._engine.create_execution_context(self._settings))
        managed = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        return self._in_scratch(self._engine.create_execution_context(managed))

    def _in_scratch(self, context: Any) -> Any:
        if context is None:
            raise EngineError("TensorRT cannot prepare an engine for running. Run again with --debug to see why.")
        context.set_device_memory(self._scratch.address, self._scratch.nbytes)
        return context


def _keep_kernels(name: str, compiled: Any) -> None:
    disk_cache.keep(name, memoryview(compiled.serialize()))
