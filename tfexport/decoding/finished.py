"""The finished hypotheses of a beam search, and the criterion by which a sentence is done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfexport.decoding.options import SearchOptions, length_divisor
from tfexport.decoding.steps import ALL_SENTENCES
from tfexport.runtimes.base import Continuations, IntArray

Scores = NDArray[np.float64]
Flags = NDArray[np.bool_]


@cache
def _divisors(google_length: bool, exponent: float, longest: int) -> Scores:
    """`length_divisor` of lengths from 1, computed one by one: NumPy's powers have other last bits."""
    return np.array([length_divisor(length, exponent, google_length) for length in range(1, longest + 1)])


class Endings(NamedTuple):
    """Finished hypotheses, without the tokens before the last. Each field is [hypotheses]."""

    log_probs: Scores
    lengths: IntArray
    parents: IntArray
    """The beam that the last token continues."""
    tokens: IntArray
    """The last tokens."""

    def at(self, index: Any) -> Endings:
        """Those at an index of all fields."""
        return Endings(self.log_probs[index], self.lengths[index], self.parents[index], self.tokens[index])

    @classmethod
    def joined(cls, parts: Sequence[Endings]) -> Endings:
        """All of several."""
        return cls(
            np.concatenate([part.log_probs for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.parents for part in parts]),
            np.concatenate([part.tokens for part in parts]),
        )


class FinishedHypotheses:
    """The finished hypotheses of each sentence of a batch, best first.

    It depends on candidates alone, and not on who ranked them or how many steps came at once.

    Args:
        limits: the largest number of tokens of each sentence's hypotheses, [batch].
    """

    def __init__(self, options: SearchOptions, limits: IntArray):
        self._options, self._profile, self._limits = options, options.search_profile, limits
        self._most = max(options.beam, options.enough_finished)
        self.count: IntArray = np.zeros(len(limits), dtype=np.int64)
        """The number of each sentence, [batch]."""
        # The `most` best ones: nothing depends on others. A place without one has score -inf.
        self._scores = np.full((len(limits), self._most), -np.inf)
        self._numbers = np.zeros((len(limits), self._most), dtype=np.int64)
        self._endings: list[Endings] = []
        self._n_endings = 0
        self._divisors = _divisors(options.search_profile.google_length, options.length_exponent, int(limits.max()) + 1)
        self._limit_divisors = self._divisors[limits - 1]
        self._top_ended = np.zeros(len(limits), dtype=bool)
        self._ended_ranks = np.zeros((len(limits), options.beam), dtype=bool)
        # The worst of the `nbest` best scores of each sentence, and of as many as are enough, [batch].
        self._nbest_scores = self._scores[:, options.nbest - 1]
        self._enough_scores = self._scores[:, options.enough_finished - 1]
        self._enough, self._is_longest_best = options.enough_finished, options.length_exponent > 0
        # A bias above 0 may raise log-probabilities; else they only fall.
        self._scores_fall = not any(bias > 0 for _, bias in options.sequence_bias)

    def add(
        self,
        ends: Flags,
        found: Continuations,
        sentences: IntArray,
        length: int,
        *,
        counts: Flags | None = None,
        penalties: Scores | None = None,
    ) -> None:
        """Add the hypotheses `ends` [sentences, beam] of `sentences`, in the order of their ranks.

        Of two with the same score the earlier one is better.

        Args:
            found: continuations of hypotheses, of each sentence as many as the beam, or more.
            length: of their tokens.
            counts: which of them are new outputs; all when None. The others continue one that was added before.
            penalties: added to the scores, [sentences, beam].
        """
        rows = np.flatnonzero(ends.any(axis=1))
        ends, index = ends[rows], sentences[rows]
        if self._profile.top_ends:
            self._top_ended[index] |= ends[:, 0]
        if self._profile.done == "places":
            self._ended_ranks[index] |= ends
        if counts is not None:
            ends = ends & counts[rows]
        if self._profile.keeps == "first":
            ends = ends & (self.count[index][:, None] + ends.cumsum(axis=1) <= self._most)
        found = found.at((rows, slice(ends.shape[1])))
        scores = found.log_probs / self._divisors[length - 1]
        if penalties is not None:
            scores = scores + penalties[rows]
        numbers = np.arange(self._n_endings, self._n_endings + ends.size).reshape(ends.shape)
        lengths = np.full(ends.size, length)
        self._endings.append(Endings(found.log_probs.ravel(), lengths, found.parents.ravel(), found.tokens.ravel()))
        self._n_endings += ends.size
        self.count[index] += ends.sum(axis=1)
        scores = np.concatenate([self._scores[index], np.where(ends, scores, -np.inf)], axis=1)
        numbers = np.concatenate([self._numbers[index], numbers], axis=1)
        at = np.arange(len(rows))[:, None], (-scores).argsort(axis=1, kind="stable")[:, : self._most]
        self._scores[index], self._numbers[index] = scores[at], numbers[at]

    def is_done(self, best_live: Scores, length: int, sentences: IntArray) -> Flags:
        """Whether `sentences` are done after steps, [steps, sentences], given what has been added so far.

        Args:
            best_live: the log-probability of the best live hypothesis after each step, [steps, sentences].
            length: the number of its tokens after the first of these steps.
        """
        if not self._endings:
            return best_live == -np.inf
        options, profile = self._options, self._profile
        every = sentences if len(sentences) < len(self._limits) else ALL_SENTENCES
        if self._scores_fall:
            # No continuation can be among the `nbest`: log-probabilities only fall, and the coverage penalty is 0 at best.
            # The length normalisation is best at the limit if the exponent is above 0, and at the next token if not.
            # So it is where no live hypothesis exists, whose log-probability is -inf.
            done = best_live / self._best_divisors(length, every, len(best_live)) <= self._nbest_scores[every]
        else:
            done = best_live == -np.inf
        if profile.done == "all":
            return done
        if profile.done == "places":
            return done | self._ended_ranks[every].all(axis=1)
        count = self.count[every]
        if profile.top_ends and options.length_penalty == options.coverage_penalty == 0 and options.patience == 1:
            return done | (self._top_ended[every] & (count >= options.nbest))
        if profile.done == "enough" or options.early_stopping == "true":
            return done | (count >= self._enough)
        if options.early_stopping == "never" and options.length_penalty > 0:
            divisors = self._limit_divisors[every]
        else:
            divisors = self._divisors[length - 1 : length - 1 + len(best_live), None]
        return done | (best_live / divisors <= self._enough_scores[every])

    def _best_divisors(self, length: int, sentences: IntArray | slice, steps: int) -> Scores:
        """Of the lengths at which log-probabilities give the best scores, as they are after steps from `length` on."""
        if self._is_longest_best:
            return self._limit_divisors[sentences]
        return self._divisors[np.minimum(np.arange(length, length + steps)[:, None], self._limits[sentences] - 1)]

    def best(self, sentences: IntArray) -> tuple[Endings, IntArray]:
        """The `nbest` best ones of `sentences`, one sentence after the other, and their number in each [sentences]."""
        counts = np.minimum(self.count[sentences], self._options.nbest)
        chosen = self._numbers[sentences][np.arange(self._most) < counts[:, None]]
        if not self._endings:
            nothing = np.empty(0, dtype=np.int64)
            return Endings(np.empty(0), nothing, nothing, nothing), counts
        if len(self._endings) > 1:
            self._endings = [Endings.joined(self._endings)]
        return self._endings[0].at(chosen), counts
