"""Recognising families, completing configs, converting weights: completely, or with all that is wrong in one message."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from makers.references.tutorial import TutorialTransformer
from makers.tiny import (
    BOS,
    HINTS,
    IDS,
    MAX_LENGTH,
    SPECIALS,
    SRC_VOCAB,
    TGT_VOCAB,
    TinyCheckpoint,
    tiny_transformer,
)
from tests.support.checkpoints import (
    QUERY,
    Weights,
    assert_same_model,
    logits,
    naive_logits,
    refused,
    weights_of,
)
from tfexport.errors import ConfigError
from tfexport.models.checkpoints.load import Checkpoint, inspect_checkpoint, load_checkpoint
from tfexport.models.formats.native import Tokenizers
from tfexport.text.tokenizers import word_tokenizer
from tfexport.text.vocabularies import read_vocabulary

# --- families


SIZES = {"d_model": 24, "n_heads": 3, "d_ff": 40, "n_encoder_layers": 2, "n_decoder_layers": 1, "n_classes": 0}
SIZES |= {"src_vocab_size": SRC_VOCAB, "tgt_vocab_size": TGT_VOCAB, "max_source_length": MAX_LENGTH}
ARITHMETIC = {
    "tutorial": {"positions": "learned", "norm_first": False, "source_bos": True, "tie_output": False},
    "tutorial-classifier": {"n_decoder_layers": 0, "tgt_vocab_size": 0, "max_target_length": 0, "n_classes": 5},
    "annotated": {"positions": "stored", "norm_first": True, "final_norm": True, "source_eos": True},
    "per-head": {"positions": "stored", "position_offset": 1, "shared_norm": True, "tie_output": True},
}


@pytest.mark.parametrize("family", ARITHMETIC)
def test_family_and_sizes_are_told_by_the_file(load: Callable[..., Checkpoint], family: str) -> None:
    checkpoint = load(weights_of(family))
    assert checkpoint.family == family
    expected = {**SIZES, "max_target_length": MAX_LENGTH, "embedding_scale": math.sqrt(24), **ARITHMETIC[family]}
    assert {name: getattr(checkpoint.config, name) for name in expected} == expected
    assert all(tensor.dtype == torch.float32 for tensor in checkpoint.weights.values())


@pytest.mark.parametrize("family", ARITHMETIC)
def test_inspection_needs_no_hints(tmp_path: Path, family: str) -> None:
    torch.save(weights_of(family), tmp_path / "saved.pt")
    inspection = inspect_checkpoint(tmp_path / "saved.pt", {})
    assert inspection.family == family
    assert inspection.problems == ()
    assert inspection.n_parameters == sum(tensor.numel() for tensor in weights_of(family).values())
    heads = {} if family == "per-head" else {"n_heads": "--heads N"}
    assert inspection.missing == {**heads, "pad_id": "--pad N", "bos_id": "--bos N", "eos_id": "--eos N"}


def older_tutorial() -> tuple[TutorialTransformer, Weights]:
    """The tutorial's first layout, one `layer_norm` for all sublayers of a layer, and a model that computes it."""
    model = tiny_transformer()
    for side in (model.encoder, model.decoder):
        for layer in side.layers:
            layer.ff_layer_norm = layer.self_attn_layer_norm
            if side is model.decoder:
                layer.enc_attn_layer_norm = layer.self_attn_layer_norm
    state = model.state_dict()
    weights = {name: tensor for name, tensor in state.items() if "ff_layer" not in name and "enc_attn_l" not in name}
    return model, {name.replace("self_attn_layer_norm", "layer_norm"): tensor for name, tensor in weights.items()}


def test_older_tutorial_layout_has_one_norm_for_a_layer(load: Callable[..., Checkpoint]) -> None:
    model, weights = older_tutorial()
    checkpoint = load(weights)
    assert checkpoint.family == "tutorial"
    assert checkpoint.config.shared_norm
    assert (logits(checkpoint) - naive_logits(model)).abs().max() < 1e-5


def test_named_family_is_used(load: Callable[..., Checkpoint]) -> None:
    assert load(weights_of("annotated"), family="annotated").family == "annotated"


def test_unknown_family_names_those_there_are(load: Callable[..., Checkpoint]) -> None:
    for name in ("nosuch", "native"):
        message = refused(load, weights_of("tutorial"), family=name)
        assert repr(name) in message
        assert "tutorial, tutorial-classifier, annotated, per-head" in message


def test_wrong_family_names_what_the_file_lacks(load: Callable[..., Checkpoint]) -> None:
    message = refused(load, weights_of("tutorial"), family="annotated")
    assert "not of the family annotated" in message
    assert "src_embed.0.lut.weight" in message


def test_layers_numbered_with_leading_zeros_are_named(load: Callable[..., Checkpoint]) -> None:
    """Also where the family finds its layers under names of the user's own."""
    layers = {f"{side}.layers.00.linear1.weight": torch.ones(8, 4) for side in ("encoder", "decoder")}
    message = refused(load, {**layers, "decoder.layers.00.multihead_attn.in_proj_weight": torch.ones(12, 4)})
    assert "numbers that begin with 0 in its names: encoder.layers.00.linear1.weight" in message
    message = refused(load, {**weights_of("tutorial"), "decoder.layers.01.gate.weight": torch.ones(2)})
    assert "numbers that begin with 0 in its names: decoder.layers.01.gate.weight. Save it" in message


def test_no_family_names_the_nearest_and_what_differs(load: Callable[..., Checkpoint]) -> None:
    weights = weights_of("tutorial")
    weights["encoder.my_positions.weight"] = weights.pop("encoder.pos_embedding.weight")
    message = refused(load, weights)
    assert "Nearest is tutorial," in message
    assert "it has no encoder.pos_embedding.weight;" in message
    assert "the family has no encoder.my_positions.weight." in message


# --- weights that do not fit


def test_all_that_is_wrong_is_told_at_once_in_the_names_of_the_file(load: Callable[..., Checkpoint]) -> None:
    weights = weights_of("tutorial")
    del weights["decoder.layers.0.enc_attn_layer_norm.bias"]
    weights["decoder.layers.0.gate.weight"] = torch.ones(3)
    weights["encoder.layers.1.positionwise_feedforward.fc_2.weight"] = torch.ones(24, 39)
    weights["decoder.fc_out.bias"] = torch.ones(TGT_VOCAB, dtype=torch.int64)
    message = refused(load, weights)
    assert "missing: decoder.layers.0.enc_attn_layer_norm.bias;" in message
    assert "unexpected: decoder.layers.0.gate.weight;" in message
    assert "misshapen: encoder.layers.1.positionwise_feedforward.fc_2.weight is [24, 39], not [24, 40];" in message
    assert "not plain floating-point numbers: decoder.fc_out.bias." in message


def test_inspection_tells_problems_instead_of_failing(tmp_path: Path) -> None:
    weights = weights_of("tutorial")
    del weights["decoder.fc_out.bias"]
    torch.save(weights, tmp_path / "saved.pt")
    assert inspect_checkpoint(tmp_path / "saved.pt", {}).problems == ("missing: decoder.fc_out.bias",)


@pytest.mark.parametrize("absent", [["bias"], ["weight", "bias"]])
def test_older_layout_s_problems_are_told_in_its_own_names(load: Callable[..., Checkpoint], absent: list[str]) -> None:
    _, weights = older_tutorial()
    names = [f"decoder.layers.0.layer_norm.{part}" for part in absent]
    for name in names:
        del weights[name]
    assert f"missing: {', '.join(names)}." in refused(load, weights)


@pytest.mark.parametrize(
    ("family", "name", "tensor"),
    [
        ("per-head", "encoder.encoder_layers.0.self_attention.attentions.1.q_w.weight", torch.ones(8, 23)),
        ("per-head", "encoder.encoder_layers.0.self_attention.attentions.1.q_w.weight", torch.ones(7, 24)),
        ("annotated", "encoder.norm.a_2", torch.tensor(1.0)),
        ("annotated", "encoder.norm.a_2", torch.ones(0)),
        ("annotated", "decoder.layers.0.sublayer.1.norm.b_2", torch.ones(25)),
        ("tutorial", QUERY, torch.tensor(1.0)),
    ],
)
def test_any_wrong_shape_is_refused_with_the_name(
    load: Callable[..., Checkpoint], family: str, name: str, tensor: Tensor
) -> None:
    message = refused(load, {**weights_of(family), name: tensor})
    assert name in message.replace("{h}", "1")  # heads are joined before they are compared


def test_a_weight_that_tells_sizes_is_named_when_it_has_none(load: Callable[..., Checkpoint]) -> None:
    message = refused(load, {**weights_of("tutorial"), "encoder.pos_embedding.weight": torch.tensor(1.0)})
    assert "saved.pt" in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_refused(load: Callable[..., Checkpoint], value: float) -> None:
    weights = weights_of("tutorial")
    weights[QUERY][3, 4] = value
    assert f"NaN or infinite: {QUERY}." in refused(load, weights)


def test_a_number_too_large_for_float32_is_refused(load: Callable[..., Checkpoint]) -> None:
    weights = {name: tensor.double() for name, tensor in weights_of("tutorial").items()}
    weights[QUERY][3, 4] = 1e300
    assert QUERY in refused(load, weights)


@pytest.mark.parametrize("odd", [lambda tensor: tensor.to_sparse(), lambda tensor: tensor.to("meta")])
def test_tensors_without_plain_numbers_are_refused(
    load: Callable[..., Checkpoint], odd: Callable[[Tensor], Tensor]
) -> None:
    weights = weights_of("tutorial")
    assert QUERY in refused(load, {**weights, QUERY: odd(weights[QUERY])})


# --- what the file does not tell


@pytest.mark.parametrize("family", ["tutorial", "tutorial-classifier", "annotated"])
def test_all_that_is_missing_is_asked_for_at_once(load: Callable[..., Checkpoint], family: str) -> None:
    message = refused(load, weights_of(family), {})
    assert "n_heads, pad_id, bos_id, eos_id" in message
    assert "--heads N --pad N --bos N --eos N" in message
    usual = "--heads 8, --pad 2, --bos 0, --eos 1" if family == "annotated" else "--heads 8, --pad 1, --bos 2, --eos 3"
    assert usual in message


def test_only_what_is_missing_is_asked_for(load: Callable[..., Checkpoint]) -> None:
    assert "Give --pad N --bos N --eos N, " in refused(load, weights_of("per-head"), {})
    assert "Give --bos N, " in refused(load, weights_of("tutorial"), {"n_heads": 3, "pad_id": 1, "eos_id": 3})


def test_special_ids_are_found_in_the_vocabularies(tiny_checkpoint: TinyCheckpoint) -> None:
    config = tiny_checkpoint.load().config
    assert {name: getattr(config, name) for name in IDS} == IDS


def test_vocabularies_that_disagree_tell_nothing(
    load: Callable[..., Checkpoint], tiny_checkpoint: TinyCheckpoint
) -> None:
    source = tiny_checkpoint.tokenizers().source
    target = word_tokenizer({word: index for index, word in enumerate(["<unk>", "<sos>", "<pad>", "<eos>"])})
    message = refused(load, weights_of("tutorial"), {"n_heads": 3}, tokenizers=Tokenizers(source, target))
    pad, bos = (
        f"(the source vocabulary has {ours}, the target vocabulary {other})" for ours, other in ((1, 2), (2, 1))
    )
    assert f"Give --pad N {pad} --bos N {bos}, " in message


def test_what_the_user_says_wins_over_the_vocabularies(
    load: Callable[..., Checkpoint], tiny_checkpoint: TinyCheckpoint
) -> None:
    hints = {"n_heads": 3, "pad_id": 7}
    checkpoint = load(weights_of("tutorial"), hints, tokenizers=tiny_checkpoint.tokenizers())
    assert (checkpoint.config.pad_id, checkpoint.config.bos_id) == (7, BOS)
    assert checkpoint.given == {"n_heads": 3, **IDS, "pad_id": 7}


def test_what_was_given_reads_the_file_again_as_it_was(tiny_checkpoint: TinyCheckpoint) -> None:
    first = tiny_checkpoint.load()
    assert_same_model(load_checkpoint(tiny_checkpoint.path, first.given, family=first.family), first)


@pytest.mark.parametrize(("family", "offset"), [("tutorial", 0), ("annotated", 0), ("per-head", 1)])
def test_lengths_may_be_limited(load: Callable[..., Checkpoint], family: str, offset: int) -> None:
    whole = load(weights_of(family))
    cut = load(weights_of(family), {**HINTS, "max_source_length": 7, "max_target_length": 5})
    for side, length in (("encoder", 7), ("decoder", 5)):
        table = f"{side}.positions.table"
        assert cut.weights[table].shape == (length + offset, 24)
        assert torch.equal(cut.weights[table], whole.weights[table][: length + offset])
    assert (cut.config.max_source_length, cut.config.max_target_length) == (7, 5)


def test_lengths_beyond_the_positions_are_refused(load: Callable[..., Checkpoint]) -> None:
    message = refused(load, weights_of("tutorial"), {**HINTS, "max_source_length": 21})
    assert "has positions for a max_source_length of 20, not 21" in message


def test_heads_must_divide_the_model(load: Callable[..., Checkpoint]) -> None:
    assert "d_model 24 is not a multiple of n_heads 5" in refused(load, weights_of("tutorial"), {**HINTS, "n_heads": 5})


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_vocabulary_larger_than_the_embedding_is_refused(tiny_checkpoint: TinyCheckpoint, side: str) -> None:
    large = word_tokenizer({word: index for index, word in enumerate([*SPECIALS, *map(str, range(40))])})
    words = {"source": tiny_checkpoint.tokenizers().source, "target": tiny_checkpoint.tokenizers().target, side: large}
    rows = {"source": SRC_VOCAB, "target": TGT_VOCAB}[side]
    with pytest.raises(ConfigError, match=f"the {side} vocabulary has ids up to 43, .* has {rows} rows"):
        load_checkpoint(tiny_checkpoint.path, HINTS, tokenizers=Tokenizers(**words))


# --- equal matrices


def tied(kind: str) -> TutorialTransformer:
    model = tiny_transformer(tgt_vocab=SRC_VOCAB)
    source, target, output = model.encoder.tok_embedding, model.decoder.tok_embedding, model.decoder.fc_out
    with torch.no_grad():
        if kind in ("source and target", "all"):
            target.weight.copy_(source.weight)
        if kind in ("target and output", "all"):
            output.weight.copy_(target.weight)
        if kind == "source and output":  # which no runtime could use
            output.weight.copy_(source.weight)
    return model


@pytest.mark.parametrize(
    ("kind", "tie_source_target", "tie_output"),
    [
        ("none", False, False),
        ("source and target", True, False),
        ("target and output", False, True),
        ("all", True, True),
        ("source and output", False, False),
    ],
)
def test_equal_embeddings_are_stored_once_and_compute_the_same(
    load: Callable[..., Checkpoint], kind: str, tie_source_target: bool, tie_output: bool
) -> None:
    model = tied(kind)
    checkpoint = load(model.state_dict())
    assert checkpoint.config.tie_source_target == tie_source_target
    assert checkpoint.config.tie_output == tie_output
    assert ("decoder.tokens.weight" in checkpoint.weights) != tie_source_target
    assert ("output_weight" in checkpoint.weights) != tie_output
    assert (logits(checkpoint) - naive_logits(model)).abs().max() < 1e-5


def test_vocabularies_of_another_model_are_noted(load: Callable[..., Checkpoint], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("\n".join(SPECIALS) + "\n")
    short = Tokenizers(read_vocabulary(tmp_path / "short.txt"), None)
    notes = load(weights_of("tutorial"), {**HINTS, "eos_id": 9}, tokenizers=short).notes
    assert notes == (
        "the source vocabulary has 4 words, the model's embedding 31 rows",
        "eos_id is 9, the source vocabulary's own is 3",
    )


def test_a_size_beyond_all_tensors_is_refused(load: Callable[..., Checkpoint]) -> None:
    refused(load, weights_of("tutorial"), {**HINTS, "d_ff": 10**20})
