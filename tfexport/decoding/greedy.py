"""Greedy search, and sampling, which differs from it in how the next token is chosen (`decoding/token_rules.py`).

tokens = [bos]
until eos, or the length limit:
    tokens += the most likely next token (greedy search), or one that is drawn (sampling)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tfexport.decoding.ahead import SearchAhead
from tfexport.decoding.attention_trace import AttentionTrace
from tfexport.decoding.hypothesis import Hypothesis
from tfexport.decoding.options import SearchOptions
from tfexport.decoding.steps import ALL_SENTENCES, Steps, is_end, no_token_error, rows_to_keep
from tfexport.decoding.token_rules import TokenRules
from tfexport.runtimes.base import IntArray, State

COMPACT_BELOW = 0.75
"""Rows that ended leave the batch when the live ones are at most this part of it: the copy of the cache must pay off."""


def greedy_search(
    rules: TokenRules,
    state: State,
    limits: IntArray,
    options: SearchOptions,
    trace: AttentionTrace | None,
    ahead: SearchAhead | None = None,
) -> Steps:
    """One output of each sentence, or `options.samples` outputs.

    Args:
        state: of the batch, before any token.
        limits: the largest number of tokens of each sentence's outputs, [batch].
        trace: records cross-attention, where the search needs it.
        ahead: lets the runtime make several steps by itself where it can; None to see each step.
    """
    end_ids, width, batch = options.end_ids(rules.config), options.width, len(limits)
    outputs = GreedyOutputs(rules.config.bos_id, end_ids, limits, options)
    sentences = np.arange(batch)  # the index of the source of each group of `width` rows
    live = np.ones((batch, width), dtype=bool)  # [sentences, width]
    tokens = np.full(batch * width, rules.config.bos_id, dtype=np.int64)
    shortest_limit, longest_limit = int(limits.min()), int(limits.max())

    length = 0
    while length < longest_limit:
        request = None if ahead is None else ahead.request(length, sentences, tokens, None, 1)
        if request is not None:
            (scores, _, chosen), state = rules.ahead(state, request)
            scores, chosen = scores[: longest_limit - length], chosen[: longest_limit - length]
        else:
            (found, ids), state = rules.next_token(state, tokens, length + 1, sentences, outputs.history)
            if trace:
                trace.add(state.attention, sentences)
            scores, chosen = found.reshape(1, -1, width), ids.reshape(1, -1, width)
        steps = len(chosen)
        tokens = chosen[-1].ravel()
        outputs.append(chosen, scores, sentences)

        ends = live & is_end(chosen, end_ids)
        if length + steps >= shortest_limit:
            lengths = np.arange(length + 1, length + steps + 1)
            ends |= live & (limits[sentences] <= lengths[:, None])[..., None]
        if scores.min() == -np.inf:
            ended = np.logical_or.accumulate(ends, axis=0)
            goes_on = live & ~np.concatenate([np.zeros_like(ended[:1]), ended[:-1]])
            forced = np.stack([rules.forced_tokens(length + step, sentences) for step in range(1, steps + 1)])
            if (goes_on & (scores == -np.inf) & (forced < 0)[..., None]).any():
                raise no_token_error()
        length += steps
        if ends.any():
            outputs.end(ends, sentences)
            live &= ~ends.any(axis=0)
            unfinished = np.asarray(live.any(axis=1))
            if not unfinished.any():
                break
            if unfinished.sum() <= COMPACT_BELOW * len(unfinished):
                kept = rows_to_keep(unfinished)
                rows = (kept[:, None] * width + np.arange(width)).ravel()
                state, tokens = state.select(rows), tokens[rows]
                sentences, live = sentences[kept], live[kept]
        yield outputs.stable_prefix
    return outputs.hypotheses(trace)


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
        """Add the tokens `chosen` of some steps for `sentences`, and their scores, both [steps, sentences, width]."""
        every = sentences if len(sentences) < self._ids.shape[1] else ALL_SENTENCES
        at = slice(self._length, self._length + len(chosen)), every
        self._ids[at] = chosen
        if self._options.scores:
            self._log_probs[at] = scores
        self._length += len(chosen)

    def end(self, ends: NDArray[np.bool_], sentences: IntArray) -> None:
        """The outputs of `sentences` end with the first of the tokens added last that `ends` [steps, sentences, width]."""
        group, sample = np.nonzero(ends.any(axis=0))
        first = ends[:, group, sample].argmax(axis=0) + 1
        self._lengths[sentences[group], sample] = self._length - len(ends) + first

    def history(self, length: int, sentences: IntArray) -> IntArray:
        """The tokens before `length` of each output of `sentences`, bos first, [rows, length]."""
        past = self._ids[: length - 1, sentences].reshape(length - 1, len(sentences) * self._options.width).T
        return np.concatenate([np.full((len(past), 1), self._bos), past], axis=1)

    def stable_prefix(self, index: int) -> tuple[IntArray, NDArray[np.float64]]:
        """A chosen token never changes: all tokens of the first output of source `index`."""
        known = min(self._length, int(self._lengths[index, 0]))
        return self._ids[:known, index, 0], self._log_probs[:known, index, 0]

    def hypotheses(self, trace: AttentionTrace | None) -> list[list[Hypothesis]]:
        batch, width = self._lengths.shape
        return [[self._hypothesis(index, sample, trace) for sample in range(width)] for index in range(batch)]

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
