"""Beam search, with the variations of other toolkits that `decoding/profiles.py` describes.

    live = {[bos]}; finished = {}
    until the sentence is done, or the length limit:
        candidates = the 2 * beam best continuations of the live hypotheses, by summed log-probability
        live       = the best `beam` candidates that do not end in eos
        finished  += the first `beam` candidates, those that end in eos
    return the best of finished, by score

There are 2 * beam candidates because each live hypothesis ends in eos at most once: at least `beam` of them continue. With
other tokens that end an output beside eos there are as many more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfexport.decoding.attention_trace import AttentionTrace
from tfexport.decoding.finished import FinishedHypotheses
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
from tfexport.decoding.token_rules import LogProbs, TokenRules
from tfexport.runtimes.base import Ask, Best, IntArray, Told


class Continuations(NamedTuple):
    """Tokens that continue live hypotheses, best first; each field is [sentences, count]."""

    log_probs: LogProbs
    """Of the whole hypothesis, summed over its tokens; -inf where it does not exist."""
    parents: IntArray
    """The beam that each token continues."""
    tokens: IntArray


class BeamBatch:
    """A beam search between two steps: the hypotheses of a batch, the live ones, `beam` for each sentence, and the finished
    ones. A `SearchBatch`.

    Args:
        limits: the largest number of tokens of each sentence's outputs, [batch].
        trace: records cross-attention, where the search needs it.

    Attributes:
        finished: of each source of the batch.
        n_candidates: continuations of a sentence among which the next live hypotheses are.
    """

    def __init__(self, rules: TokenRules, limits: IntArray, options: SearchOptions, trace: AttentionTrace | None):
        config, batch, self._beam = rules.config, len(limits), options.beam
        self._rules = rules
        self._options, self._profile, self._trace = options, options.search_profile, trace
        self._bos_id, self._end_ids = config.bos_id, options.end_ids(config)
        self.n_candidates = (1 + len(self._end_ids)) * self._beam
        self._limits, self._shortest_limit = limits, int(limits.min())
        self._length = 0
        # A hypothesis that does not exist has log-probability -inf: at first each sentence has one.
        log_probs = np.full((batch, self._beam), -np.inf)
        log_probs[:, 0] = 0.0
        bos = np.full((batch, self._beam), config.bos_id, dtype=np.int64)
        self._live = Continuations(log_probs, np.zeros_like(bos), bos)
        self._past = Backpointers(limits.max(), batch, self._beam)
        self._same_beams, self._first_rows = np.arange(self._beam), np.arange(batch)[:, None] * self._beam
        self.sentences = np.arange(batch)
        self.tokens: IntArray = bos.ravel()
        self.ended = NO_SENTENCES
        self._is_done = False
        self.finished = [FinishedHypotheses(options, limit) for limit in limits.tolist()]

    @property
    def is_done(self) -> bool:
        return self._is_done

    def ask(self) -> Ask:
        self._ask = self._rules.asks(self.n_candidates, self._length + 1, self.sentences)
        return self._ask

    def advance(self, told: Told, attention: TellAttention) -> IntArray | None:
        length = self._length + 1
        best = self._rules.best(told, self._ask, self.n_candidates, length, self.sentences, self.history)
        assert isinstance(best, Best)  # a beam compares probabilities
        if self._trace:
            self._trace.add(attention(), self.sentences)
        candidates = self.best_continuations(best)
        is_eos = self.find_eos(candidates)
        self.extend(candidates, is_eos)
        self.finish_ended(candidates, is_eos)
        self.finish_live_at_limit()
        unfinished = self.find_unfinished()
        self._is_done = not any(unfinished)
        return self.keep(unfinished)

    def drop(self, indices: IntArray) -> None:
        stays = ~np.isin(self.sentences, indices)
        self._is_done = not stays.any()
        self._keep(np.flatnonzero(stays))

    def outputs(self, index: int) -> list[Hypothesis]:
        return self.finished[index].best()

    def best_continuations(self, best: Best) -> Continuations:
        """The `n_candidates` best continuations of each sentence, given the `best` tokens of each row."""
        candidates = rank_continuations(self._live.log_probs, best, self.n_candidates)
        if self._profile.narrows_beam:
            places = self._beam - np.array([len(self.finished[index]) for index in self.sentences])
            candidates.log_probs[np.arange(candidates.log_probs.shape[1]) >= places[:, None]] = -np.inf
        return candidates

    def find_eos(self, candidates: Continuations) -> NDArray[np.bool_] | None:
        """Which of the candidates end in eos; None where none of the first `beam` does."""
        is_eos = is_end(candidates.tokens, self._end_ids)
        return is_eos if is_eos[:, : self._beam].any() else None

    def extend(self, candidates: Continuations, is_eos: NDArray[np.bool_] | None) -> None:
        """The best `beam` candidates that do not end become the live hypotheses."""
        log_probs, parents, tokens = candidates
        if is_eos is None or self._profile.continues_past_eos:
            beams = slice(self._beam)
            self._live = Continuations(log_probs[:, beams], parents[:, beams], tokens[:, beams])
        else:
            going_on = np.argsort(is_eos, axis=1, kind="stable")[:, : self._beam]  # keeps the order of the others
            at = np.arange(len(going_on))[:, None], going_on
            self._live = Continuations(log_probs[at], parents[at], tokens[at])
        self._past.add(self._length, self.sentences, self._live)
        self._length += 1

    def finish_ended(self, candidates: Continuations, is_eos: NDArray[np.bool_] | None) -> None:
        """The first `beam` candidates are finished, those that end in eos or, by most profiles, at the length limit."""
        may_be_at_limit = self._length >= self._shortest_limit and self._profile.at_limit != "compete"
        if is_eos is None and not may_be_at_limit:
            return
        ends = np.zeros((len(self.sentences), self._beam), dtype=bool) if is_eos is None else is_eos[:, : self._beam]
        if may_be_at_limit:
            ends = ends | (self._limits[self.sentences] == self._length)[:, None]
        exists = candidates.log_probs[:, : self._beam] > -np.inf
        for group, rank in np.argwhere(ends & exists).tolist():
            self._finish(group, candidates, rank)

    def finish_live_at_limit(self) -> None:
        """At the length limit, by our own profile, the live hypotheses compete with the finished ones."""
        if self._length < self._shortest_limit or self._profile.at_limit != "compete":
            return
        log_probs = self._live.log_probs
        for group in np.flatnonzero(self._limits[self.sentences] == self._length).tolist():
            if not self.finished[self.sentences[group]].is_done(float(log_probs[group, 0]), self._length):
                for rank in np.flatnonzero(np.isfinite(log_probs[group])).tolist():
                    self._finish(group, self._live, rank)

    def find_unfinished(self) -> list[bool]:
        """Which sentences continue.

        Raises:
            TfexportError: a sentence has no live hypothesis and no finished one.
        """
        may_be_at_limit = self._length >= self._shortest_limit
        unfinished = []
        best_live = self._live.log_probs[:, 0].tolist()
        for index, log_prob in zip(self.sentences.tolist(), best_live, strict=True):
            finished = self.finished[index]
            if log_prob == -np.inf and not len(finished):
                raise no_token_error()
            at_limit = may_be_at_limit and self._limits[index] == self._length
            unfinished.append(not (at_limit or finished.is_done(log_prob, self._length)))
        return unfinished

    def keep(self, unfinished: list[bool]) -> IntArray | None:
        """Drop the other sentences. Returns which row of the last step each live hypothesis continues, [rows]; None where
        every row continues itself."""
        if all(unfinished):
            self.ended = NO_SENTENCES
            self.tokens = self._live.tokens.ravel()
            if not (self._live.parents != self._same_beams).any():
                return None
            return (self._first_rows[: len(self.sentences)] + self._live.parents).ravel()
        live = np.array(unfinished)
        self.ended = self.sentences[~live]
        kept = rows_to_keep(live)
        self._keep(kept)
        return (self._first_rows[kept] + self._live.parents).ravel()

    def _keep(self, kept: IntArray) -> None:
        self.sentences = self.sentences[kept]
        log_probs, parents, tokens = self._live
        self._live = Continuations(log_probs[kept], parents[kept], tokens[kept])
        self.tokens = self._live.tokens.ravel()

    def history(self, length: int, sentences: IntArray) -> IntArray:
        """The tokens before `length` of each live hypothesis of `sentences`, bos first, [rows, length]."""
        past, _ = self._past.read_all(sentences, length - 1)
        past = past.reshape(len(sentences) * self._beam, -1)
        return np.concatenate([np.full((len(past), 1), self._bos_id), past], axis=1)

    def stable_prefix(self, index: int) -> tuple[IntArray, LogProbs]:
        """What all hypotheses of source `index` have in common that may become its best: the live ones, and the best
        finished one."""
        group = np.flatnonzero(self.sentences == index)  # none where the sentence is finished
        exists = np.isfinite(self._live.log_probs[group])
        ids, log_probs = (found[exists] for found in self._past.read_all(self.sentences[group], self._length))
        outputs = [*zip(ids, np.diff(log_probs, prepend=0.0), strict=True)]
        outputs += [(np.array(one.ids), np.array(one.token_log_probs)) for one in self.finished[index].best()[:1]]
        shortest = min(len(tokens) for tokens, _ in outputs)
        every = np.stack([tokens[:shortest] for tokens, _ in outputs])
        common = int(np.logical_and.accumulate((every == every[0]).all(axis=0)).sum())
        return outputs[0][0][:common], outputs[0][1][:common]

    def _finish(self, group: int, found: Continuations, rank: int) -> None:
        """Continuation `rank` of those `found` for a group of rows is finished."""
        log_probs, parents, tokens = found
        index = int(self.sentences[group])
        log_prob, last = float(log_probs[group, rank]), int(tokens[group, rank])
        ids, beams = self._past.read(index, int(parents[group, rank]), self._length - 1)
        steps: Sequence[float] = ()
        if self._options.token_scores:
            steps = np.diff([0.0, *self._past.log_probs(index, beams[1:]), log_prob]).tolist()
        self.finished[index].add(
            (*ids, last),
            log_prob,
            rank=rank,
            end_ids=self._end_ids,
            token_log_probs=steps,
            attention=self._trace.hypothesis(index, beams) if self._trace else None,
        )


class Backpointers:
    """The live hypotheses after each step, as a token and the beam of the step before that it continues. No step copies the
    tokens of a hypothesis; they are read backwards when they are needed.
    """

    def __init__(self, steps: int, batch: int, beam: int):
        self._tokens = np.empty((steps, batch, beam), dtype=np.int64)
        self._parents = np.empty((steps, batch, beam), dtype=np.int64)
        self._log_probs = np.empty((steps, batch, beam))

    def add(self, step: int, sentences: IntArray, live: Continuations) -> None:
        """Add the hypotheses of `sentences` that are `live` after a step."""
        at = step, sentences if len(sentences) < self._tokens.shape[1] else ALL_SENTENCES
        self._log_probs[at], self._parents[at], self._tokens[at] = live

    def read(self, index: int, beam: int, length: int) -> tuple[list[int], list[int]]:
        """One hypothesis of source `index`: the one in `beam` after `length` tokens.

        Returns:
            Its tokens [length], and the beam that it was in before the first step and after each, [length + 1].
        """
        tokens, parents = self._tokens[:length, index].tolist(), self._parents[:length, index].tolist()
        ids, beams = [], [beam]
        for step in range(length - 1, -1, -1):
            ids.append(tokens[step][beams[-1]])
            beams.append(parents[step][beams[-1]])
        return ids[::-1], beams[::-1]

    def read_all(self, sentences: IntArray, length: int) -> tuple[IntArray, LogProbs]:
        """All hypotheses of some sentences after `length` tokens: their tokens, and their log-probabilities after each; both
        [sentences, beam, length]."""
        beam = self._tokens.shape[2]
        ids = np.empty((len(sentences), beam, length), dtype=np.int64)
        log_probs, beams = np.empty(ids.shape), np.tile(np.arange(beam), (len(sentences), 1))
        for step in range(length - 1, -1, -1):
            at = step, sentences[:, None], beams
            ids[..., step], log_probs[..., step], beams = self._tokens[at], self._log_probs[at], self._parents[at]
        return ids, log_probs

    def log_probs(self, index: int, beams: Sequence[int]) -> LogProbs:
        """The log-probabilities of the hypothesis of source `index` that is in `beams[step]` after each step."""
        return self._log_probs[np.arange(len(beams)), index, beams]


def rank_continuations(log_probs: LogProbs, best: Best, count: int) -> Continuations:
    """The `count` best continuations of each sentence, the lower beam first among equals.

    Args:
        log_probs: of the live hypotheses, [sentences, beam].
        best: their next tokens, [sentences * beam, tokens].
    """
    totals = (log_probs.reshape(-1, 1) + best.log_probs).reshape(len(log_probs), -1)
    order = (-totals).argsort(axis=1, kind="stable")[:, :count]
    # In the flat arrays; one sentence alone begins at 0.
    places = order if len(order) == 1 else order + np.arange(0, totals.size, totals.shape[1])[:, None]
    return Continuations(totals.take(places), order // best.ids.shape[1], best.ids.take(places))
