"""Alternatives at a position: the most likely tokens after a forced prefix, each with its best continuation.

This is `return_alternatives` of CTranslate2 (4.8, `decode_alternatives` in decoding.cc): the N best next tokens except eos,
most likely first. A separate search continues each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tfexport.runtimes.base import Runtime, step_for
from tfexport.runtimes.outputs import Best
from tfexport.search.hypothesis import Hypothesis, Source
from tfexport.search.options import SearchOptions
from tfexport.search.source_batch import encode, length_limits
from tfexport.search.token_rules import TokenRules


class Candidate(NamedTuple):
    """A token for a search to continue."""

    token: int
    log_prob: float


class Alternatives:
    """The next tokens of a batch of sources, most likely first, and the searches that continue them.

    If the length limit of a source leaves no room for a token after its prefix, it has one alternative, its output.

    Attributes:
        options: the options of the searches that continue.
        batches: the sources of these searches; no batch is larger than `sources`.
    """

    def __init__(self, runtime: Runtime, sources: Sequence[Source], options: SearchOptions):
        options = replace(options, scores=True)
        self._options = options
        forced_first = runtime.config.forced_first_id >= 0
        self._positions = [len(source.prefix) + forced_first for source in sources]
        limits = length_limits(runtime, sources, options).tolist()
        self._has_room = [position < limit for position, limit in zip(self._positions, limits, strict=True)]
        self._candidates = self._next_tokens(runtime, sources)
        continued = [
            replace(source, prefix=(*source.prefix, candidate.token)) if has_room else source
            for source, has_room, candidates in zip(sources, self._has_room, self._candidates, strict=True)
            for candidate in candidates
        ]
        self.batches = [continued[start : start + len(sources)] for start in range(0, len(continued), len(sources))]
        # A profile that scores continuations chooses among all hypotheses of its search.
        chooses = options.search_profile.scores_continuation and options.length_penalty != 0
        self.options = replace(
            options, alternatives=0, min_alternative_prob=0.0, token_scores=True, nbest=options.beam if chooses else 1
        )

    def best_continuations(self, results: Sequence[Sequence[list[Hypothesis]]]) -> list[list[Hypothesis]]:
        """The best hypothesis of each alternative, by source.

        Args:
            results: the hypotheses of each source of each of the `batches`.
        """
        hypotheses = (of_source for batch in results for of_source in batch)
        return [
            [
                self._best(next(hypotheses), position, candidate.log_prob) if has_room else next(hypotheses)[0]
                for candidate in candidates
            ]
            for position, has_room, candidates in zip(self._positions, self._has_room, self._candidates, strict=True)
        ]

    def _next_tokens(self, runtime: Runtime, sources: Sequence[Source]) -> list[list[Candidate]]:
        """For each source the most likely tokens after its prefix, most likely first."""
        options, positions = self._options, self._positions
        without_eos = [replace(source, least=place + 1) for source, place in zip(sources, positions, strict=True)]
        runtime, state = encode(runtime, without_eos, replace(options, attention=False, coverage_penalty=0.0))
        no_limits = np.full(len(sources), np.iinfo(np.int64).max)
        rules, sentences = TokenRules(runtime, options, without_eos, no_limits), np.arange(len(sources))
        past = np.full((len(sources) * options.width, 1), runtime.config.bos_id, dtype=np.int64)
        alternatives = [[Candidate(-1, 0.0)] for _ in sources]  # for sources without room for a token
        last = max((place for place, has_room in zip(positions, self._has_room, strict=True) if has_room), default=-1)
        for position in range(last + 1):
            tokens, length = np.ascontiguousarray(past[:, -1]), position + 1
            request = rules.request(options.alternatives, length, sentences)
            output, state = step_for(runtime, state, tokens, request)
            best = rules.best(output, options.alternatives, length, sentences, lambda *_, past=past: past.copy())
            assert isinstance(best, Best)  # scores are requested
            for index in range(len(sources)):
                if self._has_room[index] and position == positions[index]:
                    row = index * options.width  # all rows of a source are equal
                    alternatives[index] = self._likely(best.ids[row].tolist(), best.log_probs[row].tolist())
            past = np.concatenate([past, best.ids[:, :1]], axis=1)
        return alternatives

    def _likely(self, ids: Sequence[int], log_probs: Sequence[float]) -> list[Candidate]:
        """The possible tokens of this ranking with at least the minimum probability; always the best possible one."""
        options = self._options
        least = math.log(options.min_alternative_prob) if options.min_alternative_prob else -math.inf
        possible = [Candidate(*pair) for pair in zip(ids, log_probs, strict=True) if pair[1] > -math.inf]
        return possible[:1] + [candidate for candidate in possible[1:] if candidate.log_prob >= least]

    def _best(self, continuations: Sequence[Hypothesis], position: int, log_prob: float) -> Hypothesis:
        """The best of the `continuations` of an alternative. Its token at `position` has this log-probability."""
        options = self._options
        if not options.search_profile.scores_continuation:
            best = continuations[0]
            return best if options.token_scores else replace(best, token_log_probs=())

        def steps(hypothesis: Hypothesis) -> list[float]:
            return [*hypothesis.token_log_probs[:position], log_prob, *hypothesis.token_log_probs[position + 1 :]]

        def score(hypothesis: Hypothesis) -> float:
            left = len(hypothesis.ids) - position - 1
            before, after = sum(steps(hypothesis)[: position + 1]), sum(steps(hypothesis)[position + 1 :])
            return before + (options.normalise(after, left) if left else 0.0)

        best = max(continuations, key=score)
        token_log_probs = tuple(steps(best)) if options.token_scores else ()
        return replace(best, score=score(best), log_prob=sum(steps(best)), token_log_probs=token_log_probs)
