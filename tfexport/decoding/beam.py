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

from tfexport.decoding.ahead import SearchAhead
from tfexport.decoding.attention_trace import AttentionTrace, coverage
from tfexport.decoding.backpointers import Backpointers
from tfexport.decoding.finished import FinishedHypotheses
from tfexport.decoding.hypothesis import Hypothesis
from tfexport.decoding.options import SearchOptions
from tfexport.decoding.steps import NO_SENTENCES, TellAttention, is_end, no_token_error, rows_to_keep
from tfexport.decoding.token_rules import LogProbs, TokenRules, require_numbers
from tfexport.runtimes.base import Ahead, Ask, Best, Continuations, IntArray, Told


class BeamBatch:
    """A beam search between two steps: the hypotheses of a batch, the live ones, `beam` for each sentence, and the finished
    ones. A `SearchBatch`.

    Args:
        limits: the largest number of tokens of each sentence's outputs, [batch].
        trace: records cross-attention, where the search needs it.
        ahead: decides when the runtime makes several steps by itself; None for never.
    """

    def __init__(
        self,
        rules: TokenRules,
        limits: IntArray,
        options: SearchOptions,
        trace: AttentionTrace | None,
        ahead: SearchAhead | None = None,
    ):
        config, batch, self._beam = rules.config, len(limits), options.beam
        self._rules, self._ahead, self._trace = rules, ahead, trace
        self._options, self._profile = options, options.search_profile
        self._bos_id, self._end_ids = config.bos_id, options.end_ids(config)
        self._n_candidates = (1 + len(self._end_ids)) * self._beam
        """Continuations of a sentence among which the next live hypotheses are."""
        self._limits, self._shortest_limit, self._longest_limit = limits, int(limits.min()), int(limits.max())
        self._length = 0
        # Of the live hypotheses, best first, [sentences, beam]; -inf where one does not exist. A sentence begins with one.
        self._log_probs: LogProbs = np.full((batch, self._beam), -np.inf)
        self._log_probs[:, 0] = 0.0
        self._parents: IntArray = np.zeros((batch, self._beam), dtype=np.int64)
        self._same_beams, self._first_rows = np.arange(self._beam), np.arange(batch)[:, None] * self._beam
        self.sentences = np.arange(batch)
        self.tokens: IntArray = np.full(batch * self._beam, config.bos_id, dtype=np.int64)
        self.ended = NO_SENTENCES
        self._is_done = False
        self._past = Backpointers(self._longest_limit, batch, self._beam)
        self._continues_end = np.zeros((batch, self._beam), dtype=bool)
        """Which live hypotheses have an end among their tokens."""
        self._finished = FinishedHypotheses(options, limits)

    @property
    def is_done(self) -> bool:
        return self._is_done

    def ask(self) -> Ask:
        self._ask = self._rules.asks(self._n_candidates, self._length + 1, self.sentences)
        return self._ask

    def ask_ahead(self) -> Ahead | None:
        if self._ahead is None:
            return None
        return self._ahead.request(self._length, self.sentences, self.tokens, self._log_probs, self._n_candidates)

    def advance(self, told: Told, attention: TellAttention) -> IntArray | None:
        length = self._length + 1
        best = self._rules.best(told, self._ask, self._n_candidates, length, self.sentences, self._history)
        assert isinstance(best, Best)  # a beam compares probabilities
        if self._trace:
            self._trace.add(attention(), self.sentences)
        return self._take(self._best_continuations(best))

    def advance_ahead(self, found: Continuations) -> IntArray | None:
        require_numbers(found.log_probs)
        return self._take(found, in_order=True)

    def drop(self, indices: IntArray) -> None:
        stays = ~np.isin(self.sentences, indices)
        self._is_done = not stays.any()
        self._keep(np.flatnonzero(stays))

    def outputs(self, indices: IntArray) -> list[list[Hypothesis]]:
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
            for index, outputs in zip(indices.tolist(), self._outputs(indices), strict=True)
        ]

    def _best_continuations(self, best: Best) -> Continuations:
        """The `_n_candidates` best continuations of each sentence, given the `best` tokens of each row; of one step."""
        candidates = rank_continuations(self._log_probs, best, self._n_candidates)
        if self._profile.narrows_beam:
            places = self._beam - self._finished.count[self.sentences]
            candidates.log_probs[np.arange(candidates.log_probs.shape[1]) >= places[:, None]] = -np.inf
        return candidates.at(None)

    def _take(self, found: Continuations, *, in_order: bool = False) -> IntArray | None:
        """Take one step or several; what a sentence's steps found after it was done is dropped.

        Args:
            found: the best continuations of each step, [steps, sentences, _n_candidates].
            in_order: the runtime has reordered the beams already.

        Returns:
            As `advance`.

        Raises:
            TfexportError: a sentence has no live hypothesis and no finished one.
        """
        steps = min(len(found.tokens), self._longest_limit - self._length)
        if steps < len(found.tokens):
            found = found.at(slice(steps))
        first = self._length + 1
        is_eos = is_end(found.tokens, self._end_ids)
        some_end = bool(is_eos[..., : self._beam].any())
        live = self._going_on(found, is_eos) if some_end else found.at((..., slice(self._beam)))
        self._past.add(self._length, self.sentences, live)
        self._log_probs, self._parents = live.log_probs[-1], live.parents[-1]
        self.tokens = live.tokens[-1].ravel()
        self._length += steps
        may_end = some_end or self._length >= self._shortest_limit or self._profile.continues_past_eos
        if not (may_end or self._finished.is_done(live.log_probs[..., 0], first, self.sentences).any()):
            return self._stay(in_order=in_order)  # mostly
        return self._leave(self._finish(found, is_eos, live, first), in_order=in_order)

    def _going_on(self, found: Continuations, is_eos: NDArray[np.bool_]) -> Continuations:
        """The best `beam` continuations of each step that do not end: [steps, sentences, beam]."""
        if self._profile.continues_past_eos:
            return found.at((..., slice(self._beam)))
        going_on = is_eos.argsort(axis=-1, kind="stable")[..., : self._beam]  # keeps the order of the others
        steps, sentences, _ = is_eos.shape
        at = np.arange(steps)[:, None, None], np.arange(sentences)[:, None], going_on
        return found.at(at)

    def _finish(
        self, found: Continuations, is_eos: NDArray[np.bool_], live: Continuations, shortest: int
    ) -> NDArray[np.bool_]:
        """Finish what ends in each step; returns which sentences continue after the last.

        Args:
            shortest: the number of tokens after the first step.
        """
        lengths = np.arange(shortest, shortest + len(is_eos))
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
                first, done = step, self._finished.is_done(best_live[step:last], length, self.sentences)
                some_stop = (done | at_limit[step:last]).any(axis=1).tolist()
            if not some_stop[step - first]:
                continue
            stops = unfinished & (done[step - first] | at_limit[step])
            if self._profile.at_limit == "compete" and (competes := stops & ~done[step - first]).any():
                ranked = live.at(step)
                self._add(competes[:, None] & np.isfinite(ranked.log_probs), ranked, length)
            if (self._finished.count[self.sentences[stops & (best_live[step] == -np.inf)]] == 0).any():
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
        self._finished.add(ends, found, self.sentences, length, counts=counts, penalties=penalties)

    def _leave(self, unfinished: NDArray[np.bool_], *, in_order: bool) -> IntArray | None:
        """Let sentences leave that are not `unfinished`; returns what `advance` does."""
        if unfinished.all():
            return self._stay(in_order=in_order)
        parents = np.broadcast_to(self._same_beams, self._parents.shape) if in_order else self._parents
        self.ended = self.sentences[~unfinished]
        kept = rows_to_keep(unfinished)
        self._is_done = not len(kept)
        self._keep(kept)
        return (self._first_rows[kept] + parents[kept]).ravel()

    def _stay(self, *, in_order: bool) -> IntArray | None:
        """As `_leave`, where no sentence does."""
        self.ended = NO_SENTENCES
        if in_order or not (self._parents != self._same_beams).any():
            return None
        return (self._first_rows[: len(self.sentences)] + self._parents).ravel()

    def _keep(self, kept: IntArray) -> None:
        """Drop all sentences but those at the places `kept`."""
        self.sentences, self._continues_end = self.sentences[kept], self._continues_end[kept]
        self._log_probs, self._parents = self._log_probs[kept], self._parents[kept]
        self.tokens = self.tokens.reshape(-1, self._beam)[kept].ravel()

    def _history(self, length: int, sentences: IntArray) -> IntArray:
        """The tokens before `length` of each live hypothesis of `sentences`, bos first, [rows, length]."""
        past, _ = self._past.read_all(sentences, length - 1)
        past = past.reshape(len(sentences) * self._beam, -1)
        return np.concatenate([np.full((len(past), 1), self._bos_id), past], axis=1)

    def stable_prefix(self, index: int) -> tuple[IntArray, LogProbs]:
        """What all hypotheses of source `index` have in common that may become its best: the live ones, and the best
        finished one."""
        group = np.flatnonzero(self.sentences == index)  # none where the sentence is finished
        exists = np.isfinite(self._log_probs[group])
        ids, log_probs = (found[exists] for found in self._past.read_all(self.sentences[group], self._length))
        outputs = [*zip(ids, np.diff(log_probs, prepend=0.0), strict=True)]
        outputs += [(found.ids, found.steps) for found in self._outputs(np.array([index]))[0][:1]]
        shortest = min(len(tokens) for tokens, _ in outputs)
        every = np.stack([tokens[:shortest] for tokens, _ in outputs])
        common = int(np.logical_and.accumulate((every == every[0]).all(axis=0)).sum())
        return outputs[0][0][:common], outputs[0][1][:common]

    def _outputs(self, sentences: IntArray) -> list[list[Output]]:
        """The `nbest` best finished hypotheses of `sentences`."""
        ended, counts = self._finished.best(sentences)
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
