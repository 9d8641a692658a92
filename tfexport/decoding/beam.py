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

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.decoding.ahead import SearchAhead
from tfexport.decoding.attention_trace import AttentionTrace, coverage
from tfexport.decoding.backpointers import Backpointers
from tfexport.decoding.finished import Ends, FinishedHypotheses
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

    def ask_following(self, found: Continuations) -> tuple[Ahead, int] | None:
        length = self._length + len(found.tokens)
        if self._ahead is None or length >= self._longest_limit:
            return None
        ends = is_end(found.tokens[..., : self._beam], self._end_ids)
        last = found.at((slice(-1, None), slice(None), slice(self._beam)))
        # Nothing is finished, nothing may be, and a live hypothesis exists.
        goes_on = (self._finished.count[self.sentences] == 0) & (last.log_probs[0, :, 0] > -np.inf)
        if ends.any():
            goes_on[np.nonzero(ends)[1]] = False
            last = self._going_on(found.at(slice(-1, None)), ends[-1:])
        if length >= self._shortest_limit:
            goes_on &= self._limits[self.sentences] > length
        if not (certain := int(np.count_nonzero(goes_on))):
            return None
        tokens, log_probs = last.tokens.ravel(), last.log_probs[0]
        request = self._ahead.request(length, self.sentences, tokens, log_probs, self._n_candidates)
        return None if request is None else (request, certain)

    def advance(self, told: Told, attention: TellAttention) -> IntArray | None:
        found = self._continuations(told, self._length + 1)
        if self._trace:
            self._trace.add(attention(), self.sentences)
        return self._take(found)

    def advance_ahead(self, found: Continuations) -> IntArray | None:
        require_numbers(found.log_probs)
        return self._take(found, in_order=True)

    def drop(self, indices: IntArray) -> None:
        stays = ~np.isin(self.sentences, indices)
        self._is_done = not stays.any()
        self._keep(np.flatnonzero(stays))

    def outputs(self, indices: IntArray) -> list[list[Hypothesis]]:
        options, trace = self._options, self._trace
        ended, counts = self._finished.best(indices)
        paths = self._past.read(indices.repeat(counts), ended)
        ids, lengths, owners = paths.ids.tolist(), ended.lengths.tolist(), indices.repeat(counts).tolist()
        found = [
            Hypothesis.scored(
                tuple(ids[row][:length]),
                log_prob,
                options,
                finished=ids[row][length - 1] in self._end_ids,
                token_log_probs=paths.token_log_probs(row) if options.token_scores else (),
                attention=trace.hypothesis(owners[row], paths.beams(row)) if trace else None,
            )
            for row, (length, log_prob) in enumerate(zip(lengths, ended.log_probs.tolist(), strict=True))
        ]
        ends = counts.cumsum().tolist()
        return [found[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]

    def _continuations(self, told: Told, length: int) -> Continuations:
        """The `_n_candidates` best continuations of each sentence, to `length` tokens; of one step."""
        best = self._rules.best(told, self._ask, self._n_candidates, length, self.sentences, self._history)
        assert isinstance(best, Best)  # a beam compares probabilities
        return self._narrowed(rank_continuations(self._log_probs, best, self._n_candidates))

    def _best_live(self, live: Continuations) -> LogProbs:
        """The log-probability of the best of the `live` hypotheses [.., beam]; [..]."""
        return live.log_probs[..., 0]

    def _narrowed(self, candidates: Continuations) -> Continuations:
        """The candidates that have a place in the beam, as those of one step."""
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
        ends = is_end(found.tokens[..., : self._beam], self._end_ids)
        some_end = bool(ends.any())
        live = self._going_on(found, ends) if some_end else found.at((..., slice(self._beam)))
        self._past.add(self._length, self.sentences, live)
        self._log_probs, self._parents = live.log_probs[-1], live.parents[-1]
        self.tokens = live.tokens[-1].ravel()
        self._length += steps
        may_end = some_end or self._length >= self._shortest_limit or self._profile.continues_past_eos
        if not (may_end or self._finished.is_done(self._best_live(live), first, self.sentences).any()):
            return self._stay(in_order=in_order)  # mostly
        return self._leave(self._finish(found, ends, live, first), in_order=in_order)

    def _going_on(self, found: Continuations, ends: NDArray[np.bool_]) -> Continuations:
        """The best `beam` continuations of each step that do not end: [steps, sentences, beam].

        Args:
            ends: which of the first `beam` end an output, [steps, sentences, beam].
        """
        first = found.at((..., slice(self._beam)))
        if self._profile.continues_past_eos:
            return first
        if len(ends) == 1:
            at: Any = 0, np.arange(ends.shape[1])[:, None]
            return found.at((*at, self._order(found.tokens[0]))).at(None)
        live = Continuations(first.log_probs.copy(), first.parents.copy(), first.tokens.copy())
        groups = np.flatnonzero(ends) // self._beam
        groups = groups[np.append(True, groups[1:] != groups[:-1])]
        at = np.divmod(groups, ends.shape[1])
        order = self._order(found.tokens[at])
        for target, source in zip(live, found, strict=True):
            target[at] = np.take_along_axis(source[at], order, axis=1)
        return live

    def _order(self, tokens: IntArray) -> IntArray:
        """The places of the best `beam` among `tokens` [groups, _n_candidates] that do not end."""
        is_eos = is_end(tokens, self._end_ids)
        return is_eos.argsort(axis=1, kind="stable")[:, : self._beam]  # keeps the order of the others

    def _finish(
        self, found: Continuations, is_eos: NDArray[np.bool_], live: Continuations, shortest: int
    ) -> NDArray[np.bool_]:
        """Finish what ends in each step; returns which sentences continue after the last.

        Args:
            is_eos: which of the first `beam` continuations end an output, [steps, sentences, beam].
            shortest: the number of tokens after the first step.
        """
        steps = len(is_eos)
        exists = found.log_probs[..., : self._beam] > -np.inf
        ends = is_eos & exists
        best_live = self._best_live(live)
        at_limit: NDArray[np.bool_] = np.zeros(best_live.shape, dtype=bool)
        if shortest + steps > self._shortest_limit:
            lengths = np.arange(shortest, shortest + steps)
            at_limit = np.asarray(self._limits[self.sentences] == lengths[:, None])
            if self._profile.at_limit != "compete":
                # The first `beam` candidates are finished, whatever their last token is.
                ends = ends | (at_limit[..., None] & exists)
        done = self._finished.take(
            *(ends, found, best_live, self.sentences, shortest, at_limit),
            counts=self._new_outputs(found, is_eos),
            penalties=self._penalties(ends, found, self.sentences, shortest),
        )
        stops = done | at_limit
        stopped = stops.any(axis=0)
        if stopped.any():
            groups = np.flatnonzero(stopped)
            self._stop(groups, stops.argmax(axis=0)[groups], done, live)
        return np.asarray(~stopped)

    def _stop(self, groups: IntArray, last: IntArray, done: NDArray[np.bool_], live: Continuations) -> None:
        """The sentences at the places `groups` are over with the steps `last`.

        Raises:
            TfexportError: one has no live hypothesis and no finished one.
        """
        if self._profile.at_limit == "compete" and not (decided := done[last, groups]).all():
            competes = groups[~decided]
            sentences, ranked = self.sentences[competes], live.at((last[~decided], competes)).at(None)
            exists = np.isfinite(ranked.log_probs)
            penalties = self._penalties(exists, ranked, sentences, self._length)
            self._finished.compete(exists, ranked, sentences, penalties=penalties)
        dead = live.log_probs[last, groups, 0] == -np.inf
        if dead.any() and (self._finished.count[self.sentences[groups[dead]]] == 0).any():
            raise no_token_error()

    def _new_outputs(self, found: Continuations, is_eos: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Which of the first `beam` candidates of each step do not continue an output; None for all."""
        if not self._profile.continues_past_eos:
            return None
        new = np.empty((*is_eos.shape[:2], self._beam), dtype=bool)
        groups = np.arange(is_eos.shape[1])[:, None]
        for step, parents in enumerate(found.parents[..., : self._beam]):
            continues = self._continues_end[groups, parents]
            self._continues_end = continues | is_eos[step]
            np.logical_not(continues, out=new[step])
        return new

    def _penalties(
        self, ends: NDArray[np.bool_], found: Continuations, sentences: IntArray, length: int
    ) -> LogProbs | None:
        """The coverage penalties of the hypotheses `ends` [1, sentences, beam] of a step; None without."""
        if not self._options.coverage_penalty:
            return None
        assert self._trace is not None, "the attention of several steps is told by nobody"
        at = Ends(ends)
        index = sentences[at.groups]
        paths = self._past.read(index, at.endings(found, at.steps + length))
        attention = [self._trace.hypothesis(one, paths.beams(row)) for row, one in enumerate(index.tolist())]
        return self._options.coverage_penalty * np.array([coverage(one) for one in attention])

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
        ended, counts = self._finished.best(np.array([index]))
        best = self._past.read(np.array([index]).repeat(counts), ended)
        if len(ended.lengths):
            outputs.append((best.ids[0, : ended.lengths[0]], best.token_log_probs(0)))
        shortest = min(len(tokens) for tokens, _ in outputs)
        every = np.stack([tokens[:shortest] for tokens, _ in outputs])
        common = int(np.logical_and.accumulate((every == every[0]).all(axis=0)).sum())
        return outputs[0][0][:common], outputs[0][1][:common]


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
