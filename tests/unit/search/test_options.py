"""Every option of a search against brute force: all outputs that there are, each judged by definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.fakes import ScriptedRuntime, random_model, sampling_distribution, tiny_config
from tfexport.errors import TfexportError
from tfexport.search.sampling import RandomStreams
from tfexport.search.search import Hypothesis, SearchOptions, Source, search

Ids = tuple[int, ...]
MOST = 4
"""Tokens of the longest output."""
PREFIX = 2
"""Place of the source that has a forced beginning."""


@dataclass(frozen=True)
class Subject:
    """A runtime, what it should compute, and the few words that are left to its outputs."""

    runtime: Any
    logits: Callable[[Ids, Ids], NDArray[Any]]
    """(source, tokens so far) -> logits [vocab]"""
    words: Ids
    """Those that may come, without eos."""
    bos: int
    eos: int
    sources: list[Ids]

    def others(self) -> Ids:
        """The words that are suppressed, so that all outputs can be listed."""
        return tuple(sorted(set(range(self.runtime.config.tgt_vocab_size)) - {*self.words, self.eos}))


@pytest.fixture(scope="module")
def subject() -> Subject:
    """A fake runtime. tests/integration/search/test_options.py runs these tests with an exported bundle."""
    model = cache(random_model(3, 7))
    return Subject(
        ScriptedRuntime(model, tiny_config(tgt_vocab_size=7)),
        model,
        (3, 4, 5, 6),
        1,
        2,
        [(5, 6, 2), (7, 2), (5, 9, 9, 2)],
    )


RULES: list[dict[str, Any]] = [
    {},
    {"min_length": 2},
    {"max_length": 3},
    {"max_length": 2, "min_length": 1},
    {"max_length_ratio": 0.5},
    {"no_repeat_ngram": 1},
    {"no_repeat_ngram": 2},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.8},
    {"suppress": 0},
    {"suppress_first": 1},
    {"prefix": 2},
    {"listed": 3},
    {"no_repeat_ngram": 2, "repetition_penalty": 1.2, "suppress_first": 0, "min_length": 2, "prefix": 1},
    {"listed": 2, "repetition_penalty": 1.2, "min_length": 2},
]
"""Options of a search; of words it is told which of the subject's, of `prefix` and `listed` how many."""


def options_of(subject: Subject, rules: dict[str, Any], **more: Any) -> SearchOptions:
    given = {
        name: value for name, value in rules.items() if name not in ("prefix", "listed", "suppress", "suppress_first")
    }
    suppress = subject.others() + ((subject.words[rules["suppress"]],) if "suppress" in rules else ())
    first = (subject.words[rules["suppress_first"]],) if "suppress_first" in rules else ()
    settings = {"max_length": MOST, "suppress": suppress, "suppress_first": first, "token_scores": True}
    return SearchOptions(**{**settings, **given, **more})


def asked(subject: Subject, rules: dict[str, Any]) -> list[Source]:
    """The sources, of which the last has a forced beginning and the second a list, where the rules have such."""
    prefix = subject.words[: rules.get("prefix", 0)]
    listed = np.array([*subject.words[: rules["listed"]], subject.eos]) if "listed" in rules else None
    return [
        Source(ids, prefix if place == PREFIX else (), line=place, candidates=listed if place == 1 else None)
        for place, ids in enumerate(subject.sources)
    ]


def next_steps(
    subject: Subject, source: Source, past: Ids, options: SearchOptions, *, of_logits: bool
) -> dict[int, float]:
    """The log-probability of every token that may follow `past`, by the definitions of all rules; best first, then by id.

    Args:
        of_logits: repetitions are penalised in logits (Keskar et al. 2019), not as in Transformers' beams after the softmax.
    """
    logits = subject.logits(tuple(source.ids), past).astype(np.float64).copy()
    if source.candidates is not None:
        logits[[token for token in range(len(logits)) if token not in (*source.candidates, *source.prefix)]] = -np.inf

    def normalised() -> NDArray[np.float64]:
        return logits - (np.log(np.exp(logits - logits.max()).sum()) + logits.max())

    scores = logits if of_logits else normalised()
    for token in {subject.bos, *past}:
        scores[token] *= options.repetition_penalty if scores[token] < 0 else 1 / options.repetition_penalty
    logits = scores
    if of_logits:
        scores = normalised()
    length = len(past) + 1
    possible = []
    for token in range(len(scores)):
        n = options.no_repeat_ngram
        ngrams = [tuple(((subject.bos, *past))[at : at + n]) for at in range(length + 1 - n)] if n else []
        banned = (
            token in options.suppress
            or (length == 1 and token in options.suppress_first)
            or (length <= options.min_length and token == subject.eos)
            or (n > 0 and (*((subject.bos, *past)[length - n + 1 :] if n > 1 else ()), token) in ngrams)
            or scores[token] == -np.inf
        )
        if not banned:
            possible.append(token)
    if length <= len(source.prefix):
        possible = [source.prefix[length - 1]]
    elif not possible:
        possible = [subject.eos]
    return {token: float(scores[token]) for token in sorted(possible, key=lambda token: (-scores[token], token))}


def limit_of(source: Source, options: SearchOptions) -> int:
    ratio = options.max_length_ratio
    return options.max_length if ratio is None else min(options.max_length, math.ceil(len(source) * ratio))


def every_output(
    subject: Subject, source: Source, options: SearchOptions, past: Ids = (), steps: tuple[float, ...] = ()
) -> Iterator[tuple[Ids, tuple[float, ...]]]:
    """All outputs that keep the rules, with the log-probabilities of their tokens."""
    if past and (past[-1] == subject.eos or len(past) == limit_of(source, options)):
        yield past, steps
        return
    for token, log_prob in next_steps(subject, source, past, options, of_logits=False).items():
        yield from every_output(subject, source, options, (*past, token), (*steps, log_prob))


def assert_is(found: Hypothesis, ids: Ids, steps: Sequence[float], subject: Subject, options: SearchOptions) -> None:
    assert found.ids == ids
    assert found.token_log_probs == pytest.approx(steps, abs=1e-4)
    assert found.log_prob == pytest.approx(sum(steps), abs=1e-4)
    assert found.score == pytest.approx(sum(steps) / ((5 + len(ids)) / 6) ** options.length_penalty, abs=1e-4)
    assert found.finished == (ids[-1] == subject.eos)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_wide_beam_lists_the_best_of_all_outputs(subject: Subject, rules: dict[str, Any]) -> None:
    options = options_of(subject, rules, beam=260, nbest=12)
    sources = asked(subject, rules)
    for source, hypotheses in zip(sources, search(subject.runtime, sources, options), strict=True):
        every = [*every_output(subject, source, options)]
        score = {ids: sum(steps) / ((5 + len(ids)) / 6) ** options.length_penalty for ids, steps in every}
        wanted = sorted(every, key=lambda one: -score[one[0]])[:12]
        assert len(hypotheses) == len(wanted)
        for found, (ids, steps) in zip(hypotheses, wanted, strict=True):
            assert_is(found, ids, steps, subject, options)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_greedy_search_takes_the_best_token_of_each_step(subject: Subject, rules: dict[str, Any]) -> None:
    options = options_of(subject, rules)
    sources = asked(subject, rules)
    for source, [found] in zip(sources, search(subject.runtime, sources, options), strict=True):
        ids: Ids = ()
        steps: list[float] = []
        while not ids or (ids[-1] != subject.eos and len(ids) < limit_of(source, options)):
            token, log_prob = next(iter(next_steps(subject, source, ids, options, of_logits=True).items()))
            ids, steps = (*ids, token), [*steps, log_prob]
        assert_is(found, ids, steps, subject, options)


@pytest.mark.parametrize("rules", [RULES[0], *RULES[5:]], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 2.0}, {"top_k": 2}, {"top_p": 0.6, "temperature": 3.0}], ids=str
)
def test_samples_are_where_the_random_number_falls(
    subject: Subject, rules: dict[str, Any], settings: dict[str, Any]
) -> None:
    """In the distribution over what may come, best token first, that the definitions of the settings leave."""
    samples = 6
    options = options_of(subject, rules, samples=samples, seed=5, **settings)
    sources = asked(subject, rules)
    streams = RandomStreams(5, range(len(sources)), samples)
    for place, (source, hypotheses) in enumerate(zip(sources, search(subject.runtime, sources, options), strict=True)):
        for sample, found in enumerate(hypotheses):
            ids: Ids = ()
            steps: list[float] = []
            while not ids or (ids[-1] != subject.eos and len(ids) < limit_of(source, options)):
                possible = next_steps(subject, source, ids, options, of_logits=True)
                probabilities = sampling_distribution(**settings, logits=np.array([*possible.values()]))
                number = streams.uniform(np.array([place]), len(ids) + 1)[sample]
                drawn = int(np.searchsorted(np.cumsum(probabilities), number, side="right"))
                token = [*possible][min(drawn, len(possible) - 1)]
                ids, steps = (*ids, token), [*steps, possible[token]]
            assert_is(found, ids, steps, subject, options)


@pytest.mark.parametrize("rules", [{}, {"prefix": 1}, {"prefix": 2, "no_repeat_ngram": 2}, {"listed": 3}], ids=str)
def test_alternatives_are_the_best_outputs_with_each_of_the_likeliest_words(
    subject: Subject, rules: dict[str, Any]
) -> None:
    options = options_of(subject, rules, beam=260, alternatives=3)
    sources = asked(subject, rules)
    for source, hypotheses in zip(sources, search(subject.runtime, sources, options), strict=True):
        begun = len(source.prefix)
        likely = next_steps(subject, source, source.prefix, options, of_logits=False)
        words = [token for token in likely if token != subject.eos][:3]
        every = [*every_output(subject, source, options)]
        assert [found.ids[begun] for found in hypotheses] == words
        for word, found in zip(words, hypotheses, strict=True):
            mine = [
                (sum(steps) / ((5 + len(ids)) / 6) ** 0.6, ids, steps) for ids, steps in every if ids[begun] == word
            ]
            _, ids, steps = max(mine)
            assert_is(found, ids, steps, subject, options)


@pytest.mark.thorough
def test_the_subjects_try_the_rules(subject: Subject) -> None:
    """Each rule changes what is found."""
    plain = [
        [h.ids for h in one]
        for one in search(subject.runtime, asked(subject, {}), options_of(subject, {}, beam=260, nbest=12))
    ]
    for rules in RULES[1:]:
        found = search(subject.runtime, asked(subject, rules), options_of(subject, rules, beam=260, nbest=12))
        assert [[h.ids for h in one] for one in found] != plain
    assert len({*itertools.chain(*plain)}) > 12


@pytest.mark.parametrize("name", ["beam", "samples"])
def test_numbers_that_no_array_has_are_refused(name: str) -> None:
    with pytest.raises(TfexportError, match=f"{name} is {2**64}, not between"):
        SearchOptions(**{name: 2**64})
