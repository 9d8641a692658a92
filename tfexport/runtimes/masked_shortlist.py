"""Any runtime with a shortlist: all logits are computed, and those of words that may not come are taken away.

It is what a shortlist means; `ort_cpu` has graphs that compute no other logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.runtimes.base import Best, Capacity, FloatArray, IntArray, Runtime, best_of


@dataclass
class MaskedState:
    """A state of the runtime within, and the words of its sentences, [batch, vocab]."""

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
        found: FloatArray = self.inner.attention
        return found

    def select(self, rows: IntArray) -> MaskedState:
        sentences = np.asarray(rows)[:: self.rows // len(self.allowed)] // (self.rows // len(self.allowed))
        return MaskedState(self.inner.select(rows), self.allowed[sentences])


class Masked:
    """A runtime whose logits are -inf for words that a shortlist leaves out."""

    def __init__(self, inner: Runtime[Any]):
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

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, **asked: bool) -> MaskedState:
        """Without a shortlist: every word may come. What more is `asked` is the inner runtime's."""
        every = np.ones((len(src_len), self.config.tgt_vocab_size), dtype=bool)
        return MaskedState(self._inner.encode(src_ids, src_len, beam=beam, **asked), every)

    def encode_shortlisted(
        self, src_ids: IntArray, src_len: IntArray, candidates: Sequence[IntArray], *, beam: int, **asked: bool
    ) -> MaskedState:
        """`encode` for sentences in whose outputs only their `candidates` (ids, of each sentence) may come."""
        state = self.encode(src_ids, src_len, beam=beam, **asked)
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
        return best_of(logits, count), state
