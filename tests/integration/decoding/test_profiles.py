"""Search profiles against Transformers and CTranslate2 themselves: the same n-best lists, and the same scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import converters
from tests.support.searches import (
    CONFIG,
    LIMIT,
    assert_same,
    found_by,
    generated,
    model_of,
    sources_of,
    translated,
    without_eos,
)
from tfexport.decoding.alignments import Replacement
from tfexport.decoding.hypothesis import SourceTokens
from tfexport.decoding.search import SearchOptions
from tfexport.runtimes.pytorch import TorchRuntime

HF_OPTIONS: list[dict[str, Any]] = [
    {},
    {"early_stopping": "true"},
    {"early_stopping": "never", "length_penalty": 2.0},
    {"early_stopping": "never", "length_penalty": -1.0},
    {"length_penalty": 0.0, "min_length": 3},
    {"length_penalty": 1.7},
]


@pytest.mark.parametrize("beam", [1, 4, 8])
@pytest.mark.parametrize("number", range(len(HF_OPTIONS)))
def test_hf_finds_what_transformers_finds(number: int, beam: int) -> None:
    given = HF_OPTIONS[number]
    model, sources = model_of(number), sources_of(10, number)
    options = SearchOptions.for_profile("hf", beam=beam, nbest=beam, max_length=LIMIT, **given)
    theirs: dict[str, Any] = {"num_beams": beam, "max_new_tokens": LIMIT}
    if beam > 1:
        stop: Any = {"true": True, "false": False, "never": "never"}[options.early_stopping]
        theirs |= {"length_penalty": options.length_penalty, "early_stopping": stop}
    if options.min_length:
        theirs["min_new_tokens"] = options.min_length
    wanted = generated(model, sources, **theirs)
    if beam == 1:
        options = SearchOptions.for_profile("hf", max_length=LIMIT, min_length=given.get("min_length"))
    assert_same(found_by(TorchRuntime(model), sources, options), wanted)


CT2_OPTIONS: list[dict[str, Any]] = [
    {},
    {"length_penalty": 0.0},
    {"length_penalty": 0.0, "nbest": 1},
    {"length_penalty": 0.0, "nbest": 2},
    {"length_penalty": 0.6, "min_length": 3},
    {"length_penalty": -1.0, "nbest": 2},
]


@pytest.mark.parametrize("beam", [1, 4, 8])
@pytest.mark.parametrize("number", range(len(CT2_OPTIONS)))
def test_opennmt_finds_what_ctranslate2_finds(number: int, beam: int, tmp_path: Path) -> None:
    given = {"nbest": beam, **CT2_OPTIONS[number]}
    given["nbest"] = min(beam, given["nbest"])
    model, sources = model_of(number), sources_of(10, number)
    options = SearchOptions.for_profile("opennmt", beam=beam, max_length=LIMIT, **given)
    wanted = translated(model, tmp_path / "ct2", sources, options)
    assert_same(without_eos(found_by(TorchRuntime(model), sources, options)), wanted)


COVERAGE: list[dict[str, Any]] = [
    {"coverage_penalty": 0.2},
    {"coverage_penalty": 0.5, "length_penalty": 0.0, "nbest": 1},
    {"coverage_penalty": 2.0, "length_penalty": 0.6},
]


ONE_BY_ONE: dict[str, Any] = {"return_attention": True, "max_batch_size": 1}
"""CTranslate2 4.8.5 ends with a segmentation fault where greedy search has a coverage penalty and attention is not asked
for; and in batches its beam search takes the first sentence's attention of the first step for that of all."""


@pytest.mark.parametrize("beam", [1, 4, 8])
@pytest.mark.parametrize("number", range(len(COVERAGE)))
def test_coverage_penalties_are_ctranslate2s(number: int, beam: int, tmp_path: Path) -> None:
    given = {"nbest": beam, **COVERAGE[number]}
    model, sources = model_of(number), sources_of(25, number)
    options = SearchOptions.for_profile("opennmt", beam=beam, max_length=LIMIT, attention=True, **given)
    more = {**ONE_BY_ONE, "coverage_penalty": options.coverage_penalty}
    wanted = translated(model, tmp_path / "ct2", sources, options, **more)
    assert_same(without_eos(found_by(TorchRuntime(model), sources, options)), wanted)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("beam", [1, 4])
def test_unknown_tokens_are_replaced_by_what_ctranslate2_replaces_them_with(
    beam: int, layer: int, tmp_path: Path
) -> None:
    model, sources = model_of(1), sources_of(50, 1)
    assert model.output_bias is not None
    with torch.no_grad():
        model.output_bias[CONFIG.unk_id] += 22.0  # it writes some
    converters.write_ctranslate2(model, tmp_path / "ct2", alignment_layer=layer)
    options = SearchOptions.for_profile("opennmt", beam=beam, max_length=LIMIT, attention=True, alignment_layer=layer)
    wanted = translated(model, tmp_path / "ct2", sources, options, replace_unknowns=True, **ONE_BY_ONE)
    found = found_by(TorchRuntime(model), sources, options)
    replacement, replaced = Replacement(CONFIG.unk_id), set()
    for source, [hypothesis], [(theirs, _)] in zip(sources, found, wanted, strict=True):
        assert hypothesis.attention is not None
        words = replacement.words(hypothesis.ids, hypothesis.attention, SourceTokens.of(source, CONFIG, None))
        ours = [int(words.get(place, index)) for place, index in enumerate(hypothesis.ids)]
        assert tuple(ours[: len(theirs)]) == theirs
        replaced |= {(len(source), place, word) for place, word in words.items()}
    assert len(replaced) > 30
