"""The finished hypotheses of a beam search, and the criterion that ends a sentence."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from tfexport.runtimes.outputs import Continuations, IntArray
from tfexport.search.backpointers import Endings
from tfexport.search.options import SearchOptions, length_divisor
from tfexport.search.search_batch import ALL_SENTENCES

Scores = NDArray[np.float64]
Flags = NDArray[np.bool_]


@cache
def _divisors(google_length: bool, exponent: float, longest: int) -> Scores:
    """`length_divisor` for lengths from 1, computed one by one, because NumPy's powers have other last bits."""
    return np.array([length_divisor(length, exponent, google_length) for length in range(1, longest + 1)])


class Ends:
    """Candidates of some steps that end an output, at least one. They are ordered by sentence, then by step and rank.

    Args:
        places: the flat indices of these candidates among those of all steps, ascending.
        continuations: the continuations of the steps.

    Attributes:
        groups, steps, ranks: the place of the sentence, the step and the rank of each end, each [ends].
        rows: the sentence of each end, counted from 0 among the sentences that have an end, [ends].
        firsts: the index of the first end of each of these sentences.
        log_probs, parents, tokens: as in `Continuations`, [ends].
    """

    def __init__(self, places: IntArray, continuations: Continuations):
        self.n_steps, self.n_sentences, width = continuations.tokens.shape
        rows = groups = places // width
        steps = np.zeros_like(rows)
        if self.n_steps > 1:
            steps = rows // self.n_sentences
            groups = rows - steps * self.n_sentences
            by_sentence = groups.argsort(kind="stable")
            places, rows, steps, groups = (each.take(by_sentence) for each in (places, rows, steps, groups))
        self.groups = groups
        self.steps = steps
        self.ranks = places - rows * width
        self.log_probs, self.parents = continuations.log_probs.take(places), continuations.parents.take(places)
        self.tokens = continuations.tokens.take(places)
        is_first = begins_run(groups)
        self.rows, self.firsts = is_first.cumsum() - 1, is_first.nonzero()[0]

    @classmethod
    def of(cls, places: IntArray, continuations: Continuations) -> Ends | None:
        """The candidates at `places` that exist; None if there are none."""
        if len(places):
            places = places[continuations.log_probs.take(places) > -np.inf]
        return cls(places, continuations) if len(places) else None

    def __len__(self) -> int:
        return len(self.groups)

    def numbers(self, flags: Flags) -> IntArray:
        """The number of true `flags` [steps, ends] for each sentence, [steps, sentences]."""
        numbers = np.zeros((len(flags), self.n_sentences), dtype=np.int64)
        numbers[:, self.groups.take(self.firsts)] = np.add.reduceat(flags, self.firsts, axis=1, dtype=np.int64)
        return numbers

    def ended_ranks(self, beam: int) -> Flags:
        """The ranks at which an output has ended after each step, [steps, sentences, beam]."""
        ended = np.zeros((self.n_steps, self.n_sentences, beam), dtype=bool)
        ended[self.steps, self.groups, self.ranks] = True
        return np.asarray(np.logical_or.accumulate(ended, axis=0))


def begins_run(numbers: IntArray) -> Flags:
    """Flags for the `numbers` that differ from the number before. `numbers` are ascending, at least one."""
    begins = np.empty(len(numbers), dtype=bool)
    begins[0] = True
    np.not_equal(numbers[1:], numbers[:-1], out=begins[1:])
    return begins


class Known:
    """The finished hypotheses of some sentences, as far as the criterion needs them.

    Args:
        scores: the best scores, ascending, [sentences, most]; -inf fills up missing ones.
        counts: the number of finished hypotheses, [sentences].
        ended_ranks: the ranks among a step's candidates at which an output has ended, [.., sentences, beam].
    """

    def __init__(self, scores: Scores, counts: IntArray, ended_ranks: Flags):
        self.scores = scores
        self.counts = counts
        self.ended_ranks = ended_ranks

    def reaches(self, bounds: Scores, rank: int) -> Flags:
        """Whether the hypothesis of this rank, counted from 1, scores at least `bounds` [steps, sentences]."""
        return bounds <= self.scores[:, -rank]


class KnownBySteps(Known):
    """`Known` after each of some steps.

    Args:
        known: the state before these steps.
        new_scores: the scores of `ends`; -inf for ends that only continue a finished hypothesis.
        ranks: the number of ranks in `ended_ranks`.
    """

    def __init__(self, known: Known, ends: Ends, new_scores: Scores, ranks: int):
        self._ends, self._new_scores = ends, new_scores
        self._some_before = bool(known.counts.any())
        self._there = ends.steps <= np.arange(ends.n_steps)[:, None]
        counts = known.counts + ends.numbers(self._there & (new_scores > -np.inf))
        ended_ranks = known.ended_ranks | ends.ended_ranks(ranks) if ranks else known.ended_ranks
        super().__init__(known.scores, counts, ended_ranks)

    def reaches(self, bounds: Scores, rank: int) -> Flags:
        number = self._ends.numbers(self._there & (self._new_scores >= bounds.take(self._ends.groups, axis=1)))
        if self._some_before:
            number += sum(bounds <= scores for scores in self.scores.T)  # faster than NumPy's sums over short axes
        return number >= rank


class FinishedHypotheses:
    """The finished hypotheses of each sentence of a batch.

    The result depends only on the candidates, not on who ranked them or how many steps came at once.

    Args:
        limits: the largest number of tokens of a hypothesis for each sentence, [batch].
    """

    def __init__(self, options: SearchOptions, limits: IntArray):
        self._options = options
        self._profile = options.search_profile
        self._limits = limits
        self._most = max(options.beam, options.enough_finished)
        self.count: IntArray = np.zeros(len(limits), dtype=np.int64)
        """The number of finished hypotheses of each sentence, [batch]."""
        # The best hypotheses, ascending, as many as a criterion may need. An empty place has score -inf.
        self._scores = np.full((len(limits), self._most), -np.inf)
        self._endings: list[Endings] = []
        self._is_ranked = True
        self._divisors = _divisors(options.search_profile.google_length, options.length_exponent, int(limits.max()) + 1)
        self._limit_divisors = self._divisors.take(limits - 1)
        self._ended_ranks = np.zeros((len(limits), options.beam), dtype=bool)
        self._nbest, self._enough = options.nbest, options.enough_finished
        self._is_longest_best = options.length_exponent > 0
        # A positive bias may raise log-probabilities; without one they only fall.
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
        """Add the hypotheses that end in some steps, for each sentence until it is done or at its limit.

        Of two hypotheses with the same score the earlier one is better, and within a step the one of lower rank.

        Args:
            ends: the candidates that end an output; None if there are none.
            best_live: the log-probability of the best live hypothesis after each step, [steps, sentences].
            length: the number of tokens after the first step.
            at_limit: the sentences that are at their limit after each step, [steps, sentences]; None for none.
            counts: the ends that are new outputs; None for all. The others continue an output that was added before.
            penalties: added to the scores of `ends`.

        Returns:
            Whether each sentence is done after each step, [steps, sentences].
        """
        every = self._index(sentences)
        if ends is None:
            if not self._endings:
                return best_live == -np.inf  # the usual case
            return self._is_done(best_live, length, every, self._known(every))
        lengths, index = ends.steps + length, sentences.take(ends.groups)
        scores = self._scored(ends, lengths, penalties)
        if counts is not None or self._profile.keeps == "first":
            scores[~self._are_new(ends, index, counts)] = -np.inf
        if ends.n_steps == 1:
            if self._asks_ranks:
                self._ended_ranks[sentences] |= ends.ended_ranks(self._options.beam)[0]
            self._keep(ends, scores, index, lengths)
            return self._is_done(best_live, length, every, self._known(every))
        known = KnownBySteps(self._known(every), ends, scores, self._options.beam * self._asks_ranks)
        done = self._is_done(best_live, length, every, known)
        stops = done if at_limit is None else done | at_limit
        last = np.where(stops.any(axis=0), stops.argmax(axis=0), len(stops) - 1)
        if self._asks_ranks:
            self._ended_ranks[sentences] = known.ended_ranks[last, np.arange(len(sentences))]
        scores[ends.steps > last.take(ends.groups)] = -np.inf
        self._keep(ends, scores, index, lengths)
        return done

    def compete(self, live: Ends, sentences: IntArray, *, penalties: Scores | None = None) -> None:
        """Finish the `live` hypotheses of `sentences`, which are at their limit, without an eos.

        Args:
            penalties: as in `take`.
        """
        index = sentences.take(live.groups)
        lengths = self._limits.take(index)
        self._keep(live, self._scored(live, lengths, penalties), index, lengths)

    def _known(self, every: IntArray | slice) -> Known:
        return Known(self._scores[every], self.count[every], self._ended_ranks[every])

    def _index(self, sentences: IntArray) -> IntArray | slice:
        return sentences if len(sentences) < len(self._limits) else ALL_SENTENCES

    def _are_new(self, ends: Ends, index: IntArray, counts: Flags | None) -> Flags:
        """The `ends` of the sentences `index` that are new hypotheses and are kept."""
        new = np.ones(len(ends), dtype=bool) if counts is None else counts[ends.steps, ends.groups, ends.ranks]
        if self._profile.keeps == "first":
            before = new.cumsum() - new
            new &= before - before[ends.firsts][ends.rows] + self.count[index] < self._most
        return new

    def _scored(self, ends: Ends, lengths: IntArray, penalties: Scores | None) -> Scores:
        scores = ends.log_probs / self._divisors.take(lengths - 1)
        return scores if penalties is None else scores + penalties

    def _keep(self, ends: Ends, scores: Scores, index: IntArray, lengths: IntArray) -> None:
        """Add the hypotheses `ends` of the sentences `index` whose score is above -inf."""
        kept = (scores > -np.inf).nonzero()[0]
        endings = Endings(index, scores, ends.log_probs, lengths, ends.parents, ends.tokens)
        endings = endings if len(kept) == len(scores) else endings.at(kept)
        self._endings.append(endings)
        self._is_ranked = False
        if len(ends.firsts) == 1:  # the usual case of small batches, without the arrays for several sentences
            sentence = int(index[0])
            self.count[sentence] += len(kept)
            best = np.concatenate((self._scores[sentence], scores))
            best.sort()
            self._scores[sentence] = best[-self._most :]
            return
        self.count += np.bincount(endings.sentences, minlength=len(self.count))
        columns = np.arange(len(ends)) - (ends.firsts - self._most).take(ends.rows)
        ended = index.take(ends.firsts)
        best = np.full((len(ended), int(columns.max()) + 1), -np.inf)
        best[:, : self._most] = self._scores[ended]
        best[ends.rows, columns] = scores
        best.sort(axis=1)
        self._scores[ended] = best[:, -self._most :]

    def _is_done(self, best_live: Scores, length: int, every: IntArray | slice, known: Known) -> Flags:
        """Whether the sentences `every` are done, given `known`."""
        options, profile = self._options, self._profile
        done = best_live == -np.inf  # no live hypothesis exists
        if not np.count_nonzero(known.counts) and profile.done != "places":
            return done
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
        """The length divisors with which log-probabilities after steps from `length` on give the best scores."""
        if self._is_longest_best:
            return self._limit_divisors[every]
        return self._divisors[np.minimum(np.arange(length, length + steps)[:, None], self._limits[every] - 1)]

    def best(self, sentences: IntArray) -> tuple[Endings, IntArray]:
        """The `nbest` best hypotheses of `sentences`, sentence by sentence, and their number for each [sentences]."""
        counts = np.minimum(self.count[sentences], self._nbest)
        if not self._endings:
            return Endings.none(), counts
        if not self._is_ranked:
            every = Endings.joined(self._endings)
            # The sort is stable: of equal hypotheses the earlier one is better.
            self._endings = [every.at(np.lexsort((-every.scores, every.sentences)))]
            self._is_ranked = True
        ranked, ranks = self._endings[0], np.arange(self._nbest)
        places = ranked.sentences.searchsorted(sentences)[:, None] + ranks
        return ranked.at(places[ranks < counts[:, None]]), counts
