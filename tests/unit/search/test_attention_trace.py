"""What hypotheses attended to, through every reorder of a beam, and what follows from it for their scores."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tests.support.fakes import (
    ATTENTION_HEADS,
    ATTENTION_LAYERS,
    EOS,
    Ids,
    ScriptedRuntime,
    attention_of,
    random_model,
    tiny_config,
)
from tfexport.errors import TfexportError
from tfexport.search.attention_trace import coverage
from tfexport.search.search import SearchOptions, search

FAKE = tiny_config(tgt_vocab_size=7, n_decoder_layers=ATTENTION_LAYERS, n_heads=ATTENTION_HEADS, d_model=6)
SOURCES: list[Ids] = [(5, 6, EOS), (7, EOS), (5, 6, 7, 8, EOS), (9, 5, 9, EOS), (6,)]
LENGTHS = [7, 1, 20, 3, 12, 5, 9, 2, 17, 8]

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"beam": 3, "nbest": 3},
    "wide beam": {"beam": 6, "nbest": 6},
    "samples": {"samples": 3, "seed": 4},
    "narrowing beam": {"beam": 4, "nbest": 4, "profile": "marian", "length_penalty": 0.0},
    "beam that ends at the limit": {"beam": 3, "nbest": 3, "profile": "hf", "max_length": 4},
    "beam with rules": {"beam": 3, "nbest": 3, "no_repeat_ngram": 2, "min_length": 2},
}


# --- whose attention it is


@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize("name", SEARCHES)
def test_hypotheses_keep_what_they_attended_to(name: str, layer: int) -> None:
    """Attention is a function of a sentence and its tokens here: another row's would be another one."""
    for seed in range(3):
        options = SearchOptions(**{"max_length": 7, **SEARCHES[name]}, attention=True, alignment_layer=layer)
        found = search(ScriptedRuntime(random_model(seed, 7), FAKE), SOURCES, options)
        plain = search(
            ScriptedRuntime(random_model(seed, 7), FAKE),
            SOURCES,
            SearchOptions(**{**vars(options), "attention": False}),
        )
        assert found == plain
        for source, hypotheses in zip(SOURCES, found, strict=True):
            for hypothesis in hypotheses:
                wanted = [
                    attention_of(source, hypothesis.ids[:t])[layer].mean(axis=0) for t in range(len(hypothesis.ids))
                ]
                np.testing.assert_allclose(hypothesis.attention, wanted, atol=1e-6)


# --- the coverage penalty


def test_coverage_is_what_the_paper_says() -> None:
    """Wu et al. 2016, section 7: sum over i of log(min(sum over j of p_ij, 1)), i of the source and j of the output."""
    random = np.random.default_rng(0)
    for _ in range(50):
        length, src = random.integers(1, 9, 2)
        attention = random.dirichlet(np.full(src, 0.3), length)
        wanted = sum(math.log(min(sum(attention[j][i] for j in range(length)), 1.0)) for i in range(src))
        assert coverage(attention) == pytest.approx(wanted, abs=1e-9)
    assert coverage(np.eye(4)) == 0  # each source token had all of one token's attention
    assert coverage(np.array([[1.0, 0.0], [1.0, 0.0]])) == 0  # log 0 is left out, as in CTranslate2
    assert coverage(np.full((4, 2), 0.5)) == 0  # more than 1 is no better than 1


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("beta", [0.2, 3.0])
def test_a_wide_beam_finds_the_best_of_all_outputs(beta: float) -> None:
    """Scored one by one, by the definition."""
    config = FAKE.replace(tgt_vocab_size=5)
    options = SearchOptions(beam=100, nbest=100, max_length=3, coverage_penalty=beta, attention=True)
    without = SearchOptions(beam=100, nbest=100, max_length=3)
    changed = 0
    for seed, source in itertools.product(range(4), SOURCES):
        logits = random_model(seed, 5)
        wanted: list[tuple[float, Ids]] = []
        for length in (1, 2, 3):
            for ids in itertools.product(range(5), repeat=length):
                if EOS in ids[:-1] or (length < 3 and ids[-1] != EOS):
                    continue
                total, sums = 0.0, np.zeros(len(source))
                for t, token in enumerate(ids):
                    row = logits(source, ids[:t]).astype(np.float64)
                    total += row[token] - np.logaddexp.reduce(row)
                    sums += attention_of(source, ids[:t])[-1].mean(axis=0)
                cp = beta * sum(math.log(min(covered, 1.0)) for covered in sums)
                wanted.append((total / ((5 + length) / 6) ** 0.6 + cp, ids))
        wanted.sort(reverse=True)
        [found] = search(ScriptedRuntime(logits, config), [source], options)
        assert [hypothesis.ids for hypothesis in found] == [ids for _, ids in wanted[: len(found)]]
        assert [hypothesis.score for hypothesis in found] == pytest.approx([score for score, _ in wanted[: len(found)]])
        [plain] = search(ScriptedRuntime(logits, config), [source], without)
        changed += plain[0].ids != found[0].ids
    assert changed > 1  # it decides


@pytest.mark.parametrize("name", SEARCHES)
def test_scores_are_those_without_it_and_the_penalty(name: str) -> None:
    options = SearchOptions(**{"max_length": 7, **SEARCHES[name]}, attention=True, coverage_penalty=0.7)
    for hypotheses in search(ScriptedRuntime(random_model(1, 7), FAKE), SOURCES, options):
        for hypothesis in hypotheses:
            assert hypothesis.attention is not None
            plain = options.normalise(hypothesis.log_prob, len(hypothesis.ids))
            assert hypothesis.score == pytest.approx(plain + 0.7 * coverage(hypothesis.attention))
        if not options.samples:
            assert sorted(hypotheses, key=lambda h: -h.score) == hypotheses


def test_attention_is_told_only_to_who_asks() -> None:
    [[found]] = search(ScriptedRuntime(random_model(1, 7), FAKE), SOURCES[:1], SearchOptions(coverage_penalty=0.2))
    assert found.attention is None


@pytest.mark.parametrize("beta", [-0.1, math.inf, math.nan])
def test_a_penalty_that_is_none_is_refused(beta: float) -> None:
    with pytest.raises(TfexportError, match="coverage_penalty is"):
        SearchOptions(coverage_penalty=beta)
