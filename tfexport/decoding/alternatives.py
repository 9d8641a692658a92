"""Alternatives at a position: the most likely tokens after a forced beginning, each with its best continuation.

As CTranslate2 defines `return_alternatives` (4.8, `decode_alternatives` in decoding.cc): the N best next tokens, of which
the end is none, in the order of their probabilities; each is then continued by a search of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from tfexport.decoding.hypothesis import Hypothesis, Source, length_limits
from tfexport.decoding.options import SearchOptions
from tfexport.decoding.token_rules import NextTokens
from tfexport.runtimes.base import Runtime

Search = Callable[[Runtime[Any], Sequence[Source], SearchOptions], list[list[Hypothesis]]]
Begin = Callable[[Runtime[Any], Sequence[Source], SearchOptions], tuple[Runtime[Any], Any]]


def with_alternatives(
    search: Search, begin: Begin, runtime: Runtime[Any], sources: Sequence[Source], options: SearchOptions
) -> list[list[Hypothesis]]:
    """For each source its alternatives, the one with the most likely next token first; at least one.

    Where the forced beginning leaves no room for a token, that is the one output that the search finds.

    Args:
        search: continues outputs.
        begin: encodes sources for a search.
    """
    forced_first = runtime.config.forced_first_id >= 0
    begun = [len(source.prefix) + forced_first for source in sources]
    lengths = np.array([len(source) for source in sources])
    limits = np.minimum(length_limits(options, runtime.config, lengths), runtime.capacity.target).tolist()
    room = [place < limit for place, limit in zip(begun, limits, strict=True)]
    words = _next_words(begin, runtime, sources, begun, room, options)

    continued = [
        replace(source, prefix=(*source.prefix, token)) if free else source
        for source, free, likely in zip(sources, room, words, strict=True)
        for token, _ in likely
    ]
    # A profile that scores continuations chooses among all that its search ends with.
    chooses = options.rules.scores_continuation and options.length_penalty != 0
    single = replace(
        options, alternatives=0, min_alternative_prob=0.0, token_scores=True, nbest=options.beam if chooses else 1
    )
    found: list[list[Hypothesis]] = []
    for at in range(0, len(continued), len(sources)):  # never more at once than were asked for
        found += search(runtime, continued[at : at + len(sources)], single)

    outputs = iter(found)
    return [
        [_scored(next(outputs), place, log_prob, options) if free else next(outputs)[0] for (_, log_prob) in likely]
        for place, free, likely in zip(begun, room, words, strict=True)
    ]


def _next_words(
    begin: Begin,
    runtime: Runtime[Any],
    sources: Sequence[Source],
    begun: Sequence[int],
    room: Sequence[bool],
    options: SearchOptions,
) -> list[list[tuple[int, float]]]:
    """For each source the most likely tokens after `begun` of them, with their log-probabilities, most likely first."""
    asked = [replace(source, least=place + 1) for source, place in zip(sources, begun, strict=True)]
    runtime, state = begin(runtime, asked, replace(options, attention=False, coverage_penalty=0.0))
    no_limits = np.full(len(asked), np.iinfo(np.int64).max)
    next_tokens = NextTokens(runtime, options, asked, no_limits)
    every = np.arange(len(asked))
    past = np.full((len(asked) * options.width, 1), runtime.config.bos_id, dtype=np.int64)
    found: list[list[tuple[int, float]]] = [[(-1, 0.0)] for _ in asked]  # of those without room: nothing is chosen
    for length in range(1, max((place + 1 for place, free in zip(begun, room, strict=True) if free), default=0) + 1):
        tokens = np.ascontiguousarray(past[:, -1])
        best, state = next_tokens.best(state, tokens, options.alternatives, length, every, past.copy)
        for index in range(len(asked)):
            if room[index] and length == begun[index] + 1:
                row = index * options.width  # all rows of a source are alike
                ranked = zip(best.ids[row].tolist(), best.log_probs[row].tolist(), strict=True)
                found[index] = _likely(ranked, options)
        past = np.concatenate([past, best.ids[:, :1]], axis=1)
    return found


def _likely(ranked: Any, options: SearchOptions) -> list[tuple[int, float]]:
    """The first ones of `ranked` tokens and log-probabilities that may be expanded; the best one always is."""
    least = math.log(options.min_alternative_prob) if options.min_alternative_prob else -math.inf
    possible = [(token, log_prob) for token, log_prob in ranked if log_prob > -math.inf]
    return possible[:1] + [one for one in islice(possible, 1, options.alternatives) if one[1] >= least]


def _scored(continuations: list[Hypothesis], place: int, log_prob: float, options: SearchOptions) -> Hypothesis:
    """The best of the `continuations` of an alternative, which is their token at `place` and has this log-probability."""
    if not options.rules.scores_continuation:
        best = continuations[0]
        return best if options.token_scores else replace(best, token_log_probs=())

    def steps(found: Hypothesis) -> list[float]:
        return [*found.token_log_probs[:place], log_prob, *found.token_log_probs[place + 1 :]]

    def score(found: Hypothesis) -> float:
        left = len(found.ids) - place - 1
        before, after = sum(steps(found)[: place + 1]), sum(steps(found)[place + 1 :])
        return before + (options.normalise(after, left) if left else 0.0)

    best = max(continuations, key=score)
    told = tuple(steps(best)) if options.token_scores else ()
    return replace(best, score=score(best), log_prob=sum(steps(best)), token_log_probs=told)
