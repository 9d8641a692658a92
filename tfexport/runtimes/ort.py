"""ONNX Runtime over the standard graphs, on the CPU and on NVIDIA GPUs; sessions for the other runtimes."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from tfexport import kernels
from tfexport.bundle.reader import Bundle
from tfexport.contract import SHAPE_NODE, Dialect, Precision, Role
from tfexport.errors import BundleError, RuntimeUnavailable
from tfexport.graph_contract import SEARCH_GRAPHS
from tfexport.runtimes import cuda_provider
from tfexport.runtimes.base import Capacity
from tfexport.runtimes.buckets import CACHE_BLOCK, Buckets, cpu_buckets, cuda_buckets
from tfexport.runtimes.device import ATTEMPTS, Call, Device, DeviceTensor, HostDevice, warn_unrecorded
from tfexport.runtimes.device_search import DeviceSearch
from tfexport.runtimes.loop import LoopRuntime
from tfexport.runtimes.outputs import FloatArray, IntArray
from tfexport.system.imports import import_failure
from tfexport.system.processes import usable_cpus

onnxruntime.disable_telemetry_events()  # ONNX Runtime would send usage data to its makers

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

SWITCH = "TFEXPORT_CUDA_GRAPHS"
RECORDERS = ("tfexport", "onnxruntime", "none")
"""The values of the environment variable `TFEXPORT_CUDA_GRAPHS`: the component that records CUDA graphs. ONNX Runtime has
graphs for each calling thread, so every new thread would record again, and frees them only with the session."""

DISABLED_OPTIMIZERS = ["SkipLayerNormFusion"]
"""Fusions of ONNX Runtime that are slower on its CPU provider: on 128 rows of 256 numbers its SkipLayerNormalization takes
115 microseconds, Add and LayerNormalization 15 together."""

ELEMENT_TYPES: dict[str, Any] = {
    **{name: np.dtype(name).type for name in ("bool", "int32", "int64", "float64", "float32", "float16")},
    "bfloat16": 16,
}
"""The types for ONNX Runtime's bindings: NumPy's, or ONNX's number where NumPy has none."""


def ort_cpu_portable(
    bundle: Bundle,
    *,
    precision: Precision = "float32",
    threads: int | None = None,
    block: int = CACHE_BLOCK,
    fill: float = 0.0,
) -> LoopRuntime:
    """The runtime `ort-cpu` over the standard graphs, with `threads` CPU threads (all that this process may use when None).

    In half precision it rounds after each node. That is for checks, not for speed: see `kernels/explicit_rounding.py`.

    Args:
        block: slots of the smallest cache, and by which it grows.
        fill: the value of slots that no step has written; they are read, with a weight of 0.

    Raises:
        RuntimeUnavailable: half precision needs onnx, which is not installed.
        BundleError: the bundle has no such graphs, or ONNX Runtime cannot load them.
    """
    buckets = cpu_buckets(bundle.config.max_target_length, block)
    graphs = OrtGraphs(bundle, precision, HostDevice(fill), "onnx24", buckets, threads=threads)
    return LoopRuntime("ort-cpu", bundle.config, graphs)


def ort_cuda(bundle: Bundle, *, precision: Precision = "float32", threads: int | None = None) -> LoopRuntime:
    """The runtime `ort-cuda`: ONNX Runtime's CUDA provider, with CUDA graphs over bucketed shapes.

    Raises:
        RuntimeUnavailable: there is no GPU, or the installed onnxruntime has no CUDA provider.
        BundleError: the bundle has no such graphs, or ONNX Runtime cannot load them.
    """
    require_cuda_provider()
    from tfexport.runtimes.cuda import CudaDevice, load_libraries

    load_libraries()
    os.environ.setdefault(*cuda_provider.WITHOUT_XQA)
    _recorder()  # raises if the environment asks for what does not exist
    buckets = cuda_buckets(bundle, precision)
    tf32 = cuda_provider.computes_in_tf32(bundle, precision)
    graphs = OrtGraphs(bundle, precision, CudaDevice(), "ort-cuda", buckets, threads=threads, tf32=tf32, ahead=True)
    return LoopRuntime("ort-cuda", bundle.config, graphs)


def require_cuda_provider() -> None:
    """Raises RuntimeUnavailable where the installed onnxruntime is for the CPU alone."""
    if CUDA not in onnxruntime.get_available_providers():
        raise RuntimeUnavailable(
            "the runtime ort-cuda needs onnxruntime-gpu, but the onnxruntime installed here is for the CPU: "
            "pip uninstall onnxruntime; pip install 'tfexport[cuda]'."
        )


class OrtGraphs:
    """The graphs of a bundle as ONNX Runtime sessions on one device.

    Args:
        ahead: load the graphs that choose tokens on the device, where the bundle has them.
    """

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        device: Device,
        dialect: Dialect,
        buckets: Buckets,
        *,
        threads: int | None = None,
        tf32: bool = False,
        ahead: bool = False,
    ):
        self.device = device
        self.precision = precision
        self.buckets = buckets
        rounding = device.name == "cpu" and precision in ("float16", "bfloat16")

        def loaded(role: Role, dialect: Dialect = "onnx24", **options: Any) -> OrtExecutable:
            graph = bundle.graph(role, precision, dialect)
            with bundle.loading():
                return OrtExecutable(graph, device, threads, **options)

        def load(role: Role) -> OrtExecutable:
            return loaded(role, dialect, rounding=rounding, tf32=tf32)

        self._load = load
        self._step = load("decoder_step")
        self._beam_step: OrtExecutable | None = None
        self._attention_step: OrtExecutable | None = None
        self.position_dtype = self._step.input("position")[0]
        self.flat = len(self._step.input("cross.0.key")[1]) == 3
        self.has_beam_step = bundle.has_graph("beam_step", precision, dialect)
        self.search: DeviceSearch | None = None
        if ahead and all(bundle.has_graph(graph.role, precision, "onnx24") for graph in SEARCH_GRAPHS):
            self.search = DeviceSearch(
                device, loaded, lambda: [self._step, *([self._beam_step] if self._beam_step else [])]
            )
        self.encoder = loaded("encoder", dialect, record=False, rounding=rounding)
        # One node, and as many bindings as there are pairs of buffers: a recording would cost more than it saves.
        self.select_rows = loaded("select_rows", record=False)

    def beam_step(self) -> OrtExecutable:
        if self._beam_step is None:  # loaded at the first search with a beam
            self._beam_step = self._load("beam_step")
        return self._beam_step

    def step(self, cache: int, *, attention: bool = False) -> OrtExecutable:
        if not attention:
            return self._step
        if self.device.name != "cpu":
            raise RuntimeUnavailable(
                "the runtime ort-cuda has no cross-attention weights. Use --runtime ort-cpu, torch or torch-cuda."
            )
        if self._attention_step is None:  # loaded at the first search with attention
            self._attention_step = self._load("decoder_step_attention")
        return self._attention_step


class OrtClassifier:
    """The runtime `ort-cpu` for encoder classifiers.

    Raises:
        RuntimeUnavailable: half precision needs onnx, which is not installed.
        BundleError: the bundle is of another kind or precision, or ONNX Runtime cannot load its graph.
    """

    name = "ort-cpu"

    def __init__(self, bundle: Bundle, *, precision: Precision = "float32", threads: int | None = None):
        self.config, self.capacity = bundle.config, Capacity.of_model(bundle.config)
        self.precision = precision
        graph = bundle.graph("encoder_classifier", precision)
        with bundle.loading():
            self._session = _session(graph, HostDevice(), threads, record=False, rounding=precision != "float32")

    def logits(self, src_ids: IntArray, src_len: IntArray) -> FloatArray:
        (logits,) = self._session.run(["logits"], {"src_ids": src_ids, "src_len": src_len})
        return logits


class OrtExecutable:
    """One session, which can be bound to many sets of tensors.

    Args:
        record: on a GPU, record a CUDA graph for each set. Not worth it if sets are seldom reused.
        rounding: on the CPU, round after each node of a graph in half precision.
        tf32: on a GPU, compute products of float32 in TF32.
    """

    def __init__(
        self,
        graph: Path,
        device: Device,
        threads: int | None = None,
        *,
        record: bool = True,
        rounding: bool = False,
        tf32: bool = False,
    ):
        self._graph, self._device = graph, device
        recorder = _recorder() if record and device.name == "cuda" else "none"
        self._session = _session(graph, device, threads, record=recorder == "onnxruntime", rounding=rounding, tf32=tf32)
        self._inputs = {node.name for node in self._session.get_inputs()}
        self._outputs = {node.name for node in self._session.get_outputs()}
        elsewhere = report_fallbacks(graph, self._session, CUDA if device.name == "cuda" else CPU)
        # A replay would not run nodes of the host again.
        self._record = recorder == "tfexport" and not elsewhere
        self._graph_ids = itertools.count(1) if recorder == "onnxruntime" else itertools.repeat(-1)

    @property
    def records(self) -> bool:
        """Whether its runs may be a part of a recording."""
        return self._record or self._device.name == "cpu"

    def input(self, name: str) -> tuple[str, list[Any]]:
        """The type of an input, as ONNX Runtime names it, and its axes."""
        (node,) = (node for node in self._session.get_inputs() if node.name == name)
        return str(node.type).removeprefix("tensor(").removesuffix(")"), list(node.shape)

    def bind(self, tensors: Mapping[str, DeviceTensor], *, record: bool = True) -> Call:
        binding = self._session.io_binding()
        for name, tensor in tensors.items():
            arguments = (self._device.name, 0, ELEMENT_TYPES[tensor.dtype], tensor.shape, tensor.address)
            # ONNX Runtime does not check names: it would ignore an unknown one.
            if name in self._inputs:
                binding.bind_input(name, *arguments)
            else:
                assert name in self._outputs, name
                binding.bind_output(name, *arguments)
        if self._device.name == "cpu":
            return lambda: self._session.run_with_iobinding(binding)
        if not record:
            return _GpuRun(self._session, binding, -1)
        call = _GpuRun(self._session, binding, next(self._graph_ids))
        return self._recorded(call) if self._record else call

    def _recorded(self, call: Call) -> Call:
        """`call` as a CUDA graph, which any thread may enqueue."""
        for attempt in range(ATTEMPTS):
            call()  # once before recording, so that lazy setup is not recorded; a second run writes the same values
            self._device.synchronize()
            try:
                return self._device.capture(call)
            except Exception as error:  # the library's errors have no common base
                if attempt == ATTEMPTS - 1:
                    warn_unrecorded(self._graph.name, error)
        self._record = False
        return call


class _GpuRun:
    """Enqueues one binding on a GPU; as a CUDA graph that ONNX Runtime records under a number, where that is not -1."""

    def __init__(self, session: onnxruntime.InferenceSession, binding: Any, graph_id: int):
        self._session = session
        self._binding = binding
        self._graph_id = graph_id
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry("gpu_graph_id", str(graph_id))
        # The caller waits for the stream, after the copies that follow.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def __call__(self) -> None:
        self._session.run_with_iobinding(self._binding, self._options)

    def __del__(self) -> None:
        if self._graph_id >= 0:
            self._session.release_captured_graph(self._graph_id)


def _recorder() -> str:
    """The component that records CUDA graphs, one of `RECORDERS`.

    Raises:
        RuntimeUnavailable: the environment asks for another one.
    """
    recorder = os.environ.get(SWITCH) or RECORDERS[0]
    if recorder not in RECORDERS:
        raise RuntimeUnavailable(f"{SWITCH} is {recorder!r}. Set it to one of: {', '.join(RECORDERS)}; or unset it.")
    return recorder


def report_fallbacks(graph: Path, session: onnxruntime.InferenceSession, provider: str) -> list[str]:
    """Log the nodes that run on another provider: each costs copies between GPU and host in every step.

    Returns:
        The names and operators of these nodes.
    """
    nodes = [
        f"{node.name} ({node.op_type})"
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
        # ONNX Runtime computes shapes on the CPU on purpose.
        if part.ep_name != provider and not node.name.startswith(SHAPE_NODE)
    ]
    if nodes:
        logging.getLogger(__name__).warning(
            "warning: %d nodes of %s do not run in %s: %s%s",
            len(nodes),
            graph.name,
            provider,
            ", ".join(nodes[:5]),
            ", ..." if len(nodes) > 5 else "",
        )
    return nodes


Configure = Callable[[onnxruntime.SessionOptions], None]
"""Changes the options of a session before it is created."""


def cpu_session(graph: Path, threads: int | None, configure: Configure | None = None) -> onnxruntime.InferenceSession:
    """A session on the CPU provider, with `threads` threads (all that this process may use when None).

    Raises:
        BundleError: ONNX Runtime cannot load the graph.
    """
    return _session(graph, HostDevice(), threads, record=False, configure=configure)


def _session(
    graph: Path,
    device: Device,
    threads: int | None,
    *,
    record: bool,
    rounding: bool = False,
    tf32: bool = False,
    configure: Configure | None = None,
) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    model = _with_rounding(graph, options) if rounding else graph
    # By default ONNX Runtime uses all cores of the machine, also those that this process may not use.
    options.intra_op_num_threads = threads or usable_cpus()
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if device.name == "cpu":
        kernels.register(options)
    else:
        # With a plan the second run, which is recorded, would allocate otherwise than the first.
        options.enable_mem_pattern = False
    if configure is not None:
        configure(options)
    providers: list[Any] = [CPU]
    if device.name == "cuda":
        providers = [(CUDA, cuda_provider.settings(device.stream, record=record, tf32=tf32)), CPU]
    slower = DISABLED_OPTIMIZERS if device.name == "cpu" else []
    try:
        session = onnxruntime.InferenceSession(model, options, providers=providers, disabled_optimizers=slower)
    except Exception as error:  # the library's errors have no common base
        first = str(error).splitlines()[0]
        if device.name == "cuda" and record:
            # ONNX Runtime refuses to record a graph with a node that does not run on the GPU. Then the graph runs
            # unrecorded, and `report_fallbacks` reports the node.
            warn_unrecorded(graph.name, error)
            return _session(graph, device, threads, record=False, tf32=tf32)
        raise BundleError(f"ONNX Runtime cannot load {graph}: {first} Export again, or upgrade onnxruntime.") from error
    session.disable_fallback()  # or it would change to another provider after a failure
    if device.name == "cuda" and CUDA not in session.get_providers():
        raise RuntimeUnavailable(
            "ONNX Runtime could not start its CUDA provider, which needs the libraries of CUDA 13 and cuDNN 9: "
            "pip install 'onnxruntime-gpu[cuda,cudnn]'."
        )
    return session


def _with_rounding(graph: Path, options: onnxruntime.SessionOptions) -> bytes:
    """A half-precision graph that rounds after each node; `options` get the folder of its weights."""
    try:
        from tfexport.kernels.explicit_rounding import with_explicit_rounding
    except ImportError as error:
        absent = (
            "half precision on the CPU, which is for checks, needs onnx, which is not installed: pip install "
            "'tfexport[export]'. Decode with --precision fp32."
        )
        raise import_failure(error, "onnx", absent) from error
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(graph.parent.resolve())
    )
    return with_explicit_rounding(graph).SerializeToString()  # type: ignore[no-any-return]
