"""Random models, searched by tfexport, by Transformers and by CTranslate2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import converters, hugging_face
from makers.references import toolkits
from makers.tiny import randomised
from tests.support.fakes import Ids
from tfexport.config import ModelConfig
from tfexport.models.transformer import Transformer
from tfexport.search.profiles import ProfileName
from tfexport.search.search import Hypothesis, SearchOptions, search
from tfexport.verification.parity import random_sources

NBest = list[tuple[Ids, float]]
LIMIT = 14
SCORES = 1e-4

CONFIG = ModelConfig(
    d_model=24,
    n_heads=3,
    d_ff=40,
    n_encoder_layers=2,
    n_decoder_layers=2,
    src_vocab_size=31,
    tgt_vocab_size=37,
    max_source_length=20,
    max_target_length=30,
    unk_id=0,
    pad_id=1,
    bos_id=2,
    eos_id=3,
    output_bias=True,
    embedding_scale=24**0.5,
)


MODELS = [(1, 2.0), (2, 2.0), (7, 1.0), (8, 3.0), (14, 2.0), (13, 2.0)]
"""Seeds, and a liking for eos with which some outputs of each end, at many lengths, and others run into the limit."""


def model_of(number: int, config: ModelConfig = CONFIG) -> Transformer:
    """One of the random models."""
    seed, end = MODELS[number % len(MODELS)]
    model = randomised(Transformer(config), seed=seed)
    assert isinstance(model, Transformer)
    assert model.output_bias is not None
    with torch.no_grad():
        model.output_bias[[CONFIG.unk_id, CONFIG.pad_id]] = -20.0  # a trained model does not emit them
        model.output_bias[CONFIG.eos_id] += end
    return model.eval()


def sources_of(count: int, number: int = 0) -> list[list[int]]:
    """Random sources without bos and eos: CTranslate2 takes one of special tokens alone for empty, and decodes nothing."""
    sources = random_sources(CONFIG, count, seed=number)
    return [[token if token > CONFIG.eos_id else token + 4 for token in source] for source in sources]


def found_by(
    runtime: Any, sources: Sequence[Sequence[int]], options: SearchOptions, batch: int = 8
) -> list[list[Hypothesis]]:
    return [
        found for at in range(0, len(sources), batch) for found in search(runtime, sources[at : at + batch], options)
    ]


def assert_same(ours: list[list[Hypothesis]], theirs: list[NBest]) -> None:
    """The same outputs in the same order, where their scores can be told apart; scores beyond 100 in six digits."""
    assert len(ours) == len(theirs)
    for found, wanted in zip(ours, theirs, strict=True):
        assert [h.score for h in found] == pytest.approx([score for _, score in wanted], abs=SCORES, rel=1e-6)
        for hypothesis, (ids, score) in zip(found, wanted, strict=True):
            near = {other for other, value in wanted if abs(value - score) <= 1e-5}
            assert hypothesis.ids in near | {ids}


def generated(model: Transformer, sources: Sequence[Sequence[int]], **settings: Any) -> list[NBest]:
    """What `generate` finds."""
    theirs = hugging_face.convert(model)
    beam, longest = settings["num_beams"], max(map(len, sources))
    ids = torch.tensor([[*source, *[CONFIG.pad_id] * (longest - len(source))] for source in sources])
    mask = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources])
    with torch.inference_mode():
        found = theirs.generate(
            input_ids=ids,
            attention_mask=mask,
            num_return_sequences=beam,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            **settings,
        )
    rows = [tuple(row[1:]) for row in found.sequences.tolist()]
    rows = [row[: row.index(EOS_ID) + 1] if EOS_ID in row else row for row in rows]
    if beam == 1:  # a greedy search tells no score: that of a beam of one
        steps = torch.stack(found.logits, dim=1).double().log_softmax(-1)
        A = settings.pop("length_penalty", 1.0)
        scores = [
            float(step[range(len(row)), list(row)].sum()) / len(row) ** A for step, row in zip(steps, rows, strict=True)
        ]
    else:
        scores = found.sequences_scores.tolist()
    both = list(zip(rows, scores, strict=True))
    return [both[at : at + beam] for at in range(0, len(both), beam)]


EOS_ID = CONFIG.eos_id


def translated(
    model: Transformer, folder: Path, sources: Sequence[Sequence[int]], options: SearchOptions, **more: Any
) -> list[NBest]:
    """What CTranslate2 finds."""
    ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed: pip install ctranslate2")
    if not folder.exists():
        converters.write_ctranslate2(model, folder)
    translator = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    settings = {
        "beam_size": options.beam,
        "num_hypotheses": options.nbest,
        "length_penalty": options.length_penalty,
        "min_decoding_length": options.min_length,
        "max_decoding_length": options.max_length,
        "patience": options.patience,
        "max_input_length": 0,
        "return_scores": True,
        **more,
    }
    results = translator.translate_batch([[str(token) for token in source] for source in sources], **settings)
    return [
        [
            (tuple(int(token) for token in tokens), score)
            for tokens, score in zip(result.hypotheses, result.scores, strict=True)
        ]
        for result in results
    ]


def without_eos(found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
    """As CTranslate2 gives them."""
    return [
        [Hypothesis(h.ids[:-1] if h.finished else h.ids, h.score, h.log_prob, h.finished) for h in hypotheses]
        for hypotheses in found
    ]


def found_by_definition(
    profile: ProfileName, after: toolkits.NextLogProbs, config: ModelConfig, options: SearchOptions
) -> toolkits.NBest:
    beam, limit, penalty = options.beam, options.max_length, options.length_penalty
    if profile == "fairseq":
        return toolkits.fairseq(
            after,
            eos=config.eos_id,
            pad=config.pad_id,
            beam=beam,
            max_len=limit - 1,
            lenpen=penalty,
        )
    if profile == "joeynmt":
        never = {config.bos_id, config.pad_id}
        found = toolkits.joeynmt(
            after, eos=config.eos_id, never=never, beam=beam, max_output_length=limit, beam_alpha=penalty
        )
        return found[: options.nbest]
    return toolkits.marian(after, eos=config.eos_id, unk=config.unk_id, beam=beam, max_length=limit, normalize=penalty)
