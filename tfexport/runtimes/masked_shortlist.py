"""Shortlists for any runtime, which computes all logits: logits of words outside of the shortlist become -inf.

This defines what a shortlist means. `ort_cpu/shortlist.py` has graphs that compute the logits of the shortlist alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.runtimes.base import BaseRuntime, Capabilities, Capacity, Needs, Runtime
from tfexport.runtimes.outputs import Best, FloatArray, IntArray, best_from_logits


@dataclass
class MaskedState:
    """A state of the inner runtime, and the words that its sentences may have, [batch, vocab]."""

    inner: Any
    allowed: NDArray[np.bool_]

    @property
    def rows(self) -> int:
        return int(self.inner.rows)

    @property
    def cross(self) -> list[FloatArray]:
        return list(self.inner.cross)

    @property
    def attention(self) -> FloatArray:
        attention: FloatArray = self.inner.attention
        return attention

    def select(self, rows: IntArray) -> MaskedState:
        sentences = np.asarray(rows)[:: self.rows // len(self.allowed)] // (self.rows // len(self.allowed))
        return MaskedState(self.inner.select(rows), self.allowed[sentences])


class MaskedShortlistRuntime(BaseRuntime):
    """A runtime whose logits are -inf for words outside of the shortlist."""

    def __init__(self, inner: Runtime):
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def config(self) -> ModelConfig:
        return self._inner.config

    @property
    def precision(self) -> Precision:
        return self._inner.precision

    @property
    def capacity(self) -> Capacity:
        return self._inner.capacity

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(shortlists=True, fork=self._inner.capabilities.fork)

    def prepare(self, needs: Needs) -> None:
        self._inner.prepare(needs)

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> MaskedState:
        """A state without a shortlist, which allows every word."""
        every = np.ones((len(src_len), self.config.tgt_vocab_size), dtype=bool)
        return MaskedState(self._inner.encode(src_ids, src_len, beam=beam, attention=attention), every)

    def encode_shortlisted(
        self,
        src_ids: IntArray,
        src_len: IntArray,
        candidates: Sequence[IntArray],
        *,
        beam: int = 1,
        attention: bool = False,
    ) -> MaskedState:
        state = self.encode(src_ids, src_len, beam=beam, attention=attention)
        state.allowed[:] = False
        for row, ids in zip(state.allowed, candidates, strict=True):
            row[ids] = True
        return state

    def step(self, state: MaskedState, tokens: IntArray) -> tuple[FloatArray, MaskedState]:
        logits, inner = self._inner.step(state.inner, tokens)
        rows = np.repeat(state.allowed, len(logits) // len(state.allowed), axis=0)
        return np.where(rows, logits, np.float32(-np.inf)), MaskedState(inner, state.allowed)

    def best(self, state: MaskedState, tokens: IntArray, count: int) -> tuple[Best, MaskedState]:
        logits, state = self.step(state, tokens)
        return best_from_logits(logits, count), state
