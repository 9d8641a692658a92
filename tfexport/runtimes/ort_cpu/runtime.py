"""ONNX Runtime on the CPU over the dialect `ort`.

Several threads may use a runtime at once: only the states change (`greedy_state.py`, `beam_state.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tfexport import kernels
from tfexport.bundle.reader import Bundle
from tfexport.config import ModelConfig
from tfexport.contract import ATTENTION_ROLES, Precision
from tfexport.runtimes.base import Ahead, BaseRuntime, Capabilities, Capacity, Needs
from tfexport.runtimes.ort_cpu import native_beams
from tfexport.runtimes.ort_cpu.beam_state import BeamState
from tfexport.runtimes.ort_cpu.bound_graphs import BatchShortlist, Binding
from tfexport.runtimes.ort_cpu.context import DEFAULT_LAYOUT, CacheLayout, Context
from tfexport.runtimes.ort_cpu.greedy_state import GreedyState
from tfexport.runtimes.outputs import (
    Argmax,
    Best,
    BestRequest,
    Continuations,
    FloatArray,
    IntArray,
    StepOutput,
    StepRequest,
)

ENCODED_AT_ONCE = 512
"""The largest number of source ids in a run of the encoder, with padding, unless a source is longer. ONNX Runtime keeps the
memory of its largest run, and products are not faster with more rows."""


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
        self.context = Context(bundle, precision=precision, threads=threads, share_weights=share_weights, layout=layout)
        self._greedy: Literal["decoder_step", "beam_step"]
        kernels.note_if_missing()
        self._greedy = "decoder_step" if self.context.has_graph("decoder_step") else "beam_step"
        self._has_argmax = self._greedy == "decoder_step" and self.context.has_graph("greedy_step")
        self.context.session("encoder")

    @property
    def name(self) -> str:
        return "ort-cpu"

    @property
    def config(self) -> ModelConfig:
        return self.context.config

    @property
    def precision(self) -> Precision:
        return self.context.precision

    @property
    def capacity(self) -> Capacity:
        return Capacity.of_model(self.config)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            argmax=self._has_argmax,
            greedy_ahead=self._greedy == "decoder_step",
            beam_ahead=native_beams.available(),
            fork=self.context.threads == 1,  # sessions of one thread start no threads, which a fork would lack
            joins=True,
        )

    def prepare(self, needs: Needs) -> None:
        self.context.session("encoder")
        step = self.step_role(needs.width)
        if needs.best_only and self._has_argmax:
            self.context.session("greedy_step")
        else:
            self.context.session(ATTENTION_ROLES[step] if needs.attention else step)

    def step_role(self, beam: int) -> Literal["decoder_step", "beam_step"]:
        """The step graph of searches with this beam, in its plain variant."""
        return self._greedy if beam == 1 else "beam_step"

    def encode(
        self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False
    ) -> GreedyState | BeamState:
        cross, lengths = self.encode_sources(src_ids, src_len)
        return self.first_state(cross, lengths, beam, attention=attention)

    def first_state(
        self,
        cross: list[FloatArray],
        src_len: NDArray[np.int32],
        beam: int,
        *,
        attention: bool = False,
        shortlist: BatchShortlist | None = None,
    ) -> GreedyState | BeamState:
        """The state of a batch before any token; `cross` and `src_len` are the results of `encode_sources`."""
        if self.step_role(beam) == "decoder_step":
            return GreedyState(self.context, cross, src_len, attention=attention, shortlist=shortlist)
        return BeamState(self.context, cross, src_len, beam, attention=attention, shortlist=shortlist)

    def encode_sources(self, src_ids: IntArray, src_len: IntArray) -> tuple[list[FloatArray], NDArray[np.int32]]:
        """The cross keys and values of sentences, each [batch, heads, src, head_dim], and their lengths [batch]."""
        batch, src = src_ids.shape
        ids = np.ascontiguousarray(src_ids, dtype=np.int64)
        lengths = np.ascontiguousarray(src_len, dtype=np.int32)
        config, buffers = self.config, self.context.buffers
        cross = buffers.empty((2 * config.n_decoder_layers, batch, config.n_heads, src, config.head_dim))
        rows = max(1, ENCODED_AT_ONCE // src)
        if rows >= batch:
            self._encode_into(ids, lengths, cross)
        else:
            for start in range(0, batch, rows):
                piece = slice(start, start + rows)
                part = buffers.empty(cross[:, piece].shape)
                self._encode_into(ids[piece], lengths[piece], part)
                cross[:, piece] = part
        return list(cross), lengths

    def _encode_into(self, src_ids: IntArray, src_len: NDArray[np.int32], cross: FloatArray) -> None:
        """Write the keys and values of sentences to `cross` [keys_values, batch, heads, src, head_dim]."""
        binding = Binding(self.context.session("encoder"))
        binding.input("src_ids", src_ids)
        binding.input("src_len", src_len)
        binding.output("cross", cross)
        binding.run()

    def step(self, state: Any, tokens: IntArray) -> tuple[FloatArray, Any]:
        return state.step(tokens), state

    def argmax(self, state: Any, tokens: IntArray, banned: Sequence[int]) -> tuple[Argmax, Any]:
        return state.argmax(tokens, banned), state

    def search_ahead(self, state: Any, request: Ahead) -> tuple[Continuations, Any]:
        return state.search_ahead(request), state

    def shared_step(
        self, state: Any, tokens: IntArray, requests: Sequence[StepRequest]
    ) -> tuple[list[StepOutput], Any]:
        return state.shared_step(tokens, [self._within_vocabulary(request) for request in requests]), state

    def _within_vocabulary(self, request: StepRequest) -> StepRequest:
        if isinstance(request, BestRequest):
            return BestRequest(min(request.count, self.config.tgt_vocab_size))
        return request

    def best(self, state: Any, tokens: IntArray, count: int) -> tuple[Best, Any]:
        return state.best(tokens, min(count, self.config.tgt_vocab_size)), state
