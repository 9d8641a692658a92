"""Alternatives after a forced beginning, against every sequence there is."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tests.support.fakes import EOS, Ids, Model, ScriptedRuntime, random_model, tiny_config
from tfexport.errors import TfexportError
from tfexport.search.profiles import PROFILES
from tfexport.search.search import Hypothesis, SearchOptions, Source, search
from tfexport.search.token_rules import log_softmax

VOCAB = 5
SOURCES: list[Ids] = [(5, 6, EOS), (7, EOS), (6,), (5, 9, 9, EOS)]
PREFIXES: list[Ids] = [(), (4,), (3, 0), (4, 4)]
ASKED = [Source(ids, prefix=prefix) for ids, prefix in zip(SOURCES, PREFIXES, strict=True)]


def run(model: Model, config: Any = None, **options: Any) -> list[list[Hypothesis]]:
    runtime = ScriptedRuntime(model, config or tiny_config(tgt_vocab_size=VOCAB))
    return search(runtime, ASKED, SearchOptions(**options))


def steps_of(model: Model, source: Ids, ids: Ids) -> list[float]:
    return [float(log_softmax(model(source, ids[:at])[None])[0, token]) for at, token in enumerate(ids)]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("seed", range(4))
def test_each_alternative_has_its_best_continuation_and_the_likeliest_comes_first(seed: int) -> None:
    """Against all outputs there are of up to five tokens."""
    model = random_model(seed, VOCAB)
    found = run(model, beam=130, alternatives=3, max_length=5, length_penalty=0.7, token_scores=True)
    for source, prefix, outputs in zip(SOURCES, PREFIXES, found, strict=True):
        likely = log_softmax(model(source, prefix)[None])[0]
        wanted = sorted((token for token in range(VOCAB) if token != EOS), key=lambda token: -likely[token])[:3]
        assert [hypothesis.ids[len(prefix)] for hypothesis in outputs] == wanted
        for token, hypothesis in zip(wanted, outputs, strict=True):
            every = []
            begun = (*prefix, token)
            for size in range(5 - len(begun) + 1):
                for rest in itertools.product(range(VOCAB), repeat=size):
                    ids = (*begun, *rest)
                    if EOS in rest[:-1] or (ids[-1] != EOS and len(ids) < 5) or (not rest and len(ids) < 5):
                        continue
                    every.append((sum(steps_of(model, source, ids)) / ((5 + len(ids)) / 6) ** 0.7, ids))
            score, ids = max(every)
            assert hypothesis.ids == ids
            assert hypothesis.score == pytest.approx(score, abs=1e-6)
            assert hypothesis.token_log_probs == pytest.approx(steps_of(model, source, ids), abs=1e-6)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("beam", [1, 3])
def test_alternatives_keep_the_rules_and_need_no_neighbours(beam: int, profile: Any) -> None:
    runtime = ScriptedRuntime(random_model(5, 9), tiny_config(tgt_vocab_size=9, forced_first_id=7))
    given: dict[str, Any] = {"suppress": (5,), "no_repeat_ngram": 1, "max_length": 6, "min_length": 4}
    options = SearchOptions.for_profile(profile, beam=beam, alternatives=3, **given)
    together = search(runtime, ASKED, options)
    for source, outputs in zip(ASKED, together, strict=True):
        place = len(source.prefix) + 1
        assert [h.ids for h in outputs] == [h.ids for h in search(runtime, [source], options)[0]]
        assert all(h.ids[:place] == (7, *source.prefix) for h in outputs)
        assert len({h.ids[place] for h in outputs}) == len(outputs) == 3
        free = [h.ids[place:] for h in outputs]
        assert not any({5, *source.prefix, 7} & set(ids) or len(set(ids)) < len(ids) for ids in free)
        assert not any(EOS in h.ids[: options.min_new_tokens] for h in outputs)


def test_the_least_probability_of_an_alternative() -> None:
    def model(source: Ids, tokens: Ids) -> np.ndarray:
        return np.log(np.array([0.3, 0.05, 0.2, 0.35, 0.1], dtype=np.float32))

    for least, words in ((0.0, [3, 0, 4, 1]), (0.099, [3, 0, 4]), (0.301, [3]), (0.9, [3])):
        found = run(model, alternatives=8, min_alternative_prob=least, max_length=5)
        for prefix, outputs in zip(PREFIXES, found, strict=True):
            assert [h.ids[len(prefix)] for h in outputs] == words


def test_a_beginning_that_leaves_no_room_is_one_output() -> None:
    model = random_model(1, VOCAB)
    found = run(model, alternatives=3, max_length=2)
    assert [len(outputs) for outputs in found] == [3, 3, 1, 1]
    assert [outputs[0].ids for outputs in found[2:]] == [(3, 0), (4, 4)]
    assert all(not h.finished or h.ids[-1] == EOS for outputs in found for h in outputs)
    assert search(ScriptedRuntime(model, tiny_config(tgt_vocab_size=VOCAB)), [], SearchOptions(alternatives=2)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alternatives": -1}, "alternatives is -1"),
        ({"alternatives": 2, "nbest": 2, "beam": 2}, "alternatives exclude nbest and samples"),
        ({"alternatives": 2, "samples": 1}, "alternatives exclude nbest and samples"),
        ({"min_alternative_prob": 0.5}, "min_alternative_prob needs alternatives"),
        ({"alternatives": 2, "min_alternative_prob": math.nan}, "not between 0 and 1"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TfexportError, match=message):
        SearchOptions(**options)
