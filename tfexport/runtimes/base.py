"""What a search needs of a runtime: `encode` once per batch, then `step` after `step`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.contract import Precision

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


class Best(NamedTuple):
    """The most likely next tokens of each row, best first."""

    log_probs: NDArray[Any]
    """[rows, count]; float32, or float64 where it was computed so."""
    ids: IntArray
    """[rows, count]"""


@dataclass(frozen=True)
class Capacity:
    """The sizes that a runtime takes; None where only memory sets a limit."""

    source: int
    """Most source ids."""
    target: int
    """Most generated tokens."""
    batch: int | None = None
    """Most sentences at once."""
    rows: int | None = None
    """Most rows, batch * beam."""

    @classmethod
    def of_model(cls, config: ModelConfig) -> Capacity:
        """What the model's positions allow."""
        return cls(config.max_source_length, config.max_target_length)

    def batch_size(self, wanted: int, beam: int) -> int:
        """The number of sentences, up to `wanted`, that are taken at once with a beam; at least one."""
        sizes = (wanted, self.batch, None if self.rows is None else self.rows // beam)
        return max(1, min(size for size in sizes if size is not None))


@dataclass(frozen=True)
class Needs:
    """What a search asks of a runtime, known before its first batch, so that the graphs for it are loaded once."""

    width: int = 1
    """Hypotheses of a sentence that are decoded at once."""
    best_only: bool = False
    """Only which tokens are best: no scores and no logits."""
    attention: bool = False
    """Cross-attention weights too."""


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

    @property
    def attention(self) -> FloatArray:
        """The cross-attention weights [layers, rows, heads, src] of the tokens of the last step, in the order of their rows;
        to be read before the next step or `select`, and only where `encode` was asked for it."""
        ...

    def select(self, rows: IntArray) -> Self:
        """The state whose row r continues row `rows[r]` of this one.

        `rows` [batch' * beam] keeps the beams of a sentence together and on that sentence, and has no sentence twice: so it
        reorders beams, drops sentences and lets sentences change places; cross keys/values move only in the last two.
        """
        ...


State = TypeVar("State", bound=DecoderState)


class Runtime(Protocol[State]):
    """One way to execute a model."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def precision(self) -> Precision:
        """Of the weights and activations."""
        ...

    @property
    def capacity(self) -> Capacity:
        """The sizes that it takes; beyond them `encode` and `step` raise TfexportError."""
        ...

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> State:
        """`src_ids` [batch, src], of which the first `src_len` [batch] of a row count, to the state before any token.

        Args:
            attention: let states tell their `attention`.

        Raises:
            RuntimeUnavailable: this runtime cannot.
            BundleError: the bundle has no graphs for it.
        """
        ...

    def step(self, state: State, tokens: IntArray) -> tuple[FloatArray, State]:
        """The next `tokens` [rows] to logits [rows, vocab] float32 and the state that includes these tokens."""
        ...

    def best(self, state: State, tokens: IntArray, count: int) -> tuple[Best, State]:
        """`step`, of whose logits only the `count` best tokens of each row leave the device.

        There are as many as the vocabulary has where that is fewer.
        """
        ...


@runtime_checkable
class Ranking(Protocol):
    """A runtime that may find the best token without its log-probability, which is faster."""

    @property
    def ranks(self) -> bool:
        """Whether it does, with the graphs that it has."""
        ...

    def best_alone(self, state: Any, tokens: IntArray, banned: Sequence[int]) -> tuple[Best, Any]:
        """`step`, of whose logits only the largest of each row leaves the device, those of the ids `banned` aside.

        Returns:
            The best tokens [rows, 1], with logits or log-probabilities (-inf where nothing may come), and the next state.
        """
        ...


@runtime_checkable
class Shortlisting(Protocol):
    """A runtime that computes logits of a shortlist alone."""

    def encode_shortlisted(
        self, src_ids: IntArray, src_len: IntArray, candidates: Sequence[IntArray], *, beam: int
    ) -> Any:
        """`encode` for sentences in whose outputs only their `candidates` (sorted ids, of each sentence) may come.

        Logits of others are -inf, and so are log-probabilities where others fill up a row; those of the candidates are
        normalised over them.
        """
        ...


class Classifier(Protocol):
    """One way to execute an encoder classifier."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def capacity(self) -> Capacity: ...

    def logits(self, src_ids: IntArray, src_len: IntArray) -> FloatArray:
        """`src_ids` [batch, src], of which the first `src_len` [batch] count, to logits [batch, classes] float32."""
        ...


def best_of(logits: FloatArray, count: int) -> Best:
    """The `count` best tokens of `logits` [rows, vocab], the lower id first among equals, in float64."""
    peak = logits.max(axis=1)
    if not np.isfinite(peak).all():  # nothing to sort by: the search refuses it
        nothing = np.full((len(logits), count), np.nan)
        return Best(nothing, np.zeros(nothing.shape, dtype=np.int64))
    ids = top_k(logits, min(count, logits.shape[1]))
    norms = np.log(np.exp(logits - peak[:, None]).sum(axis=1, dtype=np.float64)) + peak
    return Best(np.take_along_axis(logits, ids, axis=1).astype(np.float64) - norms[:, None], ids)


def top_k(values: NDArray[Any], k: int) -> IntArray:
    """Columns of the k largest `values` [rows, n] of each row, largest first, the lower column first among equals."""
    rows, n = values.shape
    kth = np.partition(values, n - k, axis=1)[:, n - k, None]
    chosen = values > kth
    for row in range(rows):  # NumPy's partition says nothing about which of several equals it takes
        equal = np.flatnonzero(values[row] == kth[row])
        chosen[row, equal[: k - np.count_nonzero(chosen[row])]] = True
    columns = np.nonzero(chosen)[1].reshape(rows, k)
    order = np.argsort(-np.take_along_axis(values, columns, axis=1), axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1)
