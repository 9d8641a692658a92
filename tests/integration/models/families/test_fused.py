"""A family file says a gated feed-forward of one fused matrix, RMSNorm, heads of the encoder alone, and no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from makers.references.fused import Fused
from makers.tiny import randomised
from tests.support.module_runtime import ModuleRuntime
from tfexport.bundle.reader import open_bundle
from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.families.family import Family
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, search
from tfexport.verification.probe import Probe, probe

VOCAB, D, HIDDEN, HEADS, ENCODER_HEADS = 23, 24, 20, 3, 4
HINTS = {"n_heads": HEADS, "unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3}


def renames(side: str, stack: str, sublayers: tuple[str, ...]) -> dict[str, str | tuple[str, ...]]:
    ours, theirs = f"{side}.layers.{{i}}", f"{stack}.{{i}}"
    table: dict[str, str | tuple[str, ...]] = {}
    for norm, name in enumerate(sublayers):
        table[f"{theirs}.{name}_norm.weight"] = f"{ours}.norms.{norm}.weight"
    for name, attention in (("attn", "self_attention"), ("cross", "cross_attention")):
        for letter, part in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
            table[f"{theirs}.{name}.{letter}.{{p}}"] = f"{ours}.{attention}.{part}.{{p}}"
    fused = (f"{ours}.feed_forward.hidden.{{p}}", f"{ours}.feed_forward.gate.{{p}}")
    return {**table, f"{theirs}.mlp.w13.{{p}}": fused, f"{theirs}.mlp.w2.{{p}}": f"{ours}.feed_forward.output.{{p}}"}


def read_config(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    vocab, d_model = weights["src.weight"].shape
    return {
        "d_model": d_model,
        "n_encoder_heads": ENCODER_HEADS,
        "d_ff": len(weights["enc.0.mlp.w13.weight"]) // 2,
        "n_encoder_layers": 2,
        "n_decoder_layers": 2,
        "src_vocab_size": vocab,
        "tgt_vocab_size": vocab,
        "max_source_length": 12,
        "max_target_length": 12,
        "positions": "none",
        "norm": "rms",
        "norm_first": True,
        "final_norm": True,
        "final_norm_in": "decoder",
        "gated": True,
        "activation": "silu",
        "feed_forward_bias": "enc.0.mlp.w13.bias" in weights,
        "output_bias": True,
    }


def own_module(weights: Mapping[str, Tensor], config: ModelConfig) -> nn.Module:
    model = Fused(VOCAB, D, HIDDEN, HEADS, ENCODER_HEADS, bias=config.feed_forward_bias)
    model.load_state_dict(dict(weights))
    return model


FAMILY = Family(
    name="fused",
    about="",
    renames={
        **renames("encoder", "enc", ("attn", "mlp")),
        **renames("decoder", "dec", ("attn", "cross", "mlp")),
        "src.weight": "encoder.tokens.weight",
        "tgt.weight": "decoder.tokens.weight",
        "norm.weight": "decoder.norm.weight",
        "out.weight": "output_weight",
        "out.bias": "output_bias",
    },
    signature=("enc.0.mlp.w13.weight",),
    read_config=read_config,
    reference=own_module,
)


@pytest.fixture(params=[True, False], ids=["biases", "no biases"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = randomised(Fused(VOCAB, D, HIDDEN, HEADS, ENCODER_HEADS, bias=request.param), seed=1)
    torch.save(model.state_dict(), tmp_path / "fused.pt")
    return tmp_path / "fused.pt"


def configured(**fields: Any) -> Family:
    return replace(FAMILY, read_config=lambda weights: {**read_config(weights), **fields})


def exchanged() -> Family:
    """The halves of the fused matrix the other way round."""
    return replace(
        FAMILY, renames={name: to[::-1] if isinstance(to, tuple) else to for name, to in FAMILY.renames.items()}
    )


def first_to_differ(found: Probe) -> tuple[str, str]:
    assert not found.passed
    assert found.layers is not None
    assert found.layers.first is not None
    return found.layers.first.ours, found.layers.first.hint


@pytest.mark.sampled(every=2)
@torch.inference_mode()
def test_logits_and_every_layer_are_those_of_the_module(path: Path) -> None:
    found = probe(path, HINTS, family=(FAMILY,))
    assert found.passed
    assert found.layers is not None
    gates = [
        value.theirs for value in found.layers.values if value.ours == "output of decoder.layers.1.feed_forward.gate"
    ]
    assert gates == ["output of dec.1.mlp.w13 (part 2 of 2)"]
    model = load_checkpoint(path, HINTS, family=(FAMILY,)).build_model()
    src_ids, tgt_ids = torch.randint(4, VOCAB, (2, 9)), torch.randint(4, VOCAB, (2, 7))
    wanted = own_module(torch.load(path, weights_only=True), model.config)(src_ids, tgt_ids)
    assert (model(src_ids, torch.tensor([9, 9]), tgt_ids) - wanted).abs().max() < 1e-4
    assert wanted.std() > 0.1


@pytest.mark.sampled(every=2)
def test_probe_names_what_was_said_wrongly(path: Path) -> None:
    attention, hint = first_to_differ(probe(path, HINTS, family=(configured(n_encoder_heads=0),)))
    assert attention == "input of encoder.layers.0.self_attention.output"
    assert "n_encoder_heads" in hint
    attention, hint = first_to_differ(probe(path, {**HINTS, "n_heads": 4}, family=(FAMILY,)))
    assert attention == "input of decoder.layers.0.self_attention.output"
    assert "n_encoder_heads" not in hint
    hidden, hint = first_to_differ(probe(path, HINTS, family=(exchanged(),)))
    assert (hidden, hint) == ("input of encoder.layers.0.feed_forward.output", "the feed-forward: activation, gated")
    with pytest.raises(TfexportError, match=r"missing: encoder\.norm\.weight"):
        load_checkpoint(path, HINTS, family=(configured(final_norm_in="both"),))
    with pytest.raises(TfexportError, match=r"missing: encoder\.positions\.table"):
        load_checkpoint(path, HINTS, family=(configured(positions="learned"),))


def test_a_fused_matrix_that_cannot_be_halved_is_told(tmp_path: Path) -> None:
    weights = Fused(VOCAB, D, HIDDEN, HEADS, ENCODER_HEADS, bias=True).state_dict()
    weights["dec.1.mlp.w13.bias"] = torch.zeros(2 * HIDDEN + 1)
    torch.save(weights, tmp_path / "odd.pt")
    with pytest.raises(TfexportError, match=r"dec\.1\.mlp\.w13\.bias \(part 1 of 2\) is \[21\], not \[20\]"):
        load_checkpoint(tmp_path / "odd.pt", HINTS, family=(FAMILY,))


@pytest.mark.sampled(every=2)
def test_the_bundle_decodes_as_the_module(path: Path) -> None:
    checkpoint = load_checkpoint(path, HINTS, family=(FAMILY,))
    export(checkpoint, path.parent / "bundle", gate=None)
    bundle = open_bundle(path.parent / "bundle")
    theirs = ModuleRuntime(own_module(torch.load(path, weights_only=True), bundle.config), bundle.config, pad_id=1)
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randint(4, VOCAB, (1 + index % 12,), generator=generator).tolist() for index in range(60)]
    for beam in (1, 3):
        options = SearchOptions(beam=beam, max_length=10)
        wanted, found = (search(runtime, sources, options) for runtime in (theirs, load_runtime("ort-cpu", bundle)))
        assert [h[0].ids for h in found] == [h[0].ids for h in wanted]
        assert len({h[0].ids for h in wanted}) > 6
