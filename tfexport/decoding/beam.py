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

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.decoding.ahead import SearchAhead
from tfexport.decoding.attention_trace import AttentionTrace, coverage
from tfexport.decoding.finished import FinishedHypotheses
from tfexport.decoding.hypothesis import Hypothesis
from tfexport.decoding.options import SearchOptions
from tfexport.decoding.steps import ALL_SENTENCES, Steps, is_end, no_token_error, rows_to_keep
from tfexport.decoding.token_rules import LogProbs, TokenRules
from tfexport.runtimes.base import Best, Continuations, IntArray, State


def beam_search(
    rules: TokenRules,
    state: State,
    limits: IntArray,
    options: SearchOptions,
    trace: AttentionTrace | None,
    ahead: SearchAhead | None = None,
) -> Steps:
    """The `options.nbest` best hypotheses of each sentence.

    Args:
        state: of the batch, before any token.
        limits: the largest number of tokens of each sentence's outputs, [batch].
        trace: records cross-attention, where the search needs it.
        ahead: lets the runtime make several steps by itself where it can; None to see each step.
    """
    beams = Beams(rules.config, limits, options, trace)
    while True:
        request = None
        if ahead is not None:
            live = beams.tokens, beams.log_probs
            request = ahead.request(beams.length, beams.sentences, *live, beams.n_candidates)
        if request is not None:
            found, state = rules.ahead(state, request)
        else:
            best, state = rules.best(
                state, beams.tokens, beams.n_candidates, beams.length + 1, beams.sentences, beams.history
            )
            if trace:
                trace.add(state.attention, beams.sentences)
            found = beams.best_continuations(best)
        unfinished = beams.advance(found)
        if not unfinished.any():
            break
        rows = beams.keep(unfinished, in_order=request is not None)
        if rows is not None:
            state = state.select(rows)
        yield beams.stable_prefix
    return beams.hypotheses()


class Beams:
    """The hypotheses of a batch: the live ones, `beam` for each sentence, and the finished ones.

    Attributes:
        sentences: [sentences], the index of the source of each group of rows: row b * beam + k is beam k of sentences[b].
        length: the number of tokens of the live hypotheses.
        tokens: [rows], the last token of each live hypothesis.
        log_probs: of the live hypotheses, best first, [sentences, beam]; -inf where one does not exist.
        finished: of all sources of the batch.
        n_candidates: continuations of a sentence among which the next live hypotheses are.
    """

    def __init__(self, config: ModelConfig, limits: IntArray, options: SearchOptions, trace: AttentionTrace | None):
        batch, self._beam = len(limits), options.beam
        self._options, self._profile, self._trace = options, options.search_profile, trace
        self._bos_id, self._end_ids = config.bos_id, options.end_ids(config)
        self.n_candidates = (1 + len(self._end_ids)) * self._beam
        self._limits, self._shortest_limit, self._longest_limit = limits, int(limits.min()), int(limits.max())
        self.length = 0
        # At first each sentence has one hypothesis.
        self.log_probs: LogProbs = np.full((batch, self._beam), -np.inf)
        self.log_probs[:, 0] = 0.0
        self._parents: IntArray = np.zeros((batch, self._beam), dtype=np.int64)
        self._same_beams, self._first_rows = np.arange(self._beam), np.arange(batch)[:, None] * self._beam
        self.sentences = np.arange(batch)
        self.tokens: IntArray = np.full(batch * self._beam, config.bos_id, dtype=np.int64)
        self._past = Backpointers(self._longest_limit, batch, self._beam)
        self._continues_end = np.zeros((batch, self._beam), dtype=bool)
        """Which live hypotheses have an end among their tokens."""
        self.finished = FinishedHypotheses(options, limits)

    def best_continuations(self, best: Best) -> Continuations:
        """The `n_candidates` best continuations of each sentence, given the `best` tokens of each row; of one step."""
        candidates = rank_continuations(self.log_probs, best, self.n_candidates)
        if self._profile.narrows_beam:
            places = self._beam - self.finished.count[self.sentences]
            candidates.log_probs[np.arange(candidates.log_probs.shape[1]) >= places[:, None]] = -np.inf
        return candidates.at(None)

    def advance(self, found: Continuations) -> NDArray[np.bool_]:
        """Take one step or several; what a sentence's steps found after it was done is dropped.

        Args:
            found: the best continuations of each step, [steps, sentences, n_candidates].

        Returns:
            Which sentences continue, [sentences].

        Raises:
            TfexportError: a sentence has no live hypothesis and no finished one.
        """
        steps = min(len(found.tokens), self._longest_limit - self.length)
        found = found.at(slice(steps))
        lengths = np.arange(self.length + 1, self.length + 1 + steps)
        is_eos = is_end(found.tokens, self._end_ids)
        live = self._going_on(found, is_eos)
        self._past.add(self.length, self.sentences, live)
        self.log_probs, self._parents = live.log_probs[-1], live.parents[-1]
        self.tokens = live.tokens[-1].ravel()
        self.length += steps
        return self._finish(found, is_eos, live, lengths)

    def _going_on(self, found: Continuations, is_eos: NDArray[np.bool_]) -> Continuations:
        """The best `beam` continuations of each step that do not end: [steps, sentences, beam]."""
        if self._profile.continues_past_eos or not is_eos[..., : self._beam].any():
            return found.at((..., slice(self._beam)))
        going_on = is_eos.argsort(axis=-1, kind="stable")[..., : self._beam]  # keeps the order of the others
        steps, sentences, _ = is_eos.shape
        at = np.arange(steps)[:, None, None], np.arange(sentences)[:, None], going_on
        return found.at(at)

    def _finish(
        self, found: Continuations, is_eos: NDArray[np.bool_], live: Continuations, lengths: IntArray
    ) -> NDArray[np.bool_]:
        """Finish what ends in each step; returns which sentences continue after the last."""
        exists = found.log_probs[..., : self._beam] > -np.inf
        ends = is_eos[..., : self._beam] & exists
        best_live = live.log_probs[..., 0]
        at_limit: NDArray[np.bool_] = np.zeros(best_live.shape, dtype=bool)
        if lengths[-1] >= self._shortest_limit:
            at_limit = np.asarray(self._limits[self.sentences] == lengths[:, None])
            if self._profile.at_limit != "compete":
                # The first `beam` candidates are finished, whatever their last token is.
                ends = ends | (at_limit[..., None] & exists)
        unfinished = np.ones(len(self.sentences), dtype=bool)
        some_end: Any = ends.any(axis=(1, 2)).tolist()
        some_stop: Any = []
        first, done = 0, at_limit  # of the steps since something was finished
        for step, length in enumerate(lengths.tolist()):
            candidates = found.at(step)
            counts = self._new_outputs(candidates, is_eos[step])
            if some_end[step]:
                self._add(ends[step] & unfinished[:, None], candidates, length, counts)
            if some_end[step] or not step:
                last = next((other for other in range(step + 1, len(lengths)) if some_end[other]), len(lengths))
                first, done = step, self.finished.is_done(best_live[step:last], lengths[step:last], self.sentences)
                some_stop = (done | at_limit[step:last]).any(axis=1).tolist()
            if not some_stop[step - first]:
                continue
            stops = unfinished & (done[step - first] | at_limit[step])
            if self._profile.at_limit == "compete" and (competes := stops & ~done[step - first]).any():
                ranked = live.at(step)
                self._add(competes[:, None] & np.isfinite(ranked.log_probs), ranked, length)
            if (self.finished.count[self.sentences[stops & (best_live[step] == -np.inf)]] == 0).any():
                raise no_token_error()
            unfinished &= ~stops
            if not unfinished.any():
                break
        return unfinished

    def _new_outputs(self, candidates: Continuations, is_eos: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Which of the first `beam` candidates of a step do not continue an output; None for all."""
        if not self._profile.continues_past_eos:
            return None
        parents = candidates.parents[:, : self._beam]
        continues = self._continues_end[np.arange(len(parents))[:, None], parents]
        self._continues_end = continues | is_eos[:, : self._beam]
        return np.asarray(~continues)

    def _add(
        self,
        ends: NDArray[np.bool_],
        found: Continuations,
        length: int,
        counts: NDArray[np.bool_] | None = None,
    ) -> None:
        """The hypotheses `ends` [sentences, beam] of those `found` in a step are finished."""
        if not ends.any():
            return
        penalties = None
        if self._options.coverage_penalty:
            assert self._trace is not None
            penalties = np.zeros(ends.shape)
            for group, rank in np.argwhere(ends).tolist():
                index, parent = self.sentences[group : group + 1], found.parents[group, rank, None]
                path = self._past.read(index, parent, np.array([length - 1]))
                attention = self._trace.hypothesis(int(index[0]), path.beams[0, :length].tolist())
                penalties[group, rank] = self._options.coverage_penalty * coverage(attention)
        self.finished.add(ends, found, self.sentences, length, counts=counts, penalties=penalties)

    def keep(self, unfinished: NDArray[np.bool_], *, in_order: bool) -> IntArray | None:
        """Drop the other sentences. Returns which row of the last step each live hypothesis continues, [rows]; None where
        every row continues itself.

        Args:
            in_order: the runtime has reordered the beams already.
        """
        parents = np.broadcast_to(self._same_beams, self._parents.shape) if in_order else self._parents
        if unfinished.all():
            if in_order or not (parents != self._same_beams).any():
                return None
            return (self._first_rows[: len(self.sentences)] + parents).ravel()
        kept = rows_to_keep(unfinished)
        self.sentences, self._continues_end = self.sentences[kept], self._continues_end[kept]
        self.log_probs, self._parents = self.log_probs[kept], self._parents[kept]
        self.tokens = self.tokens.reshape(-1, self._beam)[kept].ravel()
        return (self._first_rows[kept] + parents[kept]).ravel()

    def history(self, length: int, sentences: IntArray) -> IntArray:
        """The tokens before `length` of each live hypothesis of `sentences`, bos first, [rows, length]."""
        past, _ = self._past.read_all(sentences, length - 1)
        past = past.reshape(len(sentences) * self._beam, -1)
        return np.concatenate([np.full((len(past), 1), self._bos_id), past], axis=1)

    def stable_prefix(self, index: int) -> tuple[IntArray, LogProbs]:
        """What all hypotheses of source `index` have in common that may become its best: the live ones, and the best
        finished one."""
        group = np.flatnonzero(self.sentences == index)  # none where the sentence is finished
        exists = np.isfinite(self.log_probs[group])
        ids, log_probs = (found[exists] for found in self._past.read_all(self.sentences[group], self.length))
        outputs = [*zip(ids, np.diff(log_probs, prepend=0.0), strict=True)]
        outputs += [(found.ids, found.steps) for found in self._outputs(np.array([index]))[0][:1]]
        shortest = min(len(tokens) for tokens, _ in outputs)
        every = np.stack([tokens[:shortest] for tokens, _ in outputs])
        common = int(np.logical_and.accumulate((every == every[0]).all(axis=0)).sum())
        return outputs[0][0][:common], outputs[0][1][:common]

    def hypotheses(self) -> list[list[Hypothesis]]:
        """The `nbest` best finished ones of each source."""
        options, trace = self._options, self._trace
        return [
            [
                Hypothesis.scored(
                    (ids := tuple(output.ids.tolist())),
                    output.log_prob,
                    options,
                    finished=ids[-1] in self._end_ids,
                    token_log_probs=output.steps if options.token_scores else (),
                    attention=trace.hypothesis(index, output.beams.tolist()) if trace else None,
                )
                for output in outputs
            ]
            for index, outputs in enumerate(self._outputs(np.arange(len(self._limits))))
        ]

    def _outputs(self, sentences: IntArray) -> list[list[Output]]:
        """The `nbest` best finished hypotheses of `sentences`."""
        ended, counts = self.finished.best(sentences)
        path = self._past.read(sentences.repeat(counts), ended.parents, ended.lengths - 1)
        rows = np.arange(len(ended.tokens)), ended.lengths - 1
        path.ids[rows], path.log_probs[rows] = ended.tokens, ended.log_probs
        found = [
            Output(path.ids[row, :length], log_prob, path.log_probs[row, :length], path.beams[row, :length])
            for row, (length, log_prob) in enumerate(zip(ended.lengths.tolist(), ended.log_probs.tolist(), strict=True))
        ]
        ends = counts.cumsum().tolist()
        return [found[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]


class Output(NamedTuple):
    """A finished hypothesis, token by token."""

    ids: IntArray
    log_prob: float
    sums: LogProbs
    """The log-probability after each token."""
    beams: IntArray
    """The beam that each token continues."""

    @property
    def steps(self) -> LogProbs:
        """The log-probability of each token."""
        return np.diff(self.sums, prepend=0.0)


class Paths(NamedTuple):
    """Hypotheses as they grew, in arrays of one length. What follows the end of one means nothing."""

    ids: IntArray
    """[hypotheses, length + 1]; the last one is empty."""
    log_probs: LogProbs
    """After each token, [hypotheses, length + 1]; the last one is empty."""
    beams: IntArray
    """The beam before the first token and after each, [hypotheses, length + 1]."""


class Backpointers:
    """The live hypotheses after each step, as a token and the beam of the step before that it continues. No step copies the
    tokens of a hypothesis; they are read backwards when they are needed.
    """

    def __init__(self, steps: int, batch: int, beam: int):
        self._tokens = np.empty((steps, batch, beam), dtype=np.int64)
        self._parents = np.empty((steps, batch, beam), dtype=np.int64)
        self._log_probs = np.empty((steps, batch, beam))

    def add(self, step: int, sentences: IntArray, live: Continuations) -> None:
        """Add the hypotheses of `sentences` that are `live` [steps, sentences, beam] after this step and the next ones."""
        every = sentences if len(sentences) < self._tokens.shape[1] else ALL_SENTENCES
        at = slice(step, step + len(live.tokens)), every
        self._log_probs[at], self._parents[at], self._tokens[at] = live

    def read(self, sentences: IntArray, beams: IntArray, lengths: IntArray) -> Paths:
        """Hypotheses: of each of `sentences` [n] the one in `beams` after `lengths` tokens, each [n]."""
        longest = int(lengths.max(initial=0))
        shape = len(beams), longest + 1
        found = Paths(np.empty(shape, dtype=np.int64), np.empty(shape), np.empty(shape, dtype=np.int64))
        for step in range(longest - 1, -1, -1):
            at = step, sentences, beams
            found.ids[:, step], found.log_probs[:, step] = self._tokens[at], self._log_probs[at]
            found.beams[:, step + 1] = beams
            beams = np.where(step < lengths, self._parents[at], beams)
        found.beams[:, 0] = beams
        return found

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
