"""What a search needs of a runtime: `encode` once per batch, then `step` after `step`."""

from __future__ import annotations

from typing import Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


class DecoderState(Protocol):
    """Where a batch stands: cross keys/values of `batch` sentences and the self-attention cache of `rows` hypotheses.

    A state is a value to the search, spent by the `step` or `select` that returns the next one: a runtime may write
    the next state into the buffers of the last.
    """

    @property
    def rows(self) -> int:
        """Hypotheses: batch * beam, row = b * beam + k."""
        ...

    @property
    def cross(self) -> list[FloatArray]:
        """The cross keys and values, layer by layer, key before value, each [batch, heads, src, head_dim]."""
        ...

    def select(self, rows: IntArray) -> Self:
        """The state whose row r continues row `rows[r]` of this one.

        `rows` [batch' * beam] keeps the beams of a sentence together and on that sentence: so it reorders beams and
        drops sentences, and the cross keys/values move only in the second case.
        """
        ...


State = TypeVar("State", bound=DecoderState)


class Runtime(Protocol[State]):
    """One way to execute a model."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1) -> State:
        """`src_ids` [batch, src], of which the first `src_len` [batch] of a row count, to the state before any token."""
        ...

    def step(self, state: State, tokens: IntArray) -> tuple[FloatArray, State]:
        """The next `tokens` [rows] to logits [rows, vocab] float32 and the state that includes these tokens."""
        ...
