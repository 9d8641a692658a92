"""Rules about the next token: against Transformers and CTranslate2, and on a bundle."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support.searches import (
    LIMIT,
    SCORES,
    assert_same,
    found_by,
    generated,
    model_of,
    sources_of,
    translated,
    without_eos,
)
from tfexport.bundle.reader import open_bundle
from tfexport.runtimes import load_runtime
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, Source, search

GIVEN: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"no_repeat_ngram": 2},
    {"no_repeat_ngram": 1, "repetition_penalty": 1.5},
    {"suppress": (17, 25, 30, 4, 12), "suppress_first": (8, 20)},
    {"force_eos": True},
    {"force_eos": True, "min_length": 5, "no_repeat_ngram": 2},
]


THEIRS = {
    "no_repeat_ngram": "no_repeat_ngram_size",
    "suppress": "suppress_tokens",
    "suppress_first": "begin_suppress_tokens",
    "repetition_penalty": "repetition_penalty",
    "force_eos": "forced_eos_token_id",
    "min_length": "min_new_tokens",
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("beam", [1, 4, 8])
@pytest.mark.parametrize("number", range(len(GIVEN)))
def test_rules_are_those_of_transformers(number: int, beam: int) -> None:
    given = GIVEN[number]
    model, sources = model_of(number), sources_of(10, number)
    lengths = {"max_length": LIMIT + 1} | ({"min_length": given["min_length"] + 1} if "min_length" in given else {})
    options = SearchOptions.for_profile("hf", beam=beam, nbest=beam, **{**given, **lengths})
    settings = {THEIRS[name]: list(rule) if isinstance(rule, tuple) else rule for name, rule in given.items()}
    settings |= {"forced_eos_token_id": model.config.eos_id} if "force_eos" in given else {}
    wanted = generated(model, sources, num_beams=beam, max_new_tokens=LIMIT, **settings)
    found = found_by(TorchRuntime(model), sources, options)
    if beam > 1:
        assert_same(found, wanted)
    else:  # Transformers tells no scores of a greedy search
        assert [[h.ids for h in hypotheses] for hypotheses in found] == [[ids for ids, _ in one] for one in wanted]


@pytest.mark.parametrize("options", [{}, {"beam": 4, "nbest": 4}], ids=str)
def test_a_bundle_has_the_same_of_all_this(tiny_bundle: Path, options: dict[str, Any]) -> None:
    """ONNX Runtime, whose step tells logits and best tokens in two ways, and PyTorch."""
    bundle = open_bundle(tiny_bundle)
    ours, reference = (load_runtime(name, bundle, threads=1) for name in ("ort-cpu", "torch"))
    plain = [[2, 5, 6, 3], [2, 9, 3], [2, 30, 4, 4, 7, 3]]
    sources = [Source(ids, prefix=(4 + 2 * place, 7)[:place]) for place, ids in enumerate(plain)]
    rules = {"repetition_penalty": 1.2, "no_repeat_ngram": 2, "suppress": (11, 12), "suppress_first": (20,)}
    asked = SearchOptions(max_length=12, token_scores=True, **options, **rules)
    found, wanted = (search(runtime, sources, asked) for runtime in (ours, reference))
    assert [[h.ids for h in one] for one in found] == [[h.ids for h in one] for one in wanted]
    for one, other in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
        assert one.token_log_probs == pytest.approx(other.token_log_probs, abs=SCORES)
    assert all(h.ids[: len(s.prefix)] == s.prefix for s, one in zip(sources, found, strict=True) for h in one)


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize(
    ("rules", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"no_repeat_ngram": 2}, {"no_repeat_ngram_size": 2}),
        ({"suppress": (17, 25, 30)}, {"suppress_sequences": [["17"], ["25"], ["30"]]}),
    ],
    ids=str,
)
def test_rules_are_those_of_ctranslate2(
    rules: dict[str, Any], theirs: dict[str, Any], beam: int, tmp_path: Path
) -> None:
    model, sources = model_of(2), sources_of(10, 2)
    options = SearchOptions.for_profile("opennmt", beam=beam, nbest=beam, max_length=LIMIT, **rules)
    wanted = translated(model, tmp_path / "ct2", sources, options, **theirs)
    assert_same(without_eos(found_by(TorchRuntime(model), sources, options)), wanted)


def test_a_forced_beginning_is_that_of_ctranslate2(tmp_path: Path) -> None:
    """It costs nothing there. Only greedy: in a beam CTranslate2 goes on otherwise after it."""
    model, sources = model_of(3), sources_of(9, 3)
    prefixes = [(8 + place % 5,) * (place % 3) for place in range(len(sources))]
    options = SearchOptions.for_profile("opennmt", max_length=LIMIT)
    given = [[str(token) for token in prefix] for prefix in prefixes]
    wanted = translated(model, tmp_path / "ct2", sources, options, target_prefix=given)
    asked = [Source(source, prefix=prefix) for source, prefix in zip(sources, prefixes, strict=True)]
    assert_same(without_eos(search(TorchRuntime(model), asked, options)), wanted)
