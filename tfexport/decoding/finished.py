"""The finished hypotheses of a beam search, and the criterion by which a sentence is done."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tfexport.decoding.hypothesis import Hypothesis
from tfexport.decoding.options import SearchOptions
from tfexport.runtimes.base import FloatArray


class FinishedHypotheses:
    """The finished hypotheses of one sentence, best first.

    Args:
        limit: the largest number of tokens of a hypothesis.
    """

    def __init__(self, options: SearchOptions, limit: int):
        self._options, self._profile, self._limit = options, options.search_profile, limit
        self._found: list[Hypothesis] = []
        self._top_ended = False
        self._ended_ranks: set[int] = set()

    def __len__(self) -> int:
        return len(self._found)

    def add(
        self,
        ids: tuple[int, ...],
        log_prob: float,
        *,
        rank: int,
        end_ids: tuple[int, ...],
        token_log_probs: Iterable[float] = (),
        attention: FloatArray | None = None,
    ) -> None:
        """Add a hypothesis that was candidate `rank` of its step. Of two with the same score the earlier one is better."""
        keeps, most = self._profile.keeps, max(self._options.beam, self._options.enough_finished)
        self._top_ended |= rank == 0
        self._ended_ranks.add(rank)
        continues_past_eos = any(index in end_ids for index in ids[:-1])  # what comes up to there was added before
        if continues_past_eos or (keeps == "first" and len(self._found) == most):
            return
        hypothesis = Hypothesis.scored(
            ids,
            log_prob,
            self._options,
            finished=ids[-1] in end_ids,
            token_log_probs=token_log_probs,
            attention=attention,
        )
        self._found.append(hypothesis)
        self._found.sort(key=lambda hypothesis: -hypothesis.score)
        if keeps == "best":
            del self._found[most:]

    def is_done(self, best_live: float, length: int) -> bool:
        """Whether the sentence is done, given the log-probability of its best live hypothesis of `length` tokens."""
        options, profile = self._options, self._profile
        if best_live == -np.inf or self._is_decided(best_live, length):
            return True
        if profile.done == "all":
            return False
        if profile.done == "places":
            return len(self._ended_ranks) == options.beam
        if profile.top_ends and options.length_penalty == options.coverage_penalty == 0 and options.patience == 1:
            return self._top_ended and len(self._found) >= options.nbest
        if len(self._found) < options.enough_finished:
            return False
        if profile.done == "enough" or options.early_stopping == "true":
            return True
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = self._limit
        # The coverage penalty lowers the scores of live hypotheses too; at best it is 0.
        return options.normalise(best_live, length) <= self._found[options.enough_finished - 1].score

    def _is_decided(self, best_live: float, length: int) -> bool:
        """Whether no continuation of the live hypotheses can be among the `nbest`.

        Log-probabilities only fall, but for a bias above 0, and the coverage penalty is 0 at best. The length normalisation
        is best at the limit if the exponent is above 0, and at the next token if not.
        """
        options = self._options
        if len(self._found) < options.nbest or any(bias > 0 for _, bias in options.sequence_bias):
            return False
        best_length = self._limit if options.length_exponent > 0 else min(length + 1, self._limit)
        return options.normalise(best_live, best_length) <= self._found[options.nbest - 1].score

    def best(self) -> list[Hypothesis]:
        """The `nbest` best ones."""
        return self._found[: self._options.nbest]
