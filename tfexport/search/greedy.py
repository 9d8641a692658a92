"""Greedy search and sampling. They differ only in how the next token is chosen (`search/token_rules.py`).

tokens = [bos]
until eos, or the length limit:
    tokens += the most likely next token (greedy search), or a random one (sampling)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tfexport.runtimes.base import Ahead
from tfexport.runtimes.outputs import Continuations, IntArray, StepOutput, StepRequest
from tfexport.search.attention_trace import AttentionTrace
from tfexport.search.hypothesis import Hypothesis
from tfexport.search.multi_step import SearchAhead
from tfexport.search.options import SearchOptions
from tfexport.search.search_batch import (
    ALL_SENTENCES,
    NO_SENTENCES,
    Begin,
    ReadAttention,
    is_end,
    no_token_error,
    rows_to_keep,
)
from tfexport.search.token_rules import TokenRules, require_numbers

REMOVE_FINISHED_BELOW = 0.75
"""Finished sentences leave the batch when at most this fraction of it is live: the copy of the cache must pay off."""


class GreedyBatch:
    """The state of a greedy search between two steps: one output for each sentence, or `options.samples`. A `SearchBatch`.

    Args:
        limits: the largest number of output tokens for each sentence, [batch].
        trace: records cross-attention, if the search needs it.
        ahead: decides when the runtime makes several steps by itself; None for never.
        remove_below: finished sentences leave the batch when the others are at most this fraction of it.
    """

    def __init__(
        self,
        rules: TokenRules,
        limits: IntArray,
        options: SearchOptions,
        trace: AttentionTrace | None,
        ahead: SearchAhead | None = None,
        *,
        remove_below: float = REMOVE_FINISHED_BELOW,
    ):
        self._rules = rules
        self._ahead = ahead
        self._trace = trace
        self._remove_below = remove_below
        self._end_ids = options.end_ids(rules.config)
        self._width = options.width
        batch = len(limits)
        self._outputs = GreedyOutputs(rules.config.bos_id, self._end_ids, limits, options)
        self._limits = limits
        self._shortest_limit = int(limits.min())
        self._longest_limit = int(limits.max())
        self._length = 0
        self._live = np.ones((batch, self._width), dtype=bool)  # [sentences, width]
        self._unfinished: NDArray[np.bool_] = np.ones(batch, dtype=bool)  # sentences with a live output, [sentences]
        self.sentences = np.arange(batch)
        self.tokens: IntArray = np.full(batch * self._width, rules.config.bos_id, dtype=np.int64)
        self.ended = NO_SENTENCES
        self.stable_prefix = self._outputs.stable_prefix
        self._is_done = False

    @property
    def is_done(self) -> bool:
        return self._is_done

    def request(self) -> StepRequest:
        return self._rules.request(1, self._length + 1, self.sentences)

    def request_ahead(self) -> Ahead | None:
        if self._ahead is None:
            return None
        steps = self._shortest_limit - self._length
        return self._ahead.request(
            self._length, self.sentences, self.tokens, None, 1, steps=steps, live=self._live[:, 0]
        )

    def advance(self, output: StepOutput, attention: ReadAttention) -> IntArray | None:
        length, sentences = self._length + 1, self.sentences
        # The scores are log-probabilities, or logits where the search needs no probabilities.
        scores, ids = self._rules.best(output, 1, length, sentences, self._outputs.history)
        if self._trace:
            self._trace.add(attention(), sentences)
        shape = 1, len(sentences), self._width
        return self._take(ids.reshape(shape), scores.reshape(shape))

    def advance_ahead(self, continuations: Continuations, begin: Begin | None = None) -> IntArray | None:
        require_numbers(continuations.log_probs)
        steps = self._longest_limit - self._length
        return self._take(continuations.tokens[:steps], continuations.log_probs[:steps], begin)

    def drop(self, indices: IntArray) -> None:
        self._live[np.isin(self.sentences, indices)] = False
        self._leave(np.asarray(self._live.any(axis=1)))

    def outputs(self, indices: IntArray) -> list[list[Hypothesis]]:
        return [self._outputs.hypotheses(index, self._trace) for index in indices.tolist()]

    def _take(self, chosen: IntArray, scores: NDArray[np.floating], begin: Begin | None = None) -> IntArray | None:
        """Apply one or several steps. Tokens after the end of an output are dropped.

        Args:
            chosen: the tokens of each step, [steps, sentences, width].
            scores: the scores of these tokens, of the same shape.
            begin: see `SearchBatch.advance_ahead`.

        Returns:
            As `advance`.

        Raises:
            TfexportError: an output can neither continue nor end.
        """
        sentences = self.sentences
        live = self._live
        before = self._length
        self.tokens = chosen[-1].ravel()
        self._length += len(chosen)
        ends = live & is_end(chosen, self._end_ids)
        if begin is not None:
            self._begin_following(begin, ends)
        self._outputs.append(chosen, scores, sentences)
        is_at_limit, is_impossible = self._length >= self._shortest_limit, scores.min() == -np.inf
        if is_at_limit or is_impossible:
            lengths = np.arange(before + 1, self._length + 1)
            ends |= live & (self._limits[sentences] <= lengths[:, None])[..., None]
            if is_impossible:
                self._require_possible(scores, ends, lengths)
        if not ends.any():
            self.ended = NO_SENTENCES
            return None
        ended = np.asarray(ends[0] if len(ends) == 1 else ends.any(axis=0))
        self._outputs.end(ends, ended, sentences)
        self._live = live & ~ended
        unfinished = np.asarray(self._live.any(axis=1))
        self.ended = sentences[self._unfinished & ~unfinished]
        return self._leave(unfinished)

    def _begin_following(self, begin: Begin, ends: NDArray[np.bool_]) -> None:
        """Call `begin` with the next steps, if at least one sentence certainly continues, i.e. has no end in `ends`
        [steps, sentences, 1].
        """
        if self._length >= self._longest_limit:
            return
        goes_on = (self._live & ~ends.any(axis=0))[:, 0] & (self._limits[self.sentences] > self._length)
        certain = int(np.count_nonzero(goes_on))
        if certain and (request := self.request_ahead()) is not None:
            begin(request, certain)

    def _require_possible(self, scores: NDArray[np.floating], ends: NDArray[np.bool_], lengths: IntArray) -> None:
        """Raises: TfexportError if an output continues with a token of probability 0 that is not forced."""
        ended = np.logical_or.accumulate(ends, axis=0)
        goes_on = self._live & ~np.concatenate([np.zeros_like(ended[:1]), ended[:-1]])
        forced = np.stack([self._rules.forced_tokens(length, self.sentences) for length in lengths.tolist()])
        if (goes_on & (scores == -np.inf) & (forced < 0)[..., None]).any():
            raise no_token_error()

    def _leave(self, unfinished: NDArray[np.bool_]) -> IntArray | None:
        """Remove the sentences that are not `unfinished`, if there are enough of them. Returns as `advance`."""
        self._unfinished = unfinished
        self._is_done = not unfinished.any()
        limits = self._limits[self.sentences[unfinished]]
        self._shortest_limit = int(limits.min(initial=self._longest_limit))
        if self._is_done or unfinished.sum() > self._remove_below * len(unfinished) or unfinished.all():
            return None
        kept = rows_to_keep(unfinished)
        rows: IntArray = (kept[:, None] * self._width + np.arange(self._width)).ravel()
        self.tokens, self.sentences = self.tokens[rows], self.sentences[kept]
        self._live, self._unfinished = self._live[kept], self._unfinished[kept]
        return rows


class GreedyOutputs:
    """The growing outputs of a batch, by sentence. Tokens after the end of an output are never read."""

    def __init__(self, bos: int, end_ids: tuple[int, ...], limits: IntArray, options: SearchOptions):
        self._bos = bos
        self._end_ids = end_ids
        self._options = options
        shape = (limits.max(), len(limits), options.width)
        self._ids = np.empty(shape, dtype=np.int64)
        self._log_probs = np.full(shape, np.nan)  # stays NaN without `options.scores`
        self._lengths = np.repeat(limits[:, None], options.width, axis=1)
        self._length = 0

    def append(self, chosen: IntArray, scores: NDArray[np.floating], sentences: IntArray) -> None:
        """Append the `chosen` tokens of some steps for `sentences`, with their scores, both [steps, sentences, width]."""
        every = sentences if len(sentences) < self._ids.shape[1] else ALL_SENTENCES
        at = slice(self._length, self._length + len(chosen)), every
        self._ids[at] = chosen
        if self._options.scores:
            self._log_probs[at] = scores
        self._length += len(chosen)

    def end(self, ends: NDArray[np.bool_], ended: NDArray[np.bool_], sentences: IntArray) -> None:
        """End outputs of `sentences` at their first ending token among the tokens that were added last.

        Args:
            ends: the tokens that end an output, [steps, sentences, width].
            ended: the outputs that end, [sentences, width].
        """
        group, sample = np.nonzero(ended)
        first = ends[:, group, sample].argmax(axis=0) + 1
        self._lengths[sentences[group], sample] = self._length - len(ends) + first

    def history(self, length: int, sentences: IntArray) -> IntArray:
        """The tokens before `length` of each output of `sentences`, bos first, [rows, length]."""
        past = self._ids[: length - 1, sentences].reshape(length - 1, len(sentences) * self._options.width).T
        return np.concatenate([np.full((len(past), 1), self._bos), past], axis=1)

    def stable_prefix(self, index: int) -> tuple[IntArray, NDArray[np.float64]]:
        """All tokens of the first output of source `index`: a chosen token never changes."""
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
