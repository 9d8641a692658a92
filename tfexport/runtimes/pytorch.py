"""The `torch` runtime: the canonical model in eager PyTorch. Every other runtime is held to what it computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tfexport.bundle import Bundle
from tfexport.config import ModelConfig
from tfexport.models.checkpoint import build_model
from tfexport.models.transformer import KeyValue, Transformer
from tfexport.runtimes.base import Best, FloatArray, IntArray, best_of

CACHE_BLOCK = 32
"""Slots by which the cache grows; its size does not change the result."""


@dataclass(frozen=True)
class TorchState:
    src_len: Tensor  # [batch]
    memory: list[KeyValue]  # a layer: [batch, heads, src, head_dim]
    past: list[KeyValue]  # a layer: [rows, heads, cache, head_dim]
    position: Tensor  # [rows]

    @property
    def rows(self) -> int:
        return len(self.position)

    @property
    def cross(self) -> list[FloatArray]:
        return [tensor.float().cpu().numpy() for memory in self.memory for tensor in memory]

    def select(self, rows: IntArray) -> TorchState:
        index = torch.from_numpy(rows).to(self.position.device)
        beam = self.rows // len(self.src_len)
        sentences = index[::beam] // beam
        return TorchState(
            self.src_len[sentences],
            [KeyValue(memory.key[sentences], memory.value[sentences]) for memory in self.memory],
            [KeyValue(cache.key[index], cache.value[index]) for cache in self.past],
            self.position[index],
        )

    def grown(self) -> TorchState:
        """The same state with `CACHE_BLOCK` more slots."""
        pad = (0, 0, 0, CACHE_BLOCK)
        return replace(self, past=[KeyValue(*(torch.nn.functional.pad(t, pad) for t in kv)) for kv in self.past])


class TorchRuntime:
    """Runs a `Transformer` on its own device; the model is put into evaluation mode."""

    name = "torch"

    def __init__(self, model: Transformer):
        self._model = model.eval()

    @classmethod
    def from_bundle(cls, bundle: Bundle, *, threads: int | None = None) -> TorchRuntime:
        """The reference of a bundle: its canonical weights.

        Raises:
            BundleError: the bundle is a classifier's.
        """
        bundle.graph("decoder_step")
        if threads is not None:
            torch.set_num_threads(threads)
        model = build_model(bundle.config, load_file(bundle.weights))
        assert isinstance(model, Transformer)
        return cls(model)

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._model.encoder.tokens.weight.device)

    @torch.inference_mode()
    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1) -> TorchState:
        length = self._tensor(src_len)
        cross = self._model.encode(self._tensor(src_ids), length)
        rows = len(src_len) * beam
        return TorchState(length, cross, self._model.empty_cache(rows, CACHE_BLOCK), length.new_zeros(rows))

    @torch.inference_mode()
    def step(self, state: TorchState, tokens: IntArray) -> tuple[FloatArray, TorchState]:
        if state.position.max() >= state.past[0].key.shape[2]:
            state = state.grown()
        logits, past = self._model.step(self._tensor(tokens), state.position, state.src_len, state.past, state.memory)
        return logits.float().cpu().numpy(), replace(state, past=past, position=state.position + 1)

    def best(self, state: TorchState, tokens: IntArray, count: int) -> tuple[Best, TorchState]:
        logits, state = self.step(state, tokens)
        return best_of(logits, count), state

    @torch.inference_mode()
    def teacher_forced(self, src_ids: IntArray, src_len: IntArray, tgt_ids: IntArray) -> FloatArray:
        """Logits [batch, tgt, vocab] along `tgt_ids` [batch, tgt], beginning with bos, without any cache."""
        logits = self._model(self._tensor(src_ids), self._tensor(src_len), self._tensor(tgt_ids))
        return logits.float().cpu().numpy()  # type: ignore[no-any-return]
