"""Every family end to end: a naive model of the family's own code, its state_dict, the exported bundle, the same tokens.

The naive models (tests/references) share no code with the canonical one: no cache, their own masks, norms and names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from makers.references.annotated import AnnotatedTransformer
from makers.references.base import BaseTransformer
from makers.references.decode import beam as naive_beam
from makers.references.decode import greedy as naive_greedy
from makers.references.per_head import PerHeadTransformer
from makers.references.tutorial import TutorialTransformer
from makers.tiny import randomised
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.config import ModelConfig
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import Checkpoint, load_checkpoint
from tfexport.models.formats import native
from tfexport.models.formats.native import Tokenizers
from tfexport.models.transformer import Transformer
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, pad, search

SRC_VOCAB, TGT_VOCAB, MAX_LENGTH = 41, 37, 24
SIZES = {"d_model": 24, "n_heads": 3, "d_ffn": 52, "n_encoder_layers": 3, "n_decoder_layers": 2, "max_len": 30}
IDS = {"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3}


@dataclass(frozen=True)
class Case:
    """A random naive model and what became of its file."""

    name: str
    naive: nn.Module
    checkpoint: Checkpoint
    bundle: Bundle
    sources: list[list[int]]


def without_pad(name: str, model: nn.Module) -> nn.Module:
    """Keep pad out of the output: the naive models hide a generated pad from later steps, which no trained one emits."""
    pad_id = IDS["pad_id"]
    with torch.no_grad():
        if name == "tutorial":
            model.decoder.fc_out.bias[pad_id] = -100.0
        elif name == "annotated":
            model.generator.proj.bias[pad_id] = -100.0
        elif name == "per-head":
            model.decoder.token_embedding.weight[pad_id] = 0.0  # tied output: a logit of 0 is never the largest
        else:
            model.embedding.weight[pad_id] = 0.0
    return model


def paper_checkpoint(model: nn.Module, path: Path) -> None:
    """The paper's model as a native checkpoint: its names to canonical ones, one matrix for all embeddings."""
    config = ModelConfig(
        d_model=SIZES["d_model"],
        n_heads=SIZES["n_heads"],
        d_ff=SIZES["d_ffn"],
        n_encoder_layers=SIZES["n_encoder_layers"],
        n_decoder_layers=SIZES["n_decoder_layers"],
        src_vocab_size=SRC_VOCAB,
        tgt_vocab_size=SRC_VOCAB,
        max_source_length=SIZES["max_len"],
        max_target_length=SIZES["max_len"],
        **IDS,
        tie_source_target=True,
        tie_output=True,
        embedding_scale=math.sqrt(SIZES["d_model"]),
    )
    parts = {"q": "query", "k": "key", "v": "value", "out": "output", "inner": "hidden", "outer": "output"}
    norms = {
        "encoder": {"self_norm": "norms.0", "ffn_norm": "norms.1"},
        "decoder": {"self_norm": "norms.0", "cross_norm": "norms.1", "ffn_norm": "norms.2"},
    }
    weights = {
        name: tensor for name, tensor in Transformer(config).state_dict().items() if name.endswith("positions.table")
    }
    for name, tensor in model.state_dict().items():
        side, *rest = name.split(".")
        if side == "embedding":
            weights["encoder.tokens.weight"] = tensor
        else:
            layer, module, *last = rest
            module = norms[side].get(module, module)
            weights[".".join([side, "layers", layer, module, *(parts.get(part, part) for part in last)])] = tensor
    native.save(path, weights, config, Tokenizers(None, None), torch.float32)


@pytest.fixture(scope="module", params=["tutorial", "annotated", "per-head", "base"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name = request.param
    torch.manual_seed(0)
    models = {"tutorial": TutorialTransformer, "annotated": AnnotatedTransformer, "per-head": PerHeadTransformer}
    if name == "base":
        naive: nn.Module = BaseTransformer(vocab=SRC_VOCAB, pad_id=1, **SIZES)
    else:
        naive = models[name](src_vocab=SRC_VOCAB, tgt_vocab=TGT_VOCAB, pad_id=1, **SIZES)
    naive = without_pad(name, randomised(naive, seed=7))
    folder = tmp_path_factory.mktemp(name)
    if name == "base":
        path = folder / "ckpt.safetensors"
        paper_checkpoint(naive, path)
    else:
        path = folder / "ckpt.pt"
        torch.save(naive.state_dict(), path)
    checkpoint = load_checkpoint(path, {"n_heads": SIZES["n_heads"], **IDS})
    export(checkpoint, folder / "bundle", gate=None)
    random = np.random.default_rng(3)
    sources = [random.integers(4, SRC_VOCAB, length).tolist() for length in (1, 2, 3, 5, 8, 9, 13, 17, 21, 30)]
    return Case(name, naive, checkpoint, open_bundle(folder / "bundle"), sources)


def test_logits_equal_the_naive_model_over_a_padded_batch(case: Case) -> None:
    random = np.random.default_rng(5)
    vocab = case.checkpoint.config.tgt_vocab_size
    targets = [[IDS["bos_id"], *random.integers(4, vocab, len(source) % 11)] for source in case.sources]
    (src_ids, src_len), (tgt_ids, tgt_len) = pad(case.sources, 1), pad(targets, 1)
    with torch.inference_mode():
        wanted = case.naive(torch.from_numpy(src_ids), torch.from_numpy(tgt_ids)).numpy()
        model = case.checkpoint.build_model()
        got = model(*(torch.from_numpy(array) for array in (src_ids, src_len, tgt_ids))).numpy()
    real = np.arange(tgt_ids.shape[1]) < tgt_len[:, None]
    assert np.abs(wanted[real] - got[real]).max() <= 1e-5
    # Not a comparison of two constants: the logits do depend on the source.
    assert np.abs(wanted[0, 0] - wanted[1, 0]).max() > 1e-2


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("runtime", ["ort-cpu", "torch"])
def test_greedy_tokens_equal_the_naive_model(case: Case, runtime: str) -> None:
    found = search(load_runtime(runtime, case.bundle, threads=1), case.sources, SearchOptions(max_length=MAX_LENGTH))
    for source, (hypothesis,) in zip(case.sources, found, strict=True):
        wanted = naive_greedy(case.naive, source, bos=2, eos=3, max_length=MAX_LENGTH)
        assert list(hypothesis.ids) == wanted


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("length_penalty", [0.0, 0.6])
def test_beam_hypotheses_equal_the_naive_model(case: Case, length_penalty: float) -> None:
    options = SearchOptions(beam=4, nbest=4, max_length=MAX_LENGTH, length_penalty=length_penalty)
    found = search(load_runtime("ort-cpu", case.bundle, threads=1), case.sources, options)
    for source, hypotheses in zip(case.sources, found, strict=True):
        wanted = naive_beam(
            case.naive, source, bos=2, eos=3, max_length=MAX_LENGTH, beam=4, length_penalty=length_penalty
        )
        assert [list(hypothesis.ids) for hypothesis in hypotheses] == [ids for ids, _ in wanted]
        assert [h.score for h in hypotheses] == pytest.approx([score for _, score in wanted], abs=1e-4)


def test_family_is_recognised(case: Case) -> None:
    assert case.checkpoint.family == ("native" if case.name == "base" else case.name)


def test_annotated_norm_deviates_only_by_its_eps(case: Case) -> None:
    """The documented deviation of the folded norm: eps / std, relative, 1e-6 where the deviation is 1."""
    if case.name != "annotated":
        assert case.checkpoint.notes == ()
        return
    assert "1e-6" in case.checkpoint.notes[0]
    x = torch.randn(5, SIZES["d_model"], dtype=torch.float64)
    theirs = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)
    n = SIZES["d_model"]
    ours = nn.functional.layer_norm(x, (n,), eps=case.checkpoint.config.norm_eps) * math.sqrt((n - 1) / n)
    assert (theirs - ours).abs().max() < 1e-5
