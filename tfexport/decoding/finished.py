"""The finished hypotheses of a beam search, and the criterion by which a sentence is done."""

from __future__ import annotations

from functools import cache

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
    """Candidates of some steps that end an output, one or more: by sentence, and of each in the order in which they come.

    Args:
        places: of the candidates among those of all steps, ascending.
        found: the continuations that they are of.

    Attributes:
        groups, steps, ranks: the places of their sentences, their steps and their ranks, each [ends].
        rows: which of the sentences that have an end each belongs to, counted from 0, [ends].
        firsts: the first end of each of these sentences.
        log_probs, parents, tokens: as in `Continuations`, [ends].
    """

    def __init__(self, places: IntArray, found: Continuations):
        self.n_steps, sentences, width = found.tokens.shape
        rows = places // width
        steps = rows // sentences
        groups = rows - steps * sentences
        if self.n_steps > 1:
            by_sentence = groups.argsort(kind="stable")
            places, rows, steps, groups = (each.take(by_sentence) for each in (places, rows, steps, groups))
        self.groups, self.steps, self.ranks = groups, steps, places - rows * width
        self.log_probs, self.parents, self.tokens = (field.take(places) for field in found)
        is_first = begins_run(groups)
        self.rows, self.firsts = is_first.cumsum() - 1, is_first.nonzero()[0]

    @classmethod
    def of(cls, places: IntArray, found: Continuations) -> Ends | None:
        """Those at `places` that exist; None without any."""
        if len(places):
            places = places[found.log_probs.take(places) > -np.inf]
        return cls(places, found) if len(places) else None

    def __len__(self) -> int:
        return len(self.groups)

    def numbers(self, flags: Flags) -> IntArray:
        """The number of `flags` [.., ends] of each sentence that has an end, [.., sentences]."""
        return np.add.reduceat(flags, self.firsts, axis=-1, dtype=np.int64)

    def ended_ranks(self, sentences: int, beam: int) -> Flags:
        """The ranks at which an output has ended after each step, [steps, sentences, beam]."""
        ended = np.zeros((self.n_steps, sentences, beam), dtype=bool)
        ended[self.steps, self.groups, self.ranks] = True
        return np.asarray(np.logical_or.accumulate(ended, axis=0))


def begins_run(numbers: IntArray) -> Flags:
    """Which of ascending `numbers`, one or more, differ from the one before."""
    begins = np.empty(len(numbers), dtype=bool)
    begins[0] = True
    np.not_equal(numbers[1:], numbers[:-1], out=begins[1:])
    return begins


NO_RANKS: Flags = np.zeros((1, 1, 1), dtype=bool)
"""`ended_ranks` that nobody asks for."""


class Known:
    """What was finished of some sentences, [sentences].

    Args:
        scores: the best, ascending, [sentences, most]; -inf where there are fewer.
        counts: how many.
        ended_ranks: the ranks among a step's candidates at which an output has ended, [.., sentences, beam].
    """

    def __init__(self, scores: Scores, counts: IntArray, ended_ranks: Flags):
        self.scores, self.counts, self.ended_ranks = scores, counts, ended_ranks

    def reaches(self, bounds: Scores, rank: int) -> Flags:
        """Whether the hypothesis of this rank, from 1, is as good as `bounds` [steps, sentences]."""
        return bounds <= self.scores[:, -rank]


class KnownBySteps(Known):
    """The same after each of some steps, of sentences of which each has an end in them.

    Args:
        known: what was finished before.
        new_scores: of the ends.
        is_new: which of them are hypotheses of their own.
        ended_ranks: of these steps.
    """

    def __init__(self, known: Known, ends: Ends, new_scores: Scores, is_new: Flags, ended_ranks: Flags):
        self._ends, self._new_scores = ends, new_scores
        self._some_before = bool(known.counts.any())
        self._there = ends.steps <= np.arange(ends.n_steps)[:, None]
        counts = known.counts + ends.numbers(self._there & is_new)
        super().__init__(known.scores, counts, known.ended_ranks | ended_ranks)

    def reaches(self, bounds: Scores, rank: int) -> Flags:
        of_ends = self._there & (self._new_scores >= bounds.take(self._ends.rows, axis=1))
        number = self._ends.numbers(of_ends)
        if self._some_before:
            number = number + sum(bounds <= scores for scores in self.scores.T)  # NumPy's sums over short axes take longer
        return number >= rank


class FinishedHypotheses:
    """The finished hypotheses of each sentence of a batch.

    It depends on candidates alone, and not on who ranked them or how many steps came at once.

    Args:
        limits: the largest number of tokens of each sentence's hypotheses, [batch].
    """

    def __init__(self, options: SearchOptions, limits: IntArray):
        self._options, self._profile, self._limits = options, options.search_profile, limits
        self._most = max(options.beam, options.enough_finished)
        self.count: IntArray = np.zeros(len(limits), dtype=np.int64)
        """The number of each sentence, [batch]."""
        # The best ones, ascending, no more than a criterion may ask for. A place without one has score -inf.
        self._scores = np.full((len(limits), self._most), -np.inf)
        self._endings: list[Endings] = []
        self._is_ranked = True
        self._divisors = _divisors(options.search_profile.google_length, options.length_exponent, int(limits.max()) + 1)
        self._limit_divisors = self._divisors.take(limits - 1)
        self._ended_ranks = np.zeros((len(limits), options.beam), dtype=bool)
        self._nbest, self._enough = options.nbest, options.enough_finished
        self._is_longest_best = options.length_exponent > 0
        # A bias above 0 may raise log-probabilities; else they only fall.
        self._scores_fall = not any(bias > 0 for _, bias in options.sequence_bias)
        plain = options.length_penalty == options.coverage_penalty == 0 and options.patience == 1
        self._stops_at_top = self._profile.top_ends and plain
        self._asks_ranks = self._stops_at_top or self._profile.done == "places"

    def take(
        self,
        ends: Ends | None,
        best_live: Scores,
        sentences: IntArray,
        length: int,
        at_limit: Flags | None,
        *,
        counts: Flags | None = None,
        penalties: Scores | None = None,
    ) -> Flags:
        """Take what ends in some steps: of each sentence until it is done, or at its limit.

        Of two with the same score the earlier one is better, and in a step that of the lower rank.

        Args:
            ends: the candidates that end an output; None without any.
            best_live: the log-probability of the best live hypothesis after each step, [steps, sentences].
            length: the number of tokens after the first step.
            at_limit: which sentences are at their limit after each step, [steps, sentences]; None for none.
            counts: which of `ends` are new outputs; all when None. The others continue one that was taken before.
            penalties: added to the scores of `ends`.

        Returns:
            Whether each sentence is done after each step, [steps, sentences], with what ended until then.
        """
        if ends is None:
            return self._is_done_before(best_live, length, sentences)
        index = sentences.take(ends.groups.take(ends.firsts))
        lengths = ends.steps + length
        is_new = self._are_new(ends, index, counts)
        scores = np.where(is_new, self._scored(ends, lengths, penalties), -np.inf)
        if ends.n_steps == 1:
            self.count[index] += ends.numbers(is_new)
            if self._asks_ranks:
                self._ended_ranks[sentences] |= ends.ended_ranks(len(sentences), self._options.beam)[0]
            self._keep(ends, scores, sentences, lengths)
            return self._is_done_before(best_live, length, sentences)
        done, known, last = self._is_done_by_steps(ends, scores, is_new, best_live, sentences, length, at_limit)
        every = np.arange(len(index))
        self.count[index] = known.counts[last, every]
        if self._asks_ranks:
            self._ended_ranks[index] = known.ended_ranks[last, every]
        scores[ends.steps > last.take(ends.rows)] = -np.inf
        self._keep(ends, scores, sentences, lengths)
        return done

    def compete(self, live: Ends, sentences: IntArray, *, penalties: Scores | None = None) -> None:
        """Finish the `live` hypotheses of `sentences`, which are at their limit, as they are.

        Args:
            penalties: as in `take`.
        """
        lengths = self._limits.take(sentences.take(live.groups))
        self._keep(live, self._scored(live, lengths, penalties), sentences, lengths)
        self.count[sentences.take(live.groups.take(live.firsts))] += np.bincount(live.rows)

    def _is_done_before(self, best_live: Scores, length: int, sentences: IntArray) -> Flags:
        """Whether sentences are done with what was finished before; as `take`."""
        if not self._endings:
            return best_live == -np.inf
        every = self._index(sentences)
        known = Known(self._scores[every], self.count[every], self._ended_ranks[every])
        return self._is_done(best_live, length, every, known)

    def _index(self, sentences: IntArray) -> IntArray | slice:
        return sentences if len(sentences) < len(self._limits) else ALL_SENTENCES

    def _are_new(self, ends: Ends, index: IntArray, counts: Flags | None) -> Flags:
        """Which of `ends`, of the sentences `index`, are hypotheses of their own, and kept."""
        new = np.ones(len(ends), dtype=bool) if counts is None else counts[ends.steps, ends.groups, ends.ranks]
        if self._profile.keeps == "first":
            before = new.cumsum() - new
            new &= before - (before[ends.firsts] - self.count[index])[ends.rows] < self._most
        return new

    def _scored(self, ends: Ends, lengths: IntArray, penalties: Scores | None) -> Scores:
        scores = ends.log_probs / self._divisors.take(lengths - 1)
        return scores if penalties is None else scores + penalties

    def _keep(self, ends: Ends, scores: Scores, sentences: IntArray, lengths: IntArray) -> None:
        """Add those of the hypotheses `ends` that have a score above -inf."""
        kept = (scores > -np.inf).nonzero()[0]
        fields = sentences.take(ends.groups), scores, ends.log_probs, lengths, ends.parents, ends.tokens
        self._endings.append(Endings(*fields).at(kept))
        self._is_ranked = False
        index = sentences.take(ends.groups.take(ends.firsts))
        columns = np.arange(len(ends)) - (ends.firsts - self._most).take(ends.rows)
        best = np.full((len(index), int(columns.max()) + 1), -np.inf)
        best[:, : self._most] = self._scores[index]
        best[ends.rows, columns] = scores
        best.sort(axis=1)
        self._scores[index] = best[:, -self._most :]

    def _is_done_by_steps(
        self,
        ends: Ends,
        scores: Scores,
        is_new: Flags,
        best_live: Scores,
        sentences: IntArray,
        length: int,
        at_limit: Flags | None,
    ) -> tuple[Flags, KnownBySteps, IntArray]:
        """See `take`.

        Returns:
            Whether each sentence is done after each step; and of those that have an end, [sentences], what is known after
            each step, and the step with which they stop, the last one where they do not.
        """
        done = self._is_done_before(best_live, length, sentences)
        groups = ends.groups.take(ends.firsts)
        index = sentences.take(groups)
        before = Known(self._scores[index], self.count[index], self._ended_ranks[index])
        ranks = ends.ended_ranks(len(sentences), self._options.beam)[:, groups] if self._asks_ranks else NO_RANKS
        known = KnownBySteps(before, ends, scores, is_new, ranks)
        stops = self._is_done(best_live.take(groups, axis=1), length, index, known)
        done[:, groups] = stops
        if at_limit is not None:
            stops = stops | at_limit.take(groups, axis=1)
        return done, known, np.where(stops.any(axis=0), stops.argmax(axis=0), len(stops) - 1)

    def _is_done(self, best_live: Scores, length: int, every: IntArray | slice, known: Known) -> Flags:
        """Whether the sentences `every` are done, of which so much is `known`."""
        options, profile = self._options, self._profile
        done = best_live == -np.inf  # no live hypothesis exists
        if self._scores_fall:
            # No continuation can be among the `nbest`: log-probabilities only fall, and the coverage penalty is 0 at best.
            # The length normalisation is best at the limit if the exponent is above 0, and at the next token if not.
            done |= known.reaches(best_live / self._best_divisors(length, every, len(best_live)), self._nbest)
        if profile.done == "all":
            return done
        if profile.done == "places":
            return done | known.ended_ranks.all(axis=-1)
        if self._stops_at_top:
            return done | (known.ended_ranks[..., 0] & (known.counts >= self._nbest))
        if profile.done == "enough" or options.early_stopping == "true":
            return done | (known.counts >= self._enough)
        if options.early_stopping == "never" and options.length_penalty > 0:
            divisors = self._limit_divisors[every]
        else:
            divisors = self._divisors[length - 1 : length - 1 + len(best_live), None]
        return done | known.reaches(best_live / divisors, self._enough)

    def _best_divisors(self, length: int, every: IntArray | slice, steps: int) -> Scores:
        """Of the lengths at which log-probabilities give the best scores, as they are after steps from `length` on."""
        if self._is_longest_best:
            return self._limit_divisors[every]
        return self._divisors[np.minimum(np.arange(length, length + steps)[:, None], self._limits[every] - 1)]

    def best(self, sentences: IntArray) -> tuple[Endings, IntArray]:
        """The `nbest` best ones of `sentences`, one sentence after the other, and their number in each [sentences]."""
        counts = np.minimum(self.count[sentences], self._nbest)
        if not self._endings:
            return Endings.none(), counts
        if not self._is_ranked:
            every = Endings.joined(self._endings)
            # Stable: of equal ones the earlier is better.
            self._endings = [every.at(np.lexsort((-every.scores, every.sentences)))]
            self._is_ranked = True
        ranked, ranks = self._endings[0], np.arange(self._nbest)
        places = ranked.sentences.searchsorted(sentences)[:, None] + ranks
        return ranked.at(places[ranks < counts[:, None]]), counts
