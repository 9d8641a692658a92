"""Drawn tokens have the distribution that was asked for, and depend on seed and line alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.support.fakes import (
    EOS,
    LOGITS,
    Ids,
    ScriptedRuntime,
    constant_model,
    random_model,
    sampling_distribution,
    tiny_config,
)
from tfexport.search.sampling import RandomStreams, draw
from tfexport.search.search import SearchOptions, Source, search
from tfexport.search.token_rules import log_softmax

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"temperature": 2.0, "top_k": 4, "top_p": 0.7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_are_drawn_as_the_distribution_has_them(settings: dict[str, Any]) -> None:
    """All places in the distribution, evenly spaced: each token has as many as its probability says."""
    count = 20_000
    scores = np.repeat(log_softmax(LOGITS[None]), count, axis=0)
    drawn = draw(scores, (np.arange(count) + 0.5) / count, SearchOptions(samples=1, **settings))
    found = np.bincount(drawn, minlength=len(LOGITS)) / count
    np.testing.assert_allclose(found, sampling_distribution(**settings), atol=2 / count)


def test_what_may_not_come_is_not_drawn() -> None:
    scores = np.array([[-np.inf, -1.0, -np.inf, -0.5, -np.inf]])
    for place in (0.0, 0.3, 0.999999999, 1 - 2**-53):
        for settings in ({}, {"temperature": 1e-300}, {"temperature": 1e300}, {"top_k": 3}, {"top_p": 1e-9}):
            assert draw(scores, np.array([place]), SearchOptions(samples=1, **settings))[0] in (1, 3)


def test_random_numbers_are_even_and_those_of_other_lines_samples_steps_and_seeds_are_others() -> None:
    streams = RandomStreams(7, range(50), 10)
    numbers = np.array([streams.uniform(np.arange(50), step) for step in range(1, 41)])
    assert len(np.unique(numbers)) == numbers.size == 20_000
    assert np.bincount((10 * numbers).astype(int).ravel()) == pytest.approx([2000] * 10, abs=150)
    neighbours = [
        numbers[:, :10].ravel(),
        numbers[:, 10:20].ravel(),
        RandomStreams(8, [0], 10).uniform(np.array([0]), 1),
    ]
    assert abs(np.corrcoef(*neighbours[:2])[0, 1]) < 0.15
    assert not set(neighbours[2]) & set(numbers.ravel())
    assert (RandomStreams(7, [3], 10).uniform(np.array([0]), 5) == numbers[4, 30:40]).all()


def test_outputs_of_a_search_are_as_likely_as_the_model_says() -> None:
    model = random_model(1, 5)
    [found] = search(
        ScriptedRuntime(model, tiny_config(tgt_vocab_size=5)), [(6,)], SearchOptions(samples=4000, max_length=2)
    )
    drawn = Counter(hypothesis.ids for hypothesis in found)
    for hypothesis in found:
        probability = np.exp(hypothesis.log_prob)
        assert abs(drawn[hypothesis.ids] / 4000 - probability) < 4 * np.sqrt(probability / 4000)
    assert sum(np.exp(h.log_prob) for h in {h.ids: h for h in found}.values()) > 0.97


def test_the_log_probability_is_the_models_whatever_is_drawn_from() -> None:
    model = constant_model(LOGITS.tolist())
    options = SearchOptions(samples=3, temperature=5.0, top_k=2, max_length=3, token_scores=True)
    [found] = search(ScriptedRuntime(model, tiny_config(tgt_vocab_size=6)), [(6,)], options)
    exact = log_softmax(LOGITS[None])[0]
    for hypothesis in found:
        assert set(hypothesis.ids) <= {1, 5}
        assert hypothesis.token_log_probs == pytest.approx([exact[token] for token in hypothesis.ids], abs=1e-6)


def drawn(lines: dict[int, Ids], *, seed: int = 3, samples: int = 2, **options: Any) -> dict[int, list[Ids]]:
    runtime = ScriptedRuntime(random_model(0, 9), tiny_config(tgt_vocab_size=9))
    asked = SearchOptions(samples=samples, seed=seed, max_length=7, **options)
    found = search(runtime, [Source(ids, line=line) for line, ids in lines.items()], asked)
    return {line: [h.ids for h in hypotheses] for line, hypotheses in zip(lines, found, strict=True)}


LINES: dict[int, Ids] = {1: (5, 6), 2: (7,), 3: (5, 6, 7, 8), 4: (7,), 5: (9, 5, 9)}


def test_seed_and_line_decide_whatever_is_decoded_beside_and_however_many_are_drawn() -> None:
    together = drawn(LINES)
    for line, ids in LINES.items():
        assert drawn({line: ids})[line] == together[line]
    assert drawn(dict(reversed(LINES.items()))) == together
    assert {line: found[:2] for line, found in drawn(LINES, samples=5).items()} == together
    assert drawn(LINES) == together != drawn(LINES, seed=4)
    assert together[2] != together[4]  # the same source, another line
    assert all(len(set(found)) > 1 for found in drawn(LINES, samples=6).values())


def test_samples_keep_the_rules() -> None:
    found = drawn(LINES, samples=8, no_repeat_ngram=1, suppress=(3, 4), min_length=2)
    for ids in (ids for several in found.values() for ids in several):
        assert len(set(ids)) == len(ids) > 2
        assert not {3, 4} & set(ids)
        assert EOS not in ids[:2]
