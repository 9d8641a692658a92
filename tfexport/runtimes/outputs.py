"""The output of a step: the best tokens of each row, or its logits; and the continuations of hypotheses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


class Best(NamedTuple):
    """The most likely next tokens of each row, best first."""

    log_probs: NDArray[Any]
    """[rows, count]; float32, or float64 where it was computed so."""
    ids: IntArray
    """[rows, count]"""

    def without(self, banned: Sequence[int], count: int, *, eos: int) -> Best:
        """The `count` best tokens of each row that are not `banned`; `eos` where all possible tokens are banned. Where
        `eos` is impossible too, all have log-probability -inf.

        These are `count` tokens plus the number of banned ones, or the whole vocabulary. Log-probabilities do not change.
        """
        # Usually only eos is banned, for which NumPy's `isin` takes as long as a small model's layer.
        is_banned = self.ids == banned[0] if len(banned) == 1 else np.isin(self.ids, banned)
        if not is_banned.any():
            return Best(self.log_probs[:, :count], self.ids[:, :count])
        if self.ids.shape[1] == count + len(banned) and self.log_probs[:, -1].min() > -np.inf:
            kept = ~is_banned  # at least `count` of each row, all of them possible
            kept &= kept.cumsum(axis=1) <= count
            return Best(self.log_probs[kept].reshape(-1, count), self.ids[kept].reshape(-1, count))
        # Such a row has more tokens than are banned, so it has every possible token, including `eos`.
        stuck = ~((self.log_probs > -np.inf) & ~is_banned).any(axis=1)
        is_banned[stuck] = self.ids[stuck] != eos
        # A stable sort by "is banned" keeps the order of the others.
        order = np.argsort(is_banned, axis=1, kind="stable")[:, :count]
        every = np.arange(len(order))[:, None]
        return Best(np.where(is_banned, -np.inf, self.log_probs)[every, order], self.ids[every, order])


class Argmax(NamedTuple):
    """The most likely next token of each row, without its probability."""

    logits: NDArray[Any]
    """[rows, 1]: not comparable between rows or steps; -inf where every token is impossible."""
    ids: IntArray
    """[rows, 1]"""

    def checked(self, banned: Sequence[int], *, eos: int) -> Argmax:
        """These tokens, chosen without the `banned` ones. `eos` has logit 0 where only `eos` is possible and it is banned. A
        logit that the model may not return is NaN: infinity, and -inf where nothing is banned.
        """
        if math.isfinite(self.logits.sum()):  # then all terms are finite; below, a sum may overflow
            return self
        is_impossible = np.isneginf(self.logits)
        is_wrong = np.isposinf(self.logits) | (is_impossible & (not banned))
        ends = is_impossible & (eos in banned)
        logits = np.where(is_wrong, np.nan, np.where(ends, 0.0, self.logits))
        return Argmax(logits, np.where(ends, eos, self.ids))


@dataclass(frozen=True, slots=True)
class BestRequest:
    """Requests the `Best` tokens of a step."""

    count: int
    """The number of tokens of each row."""


@dataclass(frozen=True, slots=True)
class ArgmaxRequest:
    """Requests the `Argmax` of a step."""

    banned: tuple[int, ...] = ()
    """Ids that are not considered."""


@dataclass(frozen=True, slots=True)
class LogitsRequest:
    """Requests the logits of a step, [rows, vocab] float32."""


StepRequest: TypeAlias = BestRequest | ArgmaxRequest | LogitsRequest
StepOutput: TypeAlias = "Best | Argmax | FloatArray"
"""The output of a step for a request."""


class Continuations(NamedTuple):
    """Tokens that continue live hypotheses, best first. Each field is [sentences, count], or [steps, sentences, count]."""

    log_probs: NDArray[np.float64]
    """The log-probability of the whole hypothesis, summed over its tokens; without a beam, of the token alone. -inf for a
    missing hypothesis. NaN where a runtime that searches ahead computed a number that is not finite."""
    parents: IntArray
    """The beam that each token continues."""
    tokens: IntArray

    def at(self, index: Any) -> Continuations:
        """The continuations at an index of all three fields."""
        return Continuations(self.log_probs[index], self.parents[index], self.tokens[index])


def best_from_logits(logits: FloatArray, count: int) -> Best:
    """The `count` best tokens of `logits` [rows, vocab], the lower id first among equals; log-probabilities in float64."""
    peak = logits.max(axis=1)
    if not np.isfinite(peak).all():  # nothing to sort by; the search raises an error
        nothing = np.full((len(logits), count), np.nan)
        return Best(nothing, np.zeros(nothing.shape, dtype=np.int64))
    ids = top_k(logits, min(count, logits.shape[1]))
    norms = np.log(np.exp(logits - peak[:, None]).sum(axis=1, dtype=np.float64)) + peak
    return Best(np.take_along_axis(logits, ids, axis=1).astype(np.float64) - norms[:, None], ids)


def top_k(values: NDArray[Any], k: int) -> IntArray:
    """The columns of the k largest `values` [rows, n] of each row, largest first, the lower column first among equals."""
    rows, n = values.shape
    kth = np.partition(values, n - k, axis=1)[:, n - k, None]
    chosen = values >= kth
    for row in np.flatnonzero(np.count_nonzero(chosen, axis=1) > k):  # of equal values the lower columns
        equal = np.flatnonzero(values[row] == kth[row])
        chosen[row, equal[k - np.count_nonzero(chosen[row]) :]] = False
    columns = np.nonzero(chosen)[1].reshape(rows, k)
    order = np.argsort(-np.take_along_axis(values, columns, axis=1), axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1)
