"""The sessions and the memory that all batches of the runtime `ort-cpu` share."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import onnxruntime

from tfexport import kernels
from tfexport.bundle.reader import Bundle
from tfexport.config import ModelConfig
from tfexport.contract import Precision, Role, cache_names
from tfexport.dialects import calls_attention_functions
from tfexport.errors import BundleError
from tfexport.graph_contract import attention_graphs_of, graphs_of
from tfexport.runtimes.ort import cpu_session
from tfexport.runtimes.ort_cpu.buffers import Buffers
from tfexport.runtimes.ort_cpu.shared_weights import shared_session
from tfexport.runtimes.outputs import FloatArray
from tfexport.shortlist_contract import shortlist_graphs_of
from tfexport.system.processes import return_freed_memory


@dataclass(frozen=True)
class CacheLayout:
    """The sizes and the fill value of caches. Results do not depend on them; `verification/invariance.py` checks it."""

    block: int = 16
    """The number of slots by which caches grow."""
    room: int = 16
    """The number of steps for which a new shared cache has room."""
    fill: float = 0.0
    """The value of slots that no step has written. NaN is for the caches of greedy search alone, whose kernel does not read
    them; elsewhere they are read with a weight of 0, and 0 * NaN is NaN."""

    def slots(self, needed: int) -> int:
        """The number of slots of a cache with room for `needed` slots: a multiple of `block`."""
        return -(-needed // self.block) * self.block


DEFAULT_LAYOUT = CacheLayout()


class Context:
    """The bundle, the options and the memory of one runtime. Several threads may use it at once.

    Args:
        threads: CPU threads of each session; all that this process may use when None.
        share_weights: see `shared_weights.py`.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        precision: Precision = "float32",
        threads: int | None = None,
        share_weights: bool = False,
        layout: CacheLayout = DEFAULT_LAYOUT,
    ):
        self.bundle = bundle
        self.config = bundle.config
        self.precision = precision
        self.threads = threads
        self.layout = layout
        self.buffers = Buffers()
        self.attention_is_by_row = kernels.library() is not None and calls_attention_functions(self.config, "beam_step")
        """Whether the last bits of a row's attention do not depend on the other rows. This holds with kernels. ONNX Runtime
        multiplies all rows of a sentence together."""
        self._share_weights = share_weights
        self._sessions: dict[Role, onnxruntime.InferenceSession] = {}
        self._loading = threading.Lock()

    def has_graph(self, role: Role) -> bool:
        return self.bundle.has_graph(role, self.precision, "ort")

    def session(self, role: Role) -> onnxruntime.InferenceSession:
        """The session of a graph. It is loaded at the first call, because a search needs few of the graphs.

        Raises:
            BundleError: the bundle has no such graph, it was replaced, or ONNX Runtime cannot load it.
        """
        with self._loading:
            if role not in self._sessions:
                graph = self.bundle.graph(role, self.precision, "ort")
                with self.bundle.loading():
                    session = (
                        shared_session(self.bundle, graph, self.threads)
                        if self._share_weights
                        else cpu_session(graph, self.threads)
                    )
                _require_contract(session, graph, role, self.config, self.precision)
                self._sessions[role] = session
                return_freed_memory(now=True)  # ONNX Runtime packed the weights in it
            return self._sessions[role]

    def cache_tensor(self, places: int, slots: int, written: FloatArray | None = None) -> FloatArray:
        """A tensor of a cache, [places, heads, slots, head_dim], that begins with the places and slots of `written`."""
        tensor = self.buffers.empty((places, self.config.n_heads, slots, self.config.head_dim))
        if written is None:
            tensor[...] = self.layout.fill
            return tensor
        there, _, filled, _ = written.shape
        tensor[:there, :, :filled] = written
        tensor[:there, :, filled:] = self.layout.fill
        tensor[there:] = self.layout.fill
        return tensor

    def empty_cache(self, places: int, slots: int) -> list[FloatArray]:
        """The tensors of a cache without a written slot, key before value, layer by layer."""
        return [self.cache_tensor(places, slots) for _ in cache_names(self.config, "past")]


_ORT_TYPES = {
    "float32": "tensor(float)",
    "uint8": "tensor(uint8)",
    "int64": "tensor(int64)",
    "int32": "tensor(int32)",
    "bool": "tensor(bool)",
}
"""ONNX Runtime's names of the contract's types."""


def _require_contract(
    session: onnxruntime.InferenceSession, path: Path, role: Role, config: ModelConfig, precision: Precision
) -> None:
    """Raises BundleError where a graph has other inputs or outputs, by name and type, than the contract."""
    known = (
        *graphs_of(config, precision, "ort"),
        *attention_graphs_of(config, precision, "ort"),
        *shortlist_graphs_of(config, precision),
    )
    (graph,) = (graph for graph in known if graph.role == role)
    for tensors, nodes in ((graph.inputs, session.get_inputs()), (graph.outputs, session.get_outputs())):
        if {(tensor.name, _ORT_TYPES[tensor.dtype]) for tensor in tensors} != {
            (node.name, node.type) for node in nodes
        }:
            raise BundleError(
                f"{path} has other inputs or outputs than the contract says. Export the checkpoint again."
            )
