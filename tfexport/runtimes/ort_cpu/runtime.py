"""ONNX Runtime on the CPU over the dialect `ort`. A runtime may be used by several threads at once: all that changes is in
the states (`runtimes/ort_cpu/states.py`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from tfexport import kernels
from tfexport.bundle.reader import Bundle
from tfexport.config import ModelConfig
from tfexport.contract import ATTENTION_ROLES, Precision, Role, attention_graphs_of, graphs_of
from tfexport.errors import BundleError, RuntimeUnavailable
from tfexport.runtimes.base import (
    Argmax,
    BaseRuntime,
    Best,
    Capabilities,
    Capacity,
    FloatArray,
    IntArray,
    Needs,
    Runtime,
)
from tfexport.runtimes.ort import cpu_session, ort_cpu_portable
from tfexport.runtimes.ort_cpu.bound_graphs import Binding
from tfexport.runtimes.ort_cpu.buffers import Buffers
from tfexport.runtimes.ort_cpu.shared_weights import PRECISIONS, shared_session
from tfexport.runtimes.ort_cpu.states import BeamState, CacheLayout, GreedyState
from tfexport.shortlist_contract import shortlist_graphs_of
from tfexport.system.processes import return_freed_memory

DEFAULT_LAYOUT = CacheLayout()


def ort_cpu(
    bundle: Bundle,
    *,
    precision: Precision = "float32",
    threads: int | None = None,
    share_weights: bool = False,
    shortlist: bool = False,
    layout: CacheLayout = DEFAULT_LAYOUT,
) -> Runtime[Any]:
    """The runtime `ort-cpu`, over the dialect that the bundle has for it, with `threads` CPU threads (all when None).

    Args:
        share_weights: with other processes, as `runtimes/ort_cpu/shared_weights.py` says.
        shortlist: for searches with shortlists, by graphs for them where the bundle has such graphs.

    Raises:
        RuntimeUnavailable: half precision needs onnx, which is not installed; or weights cannot be shared in this dialect,
            or on this system.
        BundleError: the bundle has no such graphs, or ONNX Runtime cannot load them.
    """
    own_dialect = bundle.dialect("ort-cpu", precision) == "ort"
    if share_weights and not (own_dialect and precision in PRECISIONS):
        raise RuntimeUnavailable(
            "this bundle's graphs of this precision cannot share weights. Leave --share-weights out, or use --precision "
            "fp32 or int8 on a bundle exported by this version."
        )
    if own_dialect and shortlist and bundle.has_graph("shortlist", precision, "ort"):
        from tfexport.runtimes.ort_cpu.shortlist import ShortlistRuntime

        return ShortlistRuntime(
            bundle, precision=precision, threads=threads, share_weights=share_weights, layout=layout
        )
    if own_dialect:
        return OrtCpuRuntime(bundle, precision=precision, threads=threads, share_weights=share_weights, layout=layout)
    return ort_cpu_portable(bundle, precision=precision, threads=threads, block=layout.block, fill=layout.fill)


PIECE = 512
"""Source ids that are encoded at once, padding included: ONNX Runtime keeps the memory of its largest run, and no product
is faster with more rows than these."""


class State(Protocol):
    """What `OrtCpuRuntime` asks of the states of both searches."""

    def best(self, tokens: IntArray, count: int) -> Best: ...

    def step(self, tokens: IntArray) -> FloatArray: ...


class OrtCpuRuntime(BaseRuntime):
    """The runtime `ort-cpu` for bundles with graphs in the dialect `ort`."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        precision: Precision = "float32",
        threads: int | None = None,
        share_weights: bool = False,
        layout: CacheLayout = DEFAULT_LAYOUT,
    ):
        self._bundle, self._precision, self._threads, self.layout = bundle, precision, threads, layout
        self._share_weights, self.buffers = share_weights, Buffers()
        self._sessions: dict[Role, onnxruntime.InferenceSession] = {}
        self._loading = threading.Lock()
        self._greedy: Literal["decoder_step", "beam_step"]
        self._greedy = "decoder_step" if bundle.has_graph("decoder_step", precision, "ort") else "beam_step"
        kernels.note_if_missing()
        # Without them products of attention are of all rows of a sentence, and those of one row have other last bits.
        self.attends_by_row = kernels.library() is not None and kernels.take_attention(self.config)
        self._has_argmax = self._greedy == "decoder_step" and bundle.has_graph("greedy_step", precision, "ort")
        self.session("encoder")

    @property
    def name(self) -> str:
        return "ort-cpu"

    @property
    def config(self) -> ModelConfig:
        return self._bundle.config

    @property
    def precision(self) -> Precision:
        return self._precision

    @property
    def capacity(self) -> Capacity:
        return Capacity.of_model(self.config)

    @property
    def capabilities(self) -> Capabilities:
        # Sessions of one thread start no threads, which a fork would lack.
        return Capabilities(argmax=self._has_argmax, fork=self._threads == 1)

    def session(self, role: Role) -> onnxruntime.InferenceSession:
        """The session of a graph, loaded when it is first asked for: a search needs one of the two steps."""
        with self._loading:
            if role not in self._sessions:
                graph = self._bundle.graph(role, self._precision, "ort")
                session = (
                    shared_session(self._bundle, graph, self._threads)
                    if self._share_weights
                    else cpu_session(graph, self._threads)
                )
                require_contract(session, graph, role, self.config, self._precision)
                self._bundle.require_same()  # it may be long since the others were loaded
                self._sessions[role] = session
                return_freed_memory(now=True)  # what ONNX Runtime ordered the weights in
            return self._sessions[role]

    def prepare(self, needs: Needs) -> None:
        self.session("encoder")
        step = self.step_role(needs.width)
        if needs.best_only and self._has_argmax:
            self.session("greedy_step")
        else:
            self.session(ATTENTION_ROLES[step] if needs.attention else step)

    def step_role(self, beam: int) -> Literal["decoder_step", "beam_step"]:
        """The graph that searches with this beam run, without what more they ask of it."""
        return self._greedy if beam == 1 else "beam_step"

    def encode(
        self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False
    ) -> GreedyState | BeamState:
        cross, lengths = self.encoded(src_ids, src_len)
        if self.step_role(beam) == "decoder_step":
            return GreedyState(self, cross, lengths, attention=attention)
        return BeamState(self, cross, lengths, beam, attention=attention)

    def encoded(self, src_ids: IntArray, src_len: IntArray) -> tuple[list[FloatArray], NDArray[np.int32]]:
        """The keys and values of sentences, each [batch, heads, src, head_dim], and their lengths [batch]."""
        batch, src = src_ids.shape
        ids = np.ascontiguousarray(src_ids, dtype=np.int64)
        lengths = np.ascontiguousarray(src_len, dtype=np.int32)
        config = self.config
        shape = (2 * config.n_decoder_layers, batch, config.n_heads, src, config.head_dim)
        cross = self.buffers.empty(shape)
        rows = max(1, PIECE // src)
        if rows >= batch:
            self._encode(ids, lengths, cross)
        else:
            for start in range(0, batch, rows):
                piece = slice(start, start + rows)
                part = self.buffers.empty(cross[:, piece].shape)
                self._encode(ids[piece], lengths[piece], part)
                cross[:, piece] = part
        return list(cross), lengths

    def _encode(self, src_ids: IntArray, src_len: NDArray[np.int32], cross: FloatArray) -> None:
        """Write the keys and values of sentences into `cross` [keys_values, batch, heads, src, head_dim]."""
        binding = Binding(self.session("encoder"))
        binding.input("src_ids", src_ids)
        binding.input("src_len", src_len)
        binding.output("cross", cross)
        binding.run()

    def step(self, state: Any, tokens: IntArray) -> tuple[FloatArray, Any]:
        return state.step(tokens), state

    def argmax(self, state: Any, tokens: IntArray, banned: Sequence[int]) -> tuple[Argmax, Any]:
        return state.argmax(tokens, banned), state

    def best(self, state: Any, tokens: IntArray, count: int) -> tuple[Best, Any]:
        return state.best(tokens, min(count, self.config.tgt_vocab_size)), state


TYPES = {
    "float32": "tensor(float)",
    "uint8": "tensor(uint8)",
    "int64": "tensor(int64)",
    "int32": "tensor(int32)",
    "bool": "tensor(bool)",
}


def require_contract(
    session: onnxruntime.InferenceSession, path: Path, role: Role, config: ModelConfig, precision: Precision
) -> None:
    """Raises BundleError where a graph has not the inputs and outputs, by name and type, that it is to be bound to."""
    known = (
        *graphs_of(config, precision, "ort"),
        *attention_graphs_of(config, precision, "ort"),
        *shortlist_graphs_of(config, precision),
    )
    (graph,) = (graph for graph in known if graph.role == role)
    for wanted, found in ((graph.inputs, session.get_inputs()), (graph.outputs, session.get_outputs())):
        if {(tensor.name, TYPES[tensor.dtype]) for tensor in wanted} != {(node.name, node.type) for node in found}:
            raise BundleError(
                f"{path} has other inputs or outputs than the contract says. Export the checkpoint again."
            )
