"""Search profiles against Transformers and CTranslate2 themselves: the same n-best lists, and the same scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import converters
from makers.references import toolkits
from tests.support.fakes import Ids
from tests.support.searches import (
    CONFIG,
    EOS_ID,
    LIMIT,
    assert_same,
    found_by,
    found_by_definition,
    generated,
    model_of,
    sources_of,
    translated,
    without_eos,
)
from tfexport.decoding.alignments import Replacement
from tfexport.models.transformer import Transformer
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.hypothesis import SourceTokens
from tfexport.search.profiles import ProfileName
from tfexport.search.search import SearchOptions

HF_OPTIONS: list[dict[str, Any]] = [
    {},
    {"early_stopping": "true"},
    {"early_stopping": "never", "length_penalty": 2.0},
    {"early_stopping": "never", "length_penalty": -1.0},
    {"length_penalty": 0.0, "min_length": 3},
    {"length_penalty": 1.7},
]

CT2_OPTIONS: list[dict[str, Any]] = [
    {},
    {"length_penalty": 0.0},
    {"length_penalty": 0.0, "nbest": 1},
    {"length_penalty": 0.0, "nbest": 2},
    {"length_penalty": 0.6, "min_length": 3},
    {"length_penalty": -1.0, "nbest": 2},
    {"patience": 2.0, "length_penalty": 0.0},
    {"patience": 1.6},
    {"patience": 0.5, "nbest": 1},
]

COVERAGE: list[dict[str, Any]] = [
    {"coverage_penalty": 0.2},
    {"coverage_penalty": 0.5, "length_penalty": 0.0, "nbest": 1},
    {"coverage_penalty": 2.0, "length_penalty": 0.6},
]

ONE_BY_ONE: dict[str, Any] = {"return_attention": True, "max_batch_size": 1}
"""CTranslate2 4.8.5 ends with a segmentation fault where greedy search has a coverage penalty and attention is not asked
for; and in batches its beam search takes the first sentence's attention of the first step for that of all."""

SMALL = CONFIG.replace(n_encoder_layers=1, n_decoder_layers=1)


def torch_log_probs(model: Transformer, source: Ids) -> toolkits.NextLogProbs:
    """Of the whole model, run anew for every step."""

    def after(outputs: list[Ids]) -> list[list[float]]:
        count = len(outputs)
        with torch.inference_mode():
            ids = torch.tensor([[CONFIG.bos_id, *tokens] for tokens in outputs])
            logits = model(torch.tensor([source] * count), torch.tensor([len(source)] * count), ids)
        return logits[:, -1].double().log_softmax(-1).tolist()

    return after


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("beam", [1, 4, 8])
@pytest.mark.parametrize("number", range(len(HF_OPTIONS)))
def test_hf_finds_what_transformers_finds(number: int, beam: int) -> None:
    given = HF_OPTIONS[number]
    model, sources = model_of(number), sources_of(10, number)
    lengths = {"max_length": LIMIT + 1, "min_length": given.get("min_length", -1) + 1}  # with the start token
    options = SearchOptions.for_profile("hf", beam=beam, nbest=beam, **{**given, **lengths})
    theirs: dict[str, Any] = {"num_beams": beam, "max_new_tokens": LIMIT}
    if beam > 1:
        stop: Any = {"true": True, "false": False, "never": "never"}[options.early_stopping]
        theirs |= {"length_penalty": options.length_penalty, "early_stopping": stop}
    if options.min_length:
        theirs["min_new_tokens"] = options.min_new_tokens
    wanted = generated(model, sources, **theirs)
    if beam == 1:
        options = SearchOptions.for_profile("hf", **lengths)
    assert_same(found_by(TorchRuntime(model), sources, options), wanted)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("beam", [1, 4, 8])
@pytest.mark.parametrize("number", range(len(CT2_OPTIONS)))
def test_opennmt_finds_what_ctranslate2_finds(number: int, beam: int, tmp_path: Path) -> None:
    given = {"nbest": beam, **CT2_OPTIONS[number]}
    given["nbest"] = min(beam, given["nbest"])
    if beam == 1:
        given.pop("patience", None)
    model, sources = model_of(number), sources_of(10, number)
    options = SearchOptions.for_profile("opennmt", beam=beam, max_length=LIMIT, **given)
    wanted = translated(model, tmp_path / "ct2", sources, options)
    assert_same(without_eos(found_by(TorchRuntime(model), sources, options)), wanted)


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


@pytest.mark.thorough
@pytest.mark.parametrize("beam", [1, 4, 8])
@pytest.mark.parametrize("profile", ["fairseq", "marian", "joeynmt"])
def test_real_models_give_what_the_documented_searches_find(profile: ProfileName, beam: int) -> None:
    """200 inputs for each setting, of four models."""
    options = SearchOptions.for_profile(profile, beam=beam, nbest=beam, max_length=5)
    best = set()
    for number in (0, 1, 4, 5):
        model, sources = model_of(number, SMALL), sources_of(50, number)
        wanted = [found_by_definition(profile, torch_log_probs(model, source), CONFIG, options) for source in sources]
        assert_same(found_by(TorchRuntime(model), sources, options, batch=25), wanted)
        best |= {found[0][0] for found in wanted}
    assert len(best) > 5
    assert {ids[-1] == EOS_ID for ids in best} == ({True} if profile == "fairseq" else {True, False})
