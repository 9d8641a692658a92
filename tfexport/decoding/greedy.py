"""Greedy search, and sampling, which differs from it in how the next token is chosen (`decoding/token_rules.py`).

tokens = [bos]
until eos, or the length limit:
    tokens += the most likely next token (greedy search), or one that is drawn (sampling)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tfexport.decoding.attention_trace import AttentionTrace
from tfexport.decoding.hypothesis import Hypothesis
from tfexport.decoding.options import SearchOptions
from tfexport.decoding.steps import (
    ALL_SENTENCES,
    NO_SENTENCES,
    TellAttention,
    is_end,
    no_token_error,
    rows_to_keep,
)
from tfexport.decoding.token_rules import TokenRules
from tfexport.runtimes.base import Ask, IntArray, Told

COMPACT_BELOW = 0.75
"""Rows that ended leave the batch when the live ones are at most this part of it: the copy of the cache must pay off."""


class GreedyBatch:
    """A greedy search between two steps: one output of each sentence, or `options.samples` outputs. A `SearchBatch`.

    Args:
        limits: the largest number of tokens of each sentence's outputs, [batch].
        trace: records cross-attention, where the search needs it.
        compact_below: sentences that are done leave the batch when the others are at most this part of it.
    """

    def __init__(
        self,
        rules: TokenRules,
        limits: IntArray,
        options: SearchOptions,
        trace: AttentionTrace | None,
        *,
        compact_below: float = COMPACT_BELOW,
    ):
        self._rules, self._limits, self._trace, self._compact_below = rules, limits, trace, compact_below
        self._end_ids, self._width, batch = options.end_ids(rules.config), options.width, len(limits)
        self._outputs = GreedyOutputs(rules.config.bos_id, self._end_ids, limits, options)
        self._shortest_limit, self._length = int(limits.min()), 1
        self._live = np.ones((batch, self._width), dtype=bool)  # [sentences, width]
        self.sentences = np.arange(batch)
        self.tokens: IntArray = np.full(batch * self._width, rules.config.bos_id, dtype=np.int64)
        self.ended = NO_SENTENCES
        self.stable_prefix = self._outputs.stable_prefix
        self._is_done = False

    @property
    def is_done(self) -> bool:
        return self._is_done

    def ask(self) -> Ask:
        self._ask = self._rules.asks(1, self._length, self.sentences)
        return self._ask

    def advance(self, told: Told, attention: TellAttention) -> IntArray | None:
        length, sentences, live = self._length, self.sentences, self._live
        scores, ids = self._rules.best(told, self._ask, 1, length, sentences, self._outputs.history)
        if scores.min() == -np.inf:
            impossible = live & (scores.reshape(-1, self._width) == -np.inf)
            if impossible[self._rules.forced_tokens(length, sentences) < 0].any():
                raise no_token_error()
        if self._trace:
            self._trace.add(attention(), sentences)
        self.tokens = ids[:, 0]
        chosen = self.tokens.reshape(-1, self._width)
        self._outputs.append(chosen, scores, sentences)
        self._length += 1

        ends = live & is_end(chosen, self._end_ids)
        if length >= self._shortest_limit:
            ends |= live & (self._limits[sentences, None] <= length)
        if not ends.any():
            self.ended = NO_SENTENCES
            return None
        self._outputs.end(ends, sentences)
        before = live.any(axis=1)
        self._live = live & ~ends
        unfinished = np.asarray(self._live.any(axis=1))
        self.ended = sentences[before & ~unfinished]
        return self._leave(unfinished)

    def drop(self, indices: IntArray) -> None:
        self._live[np.isin(self.sentences, indices)] = False
        self._leave(np.asarray(self._live.any(axis=1)))

    def _leave(self, unfinished: NDArray[np.bool_]) -> IntArray | None:
        """Let sentences leave that are not `unfinished`, if there are enough; returns what `advance` does."""
        self._is_done = not unfinished.any()
        if self._is_done or unfinished.sum() > self._compact_below * len(unfinished) or unfinished.all():
            return None
        kept = rows_to_keep(unfinished)
        rows: IntArray = (kept[:, None] * self._width + np.arange(self._width)).ravel()
        self.tokens, self.sentences, self._live = self.tokens[rows], self.sentences[kept], self._live[kept]
        return rows

    def outputs(self, index: int) -> list[Hypothesis]:
        return self._outputs.hypotheses(index, self._trace)


class GreedyOutputs:
    """The outputs of a batch while they grow, by sentence. What follows the end of an output is never read."""

    def __init__(self, bos: int, end_ids: tuple[int, ...], limits: IntArray, options: SearchOptions):
        self._bos, self._end_ids, self._options = bos, end_ids, options
        shape = (limits.max(), len(limits), options.width)
        self._ids = np.empty(shape, dtype=np.int64)
        self._log_probs = np.full(shape, np.nan)  # without `options.scores` the search knows none
        self._lengths = np.repeat(limits[:, None], options.width, axis=1)
        self._length = 0

    def append(self, chosen: IntArray, scores: NDArray[np.floating], sentences: IntArray) -> None:
        """Add the tokens `chosen` [sentences, width] for `sentences`; their scores are `scores` [rows, 1]."""
        at = self._length, sentences if len(sentences) < self._ids.shape[1] else ALL_SENTENCES
        self._ids[at] = chosen
        if self._options.scores:
            self._log_probs[at] = scores.reshape(chosen.shape)
        self._length += 1

    def end(self, ends: NDArray[np.bool_], sentences: IntArray) -> None:
        """The outputs `ends` [sentences, width] of `sentences` end with the token that was added last."""
        group, sample = np.nonzero(ends)
        self._lengths[sentences[group], sample] = self._length

    def history(self, length: int, sentences: IntArray) -> IntArray:
        """The tokens before `length` of each output of `sentences`, bos first, [rows, length]."""
        past = self._ids[: length - 1, sentences].reshape(length - 1, len(sentences) * self._options.width).T
        return np.concatenate([np.full((len(past), 1), self._bos), past], axis=1)

    def stable_prefix(self, index: int) -> tuple[IntArray, NDArray[np.float64]]:
        """A chosen token never changes: all tokens of the first output of source `index`."""
        known = min(self._length, int(self._lengths[index, 0]))
        return self._ids[:known, index, 0], self._log_probs[:known, index, 0]

    def hypotheses(self, index: int, trace: AttentionTrace | None) -> list[Hypothesis]:
        """All outputs of source `index`."""
        return [self._hypothesis(index, sample, trace) for sample in range(self._lengths.shape[1])]

    def _hypothesis(self, index: int, sample: int, trace: AttentionTrace | None) -> Hypothesis:
        length = int(self._lengths[index, sample])
        ids = tuple(self._ids[:length, index, sample].tolist())
        steps = self._log_probs[:length, index, sample]
        log_prob = float(steps.sum()) if self._options.scores else math.nan
        attention = trace.hypothesis(index, [sample] * length) if trace else None
        return Hypothesis.scored(
            ids,
            log_prob,
            self._options,
            finished=ids[-1] in self._end_ids,
            token_log_probs=steps,
            attention=attention,
        )
