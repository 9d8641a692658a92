"""Drawn tokens have the distribution that was asked for, and depend on seed and line alone; on a fake and on a bundle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import EOS, Ids, ScriptedRuntime, constant_model, random_model, tiny_config
from numpy.typing import NDArray

from tfexport.bundle.reader import open_bundle
from tfexport.decoding.batches import decode_all
from tfexport.decoding.sampling import RandomStreams, draw
from tfexport.decoding.search import SearchOptions, Source, search
from tfexport.decoding.token_rules import log_softmax
from tfexport.runtimes import load_runtime

LOGITS = np.array([1.0, 3.0, 0.0, 2.0, -1.0, 2.5])


def defined(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, logits: NDArray[np.float64] = LOGITS
) -> NDArray[np.float64]:
    """The distribution over the tokens of `logits`, from the definitions: Holtzman et al. 2020, section 3.1 and 5."""
    probabilities = np.exp(logits / temperature)
    probabilities /= probabilities.sum()
    best_first = sorted(range(len(logits)), key=lambda token: -probabilities[token])
    if top_k:
        probabilities[best_first[top_k:]] = 0
        probabilities /= probabilities.sum()
    kept, total = [], 0.0
    for token in best_first:
        if total < top_p:  # the smallest set that has at least top_p
            kept.append(token)
            total += probabilities[token]
    probabilities[[token for token in best_first if token not in kept]] = 0
    return probabilities / probabilities.sum()


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
    np.testing.assert_allclose(found, defined(**settings), atol=2 / count)


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


def test_a_bundle_draws_the_same_alone_in_batches_and_with_workers(tiny_bundle: Path) -> None:
    runtime = load_runtime("ort-cpu", open_bundle(tiny_bundle), threads=1)
    sources = [Source([2, 4 + line % 20, *[7] * (line % 5), 3], line=line) for line in range(30)]
    options = SearchOptions(samples=3, top_p=0.9, seed=11, max_length=12)
    alone = [[h.ids for h in search(runtime, [source], options)[0]] for source in sources]
    for batch_size, workers in ((7, 1), (30, 1), (4, 2)):
        together = decode_all(runtime, sources, options, batch_size=batch_size, workers=workers)
        assert [[h.ids for h in hypotheses] for hypotheses in together] == alone
    assert len({ids for several in alone for ids in several}) > 60


def test_the_best_token_alone_is_greedy_search(tiny_bundle: Path) -> None:
    runtime = load_runtime("ort-cpu", open_bundle(tiny_bundle), threads=1)
    sources = [[2, 5, 6, 3], [2, 9, 3], [2, 30, 4, 4, 7, 3]]
    greedy = [h.ids for [h] in search(runtime, sources, SearchOptions())]
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-5}):
        found = search(runtime, sources, SearchOptions(samples=2, **settings))  # type: ignore[arg-type]
        assert [h.ids for hypotheses in found for h in hypotheses] == [ids for ids in greedy for _ in range(2)]
