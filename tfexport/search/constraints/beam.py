"""Beam search with required phrases: an output may end when it contains all of them.

    candidates = the 2 * beam best continuations of the live hypotheses
               + the best one of each live hypothesis
               + of each live hypothesis those that begin or continue a phrase
    candidates = the first 2 * beam of them, round-robin over banks              constraints/banks.py
    live, finished: as in beam search

The fullest bank always has a place in the beam, and gets one more phrase token in each step. So after as many steps as the
phrases have tokens, a hypothesis has all of them, however unlikely, unless a rule gives one of these tokens probability 0.
Outputs therefore contain the phrases if the length limit has room for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tfexport.runtimes.outputs import Argmax, Best, Continuations, IntArray, StepOutput
from tfexport.search.attention_trace import AttentionTrace
from tfexport.search.beam import BeamBatch, rank_continuations
from tfexport.search.constraints.banks import allocated
from tfexport.search.constraints.states import ConstraintState, first_state, missing_phrases
from tfexport.search.hypothesis import Hypothesis, Ids, Phrase
from tfexport.search.options import SearchOptions
from tfexport.search.token_rules import LogProbs, TokenRules

Flags = NDArray[np.bool_]


class ConstrainedBeamBatch(BeamBatch):
    """A `BeamBatch` of sentences with required phrases.

    A phrase that a rule excludes is left out. If the length limit has no room for the other phrases, the hypotheses with the
    most phrase tokens become outputs. In both cases the outputs list the phrases that they lack.

    Args:
        phrases: the required phrases of each sentence.
    """

    def __init__(
        self,
        rules: TokenRules,
        limits: IntArray,
        options: SearchOptions,
        trace: AttentionTrace | None,
        phrases: Sequence[Sequence[Phrase]],
    ):
        super().__init__(rules, limits, options, trace)
        divided = [self._rules.divided(required, index) for index, required in enumerate(phrases)]
        self._possible = [possible for possible, _ in divided]
        self._impossible = [impossible for _, impossible in divided]
        self._lacks = {index for index, impossible in enumerate(self._impossible) if impossible}
        """The sources whose hypotheses may lack phrases."""
        self._states = [[self._first_state(index)] * options.beam for index in range(len(phrases))]
        """The states of the live hypotheses of each source."""

    def _first_state(self, index: int) -> ConstraintState:
        return first_state([phrase.ids for phrase in self._possible[index]], self._options.constraint_order)

    def outputs(self, indices: IntArray) -> list[list[Hypothesis]]:
        outputs = super().outputs(indices)
        for place, index in enumerate(indices.tolist()):
            if index in self._lacks:
                outputs[place] = [
                    replace(hypothesis, missing=self._missing(hypothesis.ids, index)) for hypothesis in outputs[place]
                ]
        return outputs

    def _missing(self, ids: Ids, index: int) -> tuple[Phrase, ...]:
        order = self._options.constraint_order
        return (*missing_phrases(ids, self._possible[index], order), *self._impossible[index])

    def _best_live(self, continuations: Continuations) -> LogProbs:
        # The first hypothesis is that of the fullest bank.
        return np.asarray(continuations.log_probs[..., : self._beam].max(axis=-1))

    def _continuations(self, output: StepOutput, length: int) -> Continuations:
        if self._length:
            self._follow()
        if isinstance(output, Best):  # the first token of every output is forced
            return super()._continuations(output, length)
        assert not isinstance(output, Argmax)  # the rules request logits
        log_probs = self._rules.log_probs(output, length, self.sentences, self._history)
        before_the_end = np.repeat(~self._met().ravel()[:, None], len(self._end_ids), axis=1)
        ends = log_probs[:, self._end_ids]
        log_probs[:, self._end_ids] = np.where(before_the_end, -np.inf, ends)
        stuck = self._stuck(log_probs)
        if stuck.any():
            # Only the end is allowed, at the limit or by a rule, and nothing has ended: end without the phrases.
            self._lacks.update(self.sentences[stuck].tolist())
            given_up = stuck.repeat(self._beam)[:, None]
            log_probs[:, self._end_ids] = np.where(before_the_end & ~given_up, -np.inf, ends)
        best = self._rules.ranked(log_probs, self._n_candidates, length, self.sentences)
        ranked = rank_continuations(self._log_probs, best, self._n_candidates)
        for group in range(len(self.sentences)):
            self._allocate(group, ranked, best, log_probs, length)
        return self._narrowed(ranked)

    def _follow(self) -> None:
        """Advance the states by the tokens that the last step chose."""
        tokens = self.tokens.reshape(-1, self._beam).tolist()
        for index, parents, of_beam in zip(self.sentences.tolist(), self._parents.tolist(), tokens, strict=True):
            states = self._states[index]
            self._states[index] = [
                states[parent].advance(token) for parent, token in zip(parents, of_beam, strict=True)
            ]

    def _met(self) -> Flags:
        """Flags for the live hypotheses with all phrases, [sentences, beam]."""
        return np.array([[state.met for state in self._states[index]] for index in self.sentences.tolist()], dtype=bool)

    def _stuck(self, log_probs: LogProbs) -> Flags:
        """Flags for the sentences without a finished hypothesis and without a live one that may continue, [sentences]."""
        goes_on = log_probs.max(axis=1).reshape(self._log_probs.shape) + self._log_probs > -np.inf
        return np.asarray(~goes_on.any(axis=1) & (self._finished.count[self.sentences] == 0))

    def _allocate(self, group: int, ranked: Continuations, best: Best, log_probs: LogProbs, length: int) -> None:
        """Allocate the beam of a sentence to its candidates by their banks, in place in `ranked`."""
        index, live = int(self.sentences[group]), np.flatnonzero(self._log_probs[group] > -np.inf)
        states, first_row = self._states[index], group * self._beam
        pairs = {*zip(ranked.parents[group].tolist(), ranked.tokens[group].tolist(), strict=True)}
        pairs.update(zip(live.tolist(), best.ids[first_row + live, 0].tolist(), strict=True))
        pairs.update((beam, token) for beam in live.tolist() for token in states[beam].next_tokens)
        parents, tokens = np.array(sorted(pairs), dtype=np.int64).T
        totals = self._log_probs[group, parents] + log_probs[first_row + parents, tokens]
        after = [states[parent].advance(token) for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True)]
        kept = np.flatnonzero((totals > -np.inf) & self._may_stay(index, after, totals, length))
        banks = np.array([after[place].bank for place in kept.tolist()], dtype=np.int64)
        kept = kept[allocated(totals[kept], banks)][: ranked.tokens.shape[1]]
        ranked.log_probs[group] = -np.inf  # marks missing candidates
        ranked.log_probs[group, : len(kept)] = totals[kept]
        ranked.parents[group, : len(kept)], ranked.tokens[group, : len(kept)] = parents[kept], tokens[kept]

    def _may_stay(self, index: int, after: Sequence[ConstraintState], totals: LogProbs, length: int) -> Flags:
        """Flags for the candidates that may be outputs if the limit ends the sentence now: those with all phrases. If there
        are none, and no finished hypothesis, those with the most phrase tokens."""
        if length < self._limits[index]:
            return np.ones(len(after), dtype=bool)
        met, possible = np.array([state.met for state in after], dtype=bool), totals > -np.inf
        if (met & possible).any() or self._finished.count[index]:
            return met
        self._lacks.add(index)
        banks = np.where(possible, [state.bank for state in after], -1)
        return np.asarray(banks == banks.max())
