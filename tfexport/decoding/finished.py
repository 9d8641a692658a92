"""The finished hypotheses of a beam search, and the criterion by which a sentence is done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfexport.decoding.backpointers import Endings
from tfexport.decoding.options import SearchOptions, length_divisor
from tfexport.decoding.steps import ALL_SENTENCES
from tfexport.runtimes.base import Continuations, IntArray

Scores = NDArray[np.float64]
Flags = NDArray[np.bool_]


@cache
def _divisors(google_length: bool, exponent: float, longest: int) -> Scores:
    """`length_divisor` of lengths from 1, computed one by one: NumPy's powers have other last bits."""
    return np.array([length_divisor(length, exponent, google_length) for length in range(1, longest + 1)])


class Ends:
    """Candidates of some steps that end an output: by sentence, and of each in the order in which they come.

    Attributes:
        groups, steps, ranks: the places of their sentences, their steps and their ranks, each [ends].
        rows: which of the sentences that have an end each belongs to, counted from 0, [ends].
        firsts: the first end of each of these sentences.
    """

    def __init__(self, flags: Flags):
        """Those of `flags` [steps, sentences, beam]."""
        self.groups, self.steps, self.ranks = flags.swapaxes(0, 1).nonzero()
        is_first = np.ones(len(self.groups), dtype=bool)
        np.not_equal(self.groups[1:], self.groups[:-1], out=is_first[1:])
        self.rows, self.firsts = is_first.cumsum() - 1, is_first.nonzero()[0]

    def __len__(self) -> int:
        return len(self.groups)

    def endings(self, found: Continuations, lengths: IntArray) -> Endings:
        """These among the continuations `found` [steps, sentences, beam or more]; `lengths` of their tokens, [ends]."""
        log_probs, parents, tokens = found.at((self.steps, self.groups, self.ranks))
        return Endings(log_probs, lengths, parents, tokens)


class Ranking:
    """The best hypotheses of some sentences, those of before and new ones.

    Args:
        scores, numbers: of those before, best first, [sentences, most]. A place without one has score -inf.
        at: new ones of each of these sentences.
        new_scores: of the new ones, [ends]; -inf for what is no output of its own.
        first_number: of the new ones, which are numbered in their order.
    """

    def __init__(self, scores: Scores, numbers: IntArray, at: Ends, new_scores: Scores, first_number: int):
        self._most, self._ends = scores.shape[1], at
        order = np.arange(len(at))
        columns = order - (at.firsts - self._most)[at.rows]
        self._at = at.rows, columns
        new = np.full((len(scores), int(columns.max()) + 1 - self._most), -np.inf)
        self._scores = np.concatenate([scores, new], axis=1)
        self._scores[self._at] = new_scores
        self._numbers = np.zeros(self._scores.shape, dtype=np.int64)
        self._numbers[:, : self._most] = numbers
        self._numbers[self._at] = order + first_number
        self._every = np.arange(len(scores))
        self._sort()

    def _sort(self) -> None:
        """Of equal ones the earlier is better."""
        self._order = (-self._scores).argsort(axis=1, kind="stable")

    def scores_after(self, n_steps: int, ranks: Sequence[int]) -> list[Scores]:
        """The scores of the hypotheses of these ranks, from 1, after each of `n_steps`; each [n_steps, sentences]."""
        # Places of before are always there, and reach each rank.
        found_by = np.zeros(self._scores.shape, dtype=np.int64)
        found_by[self._at] = self._ends.steps
        rows = self._every[:, None]
        there = found_by[rows, self._order] <= np.arange(n_steps)[:, None, None]
        numbered = there.cumsum(axis=2)
        places = [self._order[self._every, (numbered == rank).argmax(axis=2)] for rank in ranks]
        return [self._scores[self._every, place] for place in places]

    def drop_after(self, last: IntArray) -> None:
        """Without those that ended after the step `last` [sentences]."""
        late = self._ends.steps > last[self._ends.rows]
        if late.any():
            self._scores[self._ends.rows[late], self._at[1][late]] = -np.inf
            self._sort()

    def best(self) -> tuple[Scores, IntArray]:
        """Scores and numbers of the best, [sentences, most]."""
        at = self._every[:, None], self._order[:, : self._most]
        return self._scores[at], self._numbers[at]


class Known(NamedTuple):
    """What was finished after each of some steps. Each field is [steps, sentences], or [1, sentences] where it stays."""

    counts: IntArray
    nbest_scores: Scores
    """The worst of the `nbest` best scores."""
    enough_scores: Scores
    """The worst of as many as are enough."""
    ended_ranks: Flags
    """The ranks among a step's candidates at which an output has ended, [.., beam]. Only where the profile asks for them."""


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
        self._ended_ranks = np.zeros((len(limits), options.beam), dtype=bool)
        self._ranks = options.nbest, options.enough_finished
        self._enough, self._is_longest_best = options.enough_finished, options.length_exponent > 0
        # A bias above 0 may raise log-probabilities; else they only fall.
        self._scores_fall = not any(bias > 0 for _, bias in options.sequence_bias)
        plain = options.length_penalty == options.coverage_penalty == 0 and options.patience == 1
        self._stops_at_top = self._profile.top_ends and plain
        self._asks_ranks = self._stops_at_top or self._profile.done == "places"

    def take(
        self,
        ends: Flags,
        found: Continuations,
        best_live: Scores,
        sentences: IntArray,
        length: int,
        at_limit: Flags,
        *,
        counts: Flags | None = None,
        penalties: Scores | None = None,
    ) -> Flags:
        """Take what ends in some steps: of each sentence until it is done, or at its limit.

        Of two with the same score the earlier one is better, and in a step that of the lower rank.

        Args:
            ends: the candidates that end an output, [steps, sentences, beam].
            found: continuations of hypotheses, [steps, sentences, beam or more].
            best_live: the log-probability of the best live hypothesis after each step, [steps, sentences].
            length: the number of tokens after the first step.
            at_limit: which sentences are at their limit after each step, [steps, sentences].
            counts: which of `ends` are new outputs; all when None. The others continue one that was taken before.
            penalties: added to the scores, of each of `ends` in the order of `Ends`.

        Returns:
            Whether each sentence is done after each step, [steps, sentences], with what ended until then.
        """
        at = Ends(ends)
        if not len(at):
            return self.is_done(best_live, length, sentences)
        groups = at.groups[at.firsts]
        index = sentences[groups]
        new = None if counts is None else counts[at.steps, at.groups, at.ranks]
        if self._profile.keeps == "first":
            new = np.ones(len(at), dtype=bool) if new is None else new
            before = new.cumsum() - new
            new = new & (before - (before[at.firsts] - self.count[index])[at.rows] < self._most)
        ranking = self._ranking(at, at.endings(found, at.steps + length), index, new, penalties)
        if len(ends) == 1:
            self.count[index] += np.bincount(at.rows, new).astype(np.int64)
            self._scores[index], self._numbers[index] = ranking.best()
            if self._asks_ranks:
                self._ended_ranks[sentences] |= ends[0]
            return self.is_done(best_live, length, sentences)
        every = self._index(sentences)
        known = self._after(ends, at, new, ranking, every)
        done = self._is_done(best_live, length, every, known)
        stops = done | at_limit
        last = np.where(stops.any(axis=0), stops.argmax(axis=0), len(stops) - 1)[groups]
        ranking.drop_after(last)
        self.count[index] = known.counts[last, groups]
        self._scores[index], self._numbers[index] = ranking.best()
        if self._asks_ranks:
            self._ended_ranks[index] = known.ended_ranks[last, groups]
        return done

    def compete(
        self, exists: Flags, live: Continuations, sentences: IntArray, *, penalties: Scores | None = None
    ) -> None:
        """Finish the `live` hypotheses of `sentences`, which are at their limit, as they are.

        Args:
            exists: which there are, [1, sentences, beam].
            live: [1, sentences, beam]
            penalties: as in `take`.
        """
        at = Ends(exists)
        if not len(at):
            return
        index = sentences[at.groups[at.firsts]]
        ranking = self._ranking(at, at.endings(live, self._limits[sentences][at.groups]), index, None, penalties)
        self._scores[index], self._numbers[index] = ranking.best()
        self.count[sentences] += exists[0].sum(axis=1)

    def is_done(self, best_live: Scores, length: int, sentences: IntArray) -> Flags:
        """`take` of steps in which nothing ends."""
        every = self._index(sentences)
        if not self._endings:
            return best_live == -np.inf
        nbest, enough = (self._scores[None, every, rank - 1] for rank in self._ranks)
        return self._is_done(
            best_live, length, every, Known(self.count[None, every], nbest, enough, self._ended_ranks[None, every])
        )

    def _index(self, sentences: IntArray) -> IntArray | slice:
        return sentences if len(sentences) < len(self._limits) else ALL_SENTENCES

    def _ranking(
        self, at: Ends, endings: Endings, index: IntArray, new: Flags | None, penalties: Scores | None
    ) -> Ranking:
        """Of the sentences `index`, with `endings`, of which `new` are outputs of their own."""
        scores = endings.log_probs / self._divisors[endings.lengths - 1]
        if penalties is not None:
            scores = scores + penalties
        if new is not None:
            scores[~new] = -np.inf
        ranking = Ranking(self._scores[index], self._numbers[index], at, scores, self._n_endings)
        self._endings.append(endings)
        self._n_endings += len(scores)
        return ranking

    def _after(self, ends: Flags, at: Ends, new: Flags | None, ranking: Ranking, every: IntArray | slice) -> Known:
        """What was finished after each step, in which the candidates `ends` do."""
        steps, sentences, _ = ends.shape
        counts = np.bincount(at.steps * sentences + at.groups, new, steps * sentences).astype(np.int64)
        count = counts.reshape(steps, sentences).cumsum(axis=0) + self.count[every]
        worst, groups = [], at.groups[at.firsts]
        for rank, scores in zip(self._ranks, ranking.scores_after(steps, self._ranks), strict=True):
            of_all = self._scores[None, every, rank - 1].repeat(steps, axis=0)
            of_all[:, groups] = scores
            worst.append(of_all)
        nbest, enough = worst
        ended = np.logical_or.accumulate(ends, axis=0) | self._ended_ranks[every] if self._asks_ranks else ends
        return Known(count, nbest, enough, ended)

    def _is_done(self, best_live: Scores, length: int, every: IntArray | slice, known: Known) -> Flags:
        options, profile = self._options, self._profile
        if self._scores_fall:
            # No continuation can be among the `nbest`: log-probabilities only fall, and the coverage penalty is 0 at best.
            # The length normalisation is best at the limit if the exponent is above 0, and at the next token if not.
            # So it is where no live hypothesis exists, whose log-probability is -inf.
            done = best_live / self._best_divisors(length, every, len(best_live)) <= known.nbest_scores
        else:
            done = best_live == -np.inf
        if profile.done == "all":
            return done
        if profile.done == "places":
            return done | known.ended_ranks.all(axis=2)
        if self._stops_at_top:
            return done | (known.ended_ranks[..., 0] & (known.counts >= options.nbest))
        if profile.done == "enough" or options.early_stopping == "true":
            return done | (known.counts >= self._enough)
        if options.early_stopping == "never" and options.length_penalty > 0:
            divisors = self._limit_divisors[every]
        else:
            divisors = self._divisors[length - 1 : length - 1 + len(best_live), None]
        return done | (best_live / divisors <= known.enough_scores)

    def _best_divisors(self, length: int, every: IntArray | slice, steps: int) -> Scores:
        """Of the lengths at which log-probabilities give the best scores, as they are after steps from `length` on."""
        if self._is_longest_best:
            return self._limit_divisors[every]
        return self._divisors[np.minimum(np.arange(length, length + steps)[:, None], self._limits[every] - 1)]

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
