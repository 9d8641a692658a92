"""Beam search, with the variants of other toolkits that `search/profiles.py` describes.

    live = {[bos]}; finished = {}
    until the sentence is done, or the length limit:
        candidates = the 2 * beam best continuations of the live hypotheses, by summed log-probability
        live       = the best `beam` candidates that do not end in eos
        finished  += the first `beam` candidates, those that end in eos
    return the best of finished, by score

Each live hypothesis has at most one continuation that ends in eos, so at least `beam` of the 2 * beam candidates continue.
Every further token that ends an output adds `beam` candidates.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tfexport.runtimes.base import Ahead
from tfexport.runtimes.outputs import Best, Continuations, FloatArray, IntArray, StepOutput, StepRequest
from tfexport.search.attention_trace import AttentionTrace, coverage
from tfexport.search.backpointers import Backpointers, Endings, Paths
from tfexport.search.finished import Ends, FinishedHypotheses, begins_run
from tfexport.search.hypothesis import Hypothesis
from tfexport.search.multi_step import SearchAhead
from tfexport.search.options import SearchOptions
from tfexport.search.search_batch import NO_SENTENCES, Begin, ReadAttention, is_end, no_token_error, rows_to_keep
from tfexport.search.token_rules import LogProbs, TokenRules, require_numbers


class BeamBatch:
    """The state of a beam search between two steps: the finished hypotheses of a batch, and `beam` live ones for each
    sentence. A `SearchBatch`.

    Args:
        limits: the largest number of output tokens for each sentence, [batch].
        trace: records cross-attention, if the search needs it.
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
        config = rules.config
        batch = len(limits)
        self._beam = options.beam
        self._rules = rules
        self._ahead = ahead
        self._trace = trace
        self._options, self._profile = options, options.search_profile
        self._bos_id, self._end_ids = config.bos_id, options.end_ids(config)
        self._n_candidates = (1 + len(self._end_ids)) * self._beam
        """The number of continuations of a sentence from which the next live hypotheses are chosen."""
        self._limits = limits
        self._shortest_limit = int(limits.min())
        self._longest_limit = int(limits.max())
        self._length = 0
        # Live hypotheses, best first, [sentences, beam]; -inf marks a missing one. A sentence begins with one hypothesis.
        self._log_probs: LogProbs = np.full((batch, self._beam), -np.inf)
        self._log_probs[:, 0] = 0.0
        self._parents: IntArray = np.zeros((batch, self._beam), dtype=np.int64)
        self._same_beams, self._first_rows = np.arange(self._beam), np.arange(batch)[:, None] * self._beam
        self.sentences = np.arange(batch)
        self.tokens: IntArray = np.full(batch * self._beam, config.bos_id, dtype=np.int64)
        self.ended = NO_SENTENCES
        self._is_done = False
        self._past = Backpointers(batch, self._beam)
        self._continues_end = np.zeros((batch, self._beam), dtype=bool)
        """The live hypotheses that contain an end token."""
        self._finished = FinishedHypotheses(options, limits)

    @property
    def is_done(self) -> bool:
        return self._is_done

    def request(self) -> StepRequest:
        return self._rules.request(self._n_candidates, self._length + 1, self.sentences)

    def request_ahead(self) -> Ahead | None:
        if self._ahead is None:
            return None
        # A sentence with a finished hypothesis is done as soon as its live ones have fallen far enough.
        some_may_be_done = np.count_nonzero(self._finished.count[self.sentences])
        steps = 1 if some_may_be_done else self._shortest_limit - self._length
        return self._ahead.request(
            *(self._length, self.sentences, self.tokens, self._log_probs, self._n_candidates), steps=steps
        )

    def advance(self, output: StepOutput, attention: ReadAttention) -> IntArray | None:
        continuations = self._continuations(output, self._length + 1)
        if self._trace:
            self._trace.add(attention(), self.sentences)
        return self._take(continuations)

    def advance_ahead(self, continuations: Continuations, begin: Begin | None = None) -> IntArray | None:
        require_numbers(continuations.log_probs)
        return self._take(continuations, begin, in_order=True)

    def drop(self, indices: IntArray) -> None:
        stays = ~np.isin(self.sentences, indices)
        self._is_done = not stays.any()
        self._keep(np.flatnonzero(stays))

    def outputs(self, indices: IntArray) -> list[list[Hypothesis]]:
        ended, counts = self._finished.best(indices)
        hypotheses = self._hypotheses(ended)
        ends = counts.cumsum().tolist()
        return [hypotheses[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]

    def _hypotheses(self, ended: Endings) -> list[Hypothesis]:
        """The hypotheses of `ended` with their tokens, and the scores and attention that the options request."""
        options, number = self._options, len(ended.lengths)
        paths = self._past.read(ended.sentences, ended.parents, ended.lengths - 1)
        scalars = (field.tolist() for field in (ended.tokens, ended.scores, ended.log_probs))
        return [
            Hypothesis((*tokens[: length - 1], last), score, log_prob, last in self._end_ids, steps, attention)
            for tokens, length, last, score, log_prob, steps, attention in zip(
                *(paths.tokens.T.tolist(), ended.lengths.tolist(), *scalars),
                paths.token_log_probs(ended.log_probs) if options.token_scores else [()] * number,
                self._attention(paths) if options.attention else [None] * number,
                strict=True,
            )
        ]

    def _continuations(self, output: StepOutput, length: int) -> Continuations:
        """The `_n_candidates` best continuations of each sentence to `length` tokens, for one step."""
        best = self._rules.best(output, self._n_candidates, length, self.sentences, self._history)
        assert isinstance(best, Best)  # a beam compares probabilities
        return self._narrowed(rank_continuations(self._log_probs, best, self._n_candidates))

    def _best_live(self, continuations: Continuations) -> LogProbs:
        """The log-probability of the best live hypothesis, which is the first candidate; [.., sentences]."""
        return continuations.log_probs[..., 0]

    def _narrowed(self, candidates: Continuations) -> Continuations:
        """The candidates that fit into the beam, as one step."""
        if self._profile.narrows_beam:
            places = self._beam - self._finished.count[self.sentences]
            candidates.log_probs[np.arange(candidates.log_probs.shape[1]) >= places[:, None]] = -np.inf
        return candidates.at(None)

    def _take(
        self, continuations: Continuations, begin: Begin | None = None, *, in_order: bool = False
    ) -> IntArray | None:
        """Apply one or several steps. The steps of a sentence after its end are dropped.

        Args:
            continuations: the best continuations of each step, [steps, sentences, _n_candidates].
            begin: see `SearchBatch.advance_ahead`.
            in_order: the runtime has already reordered the beams.

        Returns:
            As `advance`.

        Raises:
            TfexportError: a sentence has no live hypothesis and no finished one.
        """
        steps = min(len(continuations.tokens), self._longest_limit - self._length)
        if steps < len(continuations.tokens):
            continuations = continuations.at(slice(steps))
        first = self._length + 1
        self._length += steps
        is_eos = is_end(continuations.tokens, self._end_ids)
        ending = places_among_first(is_eos, self._beam)
        at_limit, ends, new = self._at_limit(first), None, None
        if len(ending) or at_limit is not None or self._profile.continues_past_eos:  # else the usual case
            ends = self._ends(continuations, is_eos, ending, at_limit)
            new = self._new_outputs(continuations, is_eos)
            if len(ending) and not self._profile.continues_past_eos:
                let_go_on(continuations, is_eos, ending, self._beam)
        self._past.add(self.sentences, continuations)
        live = continuations.at((-1, slice(None), slice(self._beam)))
        self._log_probs = live.log_probs
        self._parents = live.parents
        self.tokens = live.tokens.ravel()
        if begin is not None:
            self._begin_following(begin, ends)
        done = self._finished.take(
            *(ends, self._best_live(continuations), self.sentences, first, at_limit),
            counts=new,
            penalties=self._penalties(ends, self.sentences, first),
        )
        stops = done if at_limit is None else done | at_limit
        if not np.count_nonzero(stops):  # several times faster than `any`
            return self._stay(in_order=in_order)  # the usual case
        stopped = np.asarray(stops.any(axis=0))
        groups = stopped.nonzero()[0]
        self._stop(groups, stops.argmax(axis=0)[groups], done, continuations)
        return self._leave(~stopped, in_order=in_order)

    def _ends(
        self,
        continuations: Continuations,
        is_eos: NDArray[np.bool_],
        ending: IntArray,
        at_limit: NDArray[np.bool_] | None,
    ) -> Ends | None:
        """The candidates to finish: those at the places `ending`, or at the limit those that the profile selects."""
        if at_limit is not None and self._profile.at_limit != "compete":
            # The first `beam` candidates are finished, whatever their last token is.
            ending = places_among_first(is_eos | at_limit[..., None], self._beam)
        return Ends.of(ending, continuations)

    def _at_limit(self, first: int) -> NDArray[np.bool_] | None:
        """The sentences that are at their limit after each step, [steps, sentences]; None if no sentence is.

        Args:
            first: the number of the token that the first of these steps adds.
        """
        if self._length < self._shortest_limit:
            return None
        lengths = np.arange(first, self._length + 1)
        return np.asarray(self._limits[self.sentences] == lengths[:, None])

    def _begin_following(self, begin: Begin, ends: Ends | None) -> None:
        """Call `begin` with the next steps, if at least one sentence certainly continues: it has no finished hypothesis, the
        last steps ended none, and it has a live hypothesis.
        """
        if self._length >= self._longest_limit:
            return
        goes_on = (self._finished.count[self.sentences] == 0) & (self._log_probs[:, 0] > -np.inf)
        if ends is not None:
            goes_on[ends.groups] = False
        if self._length >= self._shortest_limit:
            goes_on &= self._limits[self.sentences] > self._length
        certain = int(np.count_nonzero(goes_on))
        if certain and (request := self.request_ahead()) is not None:
            begin(request, certain)

    def _stop(self, groups: IntArray, last: IntArray, done: NDArray[np.bool_], continuations: Continuations) -> None:
        """End the sentences at the places `groups`, each with its step in `last`. Remaining live hypotheses of
        `continuations` may become outputs.

        Raises:
            TfexportError: a sentence has neither a live nor a finished hypothesis.
        """
        if self._profile.at_limit == "compete" and not (decided := done[last, groups]).all():
            competes = groups[~decided]
            sentences, ranked = self.sentences[competes], continuations.at((last[~decided], competes)).at(None)
            exist = Ends.of(places_among_first(np.ones(ranked.tokens.shape, dtype=bool), self._beam), ranked)
            if exist is not None:
                self._finished.compete(exist, sentences, penalties=self._penalties(exist, sentences, self._length))
        dead = continuations.log_probs[last, groups, 0] == -np.inf
        if dead.any() and (self._finished.count[self.sentences[groups[dead]]] == 0).any():
            raise no_token_error()

    def _new_outputs(self, continuations: Continuations, is_eos: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """The candidates among the first `beam` of each step that do not continue a finished output; None for all."""
        if not self._profile.continues_past_eos:
            return None
        new = np.empty((*is_eos.shape[:2], self._beam), dtype=bool)
        groups = np.arange(is_eos.shape[1])[:, None]
        for step, parents in enumerate(continuations.parents[..., : self._beam]):
            continues = self._continues_end[groups, parents]
            self._continues_end = continues | is_eos[step, :, : self._beam]
            np.logical_not(continues, out=new[step])
        return new

    def _penalties(self, ends: Ends | None, sentences: IntArray, length: int) -> LogProbs | None:
        """The coverage penalties of hypotheses that end, with `length` tokens in the first step; None if unused."""
        if not self._options.coverage_penalty or ends is None:
            return None
        index, lengths = sentences[ends.groups], ends.steps + length
        paths = self._past.read(index, ends.parents, lengths - 1)
        return self._options.coverage_penalty * np.array([coverage(attention) for attention in self._attention(paths)])

    def _attention(self, paths: Paths) -> list[FloatArray]:
        """The cross-attention of each token of the hypotheses, and of one token more."""
        assert self._trace is not None, "a runtime that makes several steps by itself returns no attention"
        every = zip(paths.sentences.tolist(), paths.beams(), strict=True)
        return [self._trace.hypothesis(sentence, beams) for sentence, beams in every]

    def _leave(self, unfinished: NDArray[np.bool_], *, in_order: bool) -> IntArray | None:
        """Remove the sentences that are not `unfinished`. Returns as `advance`."""
        if unfinished.all():
            return self._stay(in_order=in_order)
        self.ended = self.sentences[~unfinished]
        kept = rows_to_keep(unfinished)
        self._is_done = not len(kept)
        rows = self._first_rows[kept] + (self._same_beams if in_order else self._parents[kept])
        self._keep(kept)
        return rows.ravel()

    def _stay(self, *, in_order: bool) -> IntArray | None:
        """`_leave` if all sentences are unfinished."""
        self.ended = NO_SENTENCES
        if in_order or not np.count_nonzero(self._parents != self._same_beams):
            return None
        return (self._first_rows[: len(self.sentences)] + self._parents).ravel()

    def _keep(self, kept: IntArray) -> None:
        """Keep only the sentences at the places `kept`."""
        self.sentences, self._continues_end = self.sentences[kept], self._continues_end[kept]
        self._shortest_limit = int(self._limits[self.sentences].min(initial=self._longest_limit))
        self._log_probs, self._parents = self._log_probs[kept], self._parents[kept]
        self.tokens = self.tokens.reshape(-1, self._beam)[kept].ravel()

    def _history(self, length: int, sentences: IntArray) -> IntArray:
        """The tokens before `length` of each live hypothesis of `sentences`, bos first, [rows, length]."""
        past = self._past.read_live(sentences).tokens.T
        return np.concatenate([np.full((len(past), 1), self._bos_id), past], axis=1)

    def stable_prefix(self, index: int) -> tuple[IntArray, LogProbs]:
        """The common prefix of all hypotheses that may become the best of source `index`: the live ones and the best
        finished one."""
        group = np.flatnonzero(self.sentences == index)  # empty if the sentence is finished
        exists = np.isfinite(self._log_probs[group])
        live = self._past.read_live(self.sentences[group])
        ids, log_probs = live.tokens.T[exists.ravel()], live.log_probs.T[exists.ravel()]
        outputs = [*zip(ids, np.diff(log_probs, prepend=0.0), strict=True)]
        ended, _ = self._finished.best(np.array([index]))
        if len(ended.lengths):
            best = self._past.read(ended.sentences, ended.parents, ended.lengths - 1)
            ids = np.append(best.tokens[: ended.lengths[0] - 1, 0], ended.tokens[0])
            outputs.append((ids, np.array(best.token_log_probs(ended.log_probs)[0])))
        shortest = min(len(tokens) for tokens, _ in outputs)
        every = np.stack([tokens[:shortest] for tokens, _ in outputs])
        common = int(np.logical_and.accumulate((every == every[0]).all(axis=0)).sum())
        return outputs[0][0][:common], outputs[0][1][:common]


def places_among_first(flags: NDArray[np.bool_], beam: int) -> IntArray:
    """Flat indices of the true `flags` [steps, sentences, candidates] among the first `beam` candidates."""
    candidates = flags.shape[2]
    places = flags.ravel().nonzero()[0]
    # NumPy divides faster than it takes remainders, and finds true values faster in contiguous arrays.
    return places[places - places // candidates * candidates < beam] if len(places) else places


def let_go_on(continuations: Continuations, is_eos: NDArray[np.bool_], ending: IntArray, beam: int) -> None:
    """Reorder `continuations` in place: the first `beam` candidates of each sentence are the best ones that do not end.

    Args:
        continuations: contiguous arrays.
        is_eos: the candidates that end, [steps, sentences, candidates]. At least `beam` of each sentence do not end, except
            where an end is forced: then other candidates of the sentence fill the places, because the sentence is over.
        ending: the flat indices of ending candidates among the first `beam`; at least one.
    """
    candidates = is_eos.shape[2]
    rows = ending // candidates
    if len(rows) > 1:
        rows = rows[begins_run(rows)]
    # The sort is stable: candidates that continue come first, in their order.
    ranks = is_eos.reshape(-1, candidates).take(rows, axis=0).argsort(axis=1, kind="stable")[:, :beam]
    starts = rows[:, None] * candidates
    targets, sources = starts + np.arange(beam), starts + ranks
    for field in continuations:
        assert field.flags.c_contiguous
        field.reshape(-1)[targets] = field.take(sources)
    ended = is_eos.take(sources)
    if np.count_nonzero(ended):
        continuations.log_probs.reshape(-1)[targets[ended]] = -np.inf


def rank_continuations(log_probs: LogProbs, best: Best, count: int) -> Continuations:
    """The `count` best continuations of each sentence, the lower beam first among equals.

    Args:
        log_probs: the log-probabilities of the live hypotheses, [sentences, beam].
        best: the best next tokens of each live hypothesis, [sentences * beam, tokens].
    """
    totals = (log_probs.reshape(-1, 1) + best.log_probs).reshape(len(log_probs), -1)
    order = (-totals).argsort(axis=1, kind="stable")[:, :count]
    # Indices into the flat arrays. A single sentence begins at 0, and needs no offset.
    places = order if len(order) == 1 else order + np.arange(0, totals.size, totals.shape[1])[:, None]
    return Continuations(totals.take(places), order // best.ids.shape[1], best.ids.take(places))
