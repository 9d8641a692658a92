"""Checkpoints of `torch.nn.Transformer` within users' classes: PyTorch's own modules give the same logits and tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from makers.tiny import randomised
from makers.torch_models import (
    D_FF,
    EOS,
    HEADS,
    IDS,
    LENGTH,
    MODELS,
    SRC_VOCAB,
    TGT_VOCAB,
    D,
    Shared,
    Tutorial,
    Uneven,
    made,
)
from tests.support.checkpoints import Weights, assert_same_model, refused
from tests.support.module_runtime import ModuleRuntime
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import Checkpoint, inspect_checkpoint, load_checkpoint
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, pad, search
from tfexport.verification.probe import probe

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")

MAX_LENGTH, COUNT = 10, 200


@dataclass(frozen=True)
class Case:
    """A user's random model, and what became of its file."""

    name: str
    module: nn.Module
    checkpoint: Checkpoint
    bundle: Bundle
    sources: list[list[int]]

    def decoded(self, runtime: Any, beam: int) -> list[list[int]]:
        options = SearchOptions(beam=beam, max_length=MAX_LENGTH)
        return [list(hypotheses[0].ids) for hypotheses in search(runtime, self.sources, options)]


def hints_of(name: str) -> dict[str, Any]:
    return {"n_heads": HEADS, **IDS, **MODELS[name].hints}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    module = made(name)
    torch.save(module.state_dict(), folder / "ckpt.pt")
    checkpoint = load_checkpoint(folder / "ckpt.pt", hints_of(name))
    export(checkpoint, folder / "bundle", gate=None)
    random = np.random.default_rng(3)
    vocab = checkpoint.config.src_vocab_size
    sources = [random.integers(4, vocab, length).tolist() for length in (LENGTH, *random.integers(1, 14, COUNT - 1))]
    return Case(name, module, checkpoint, open_bundle(folder / "bundle"), sources)


@pytest.mark.sampled(every=4)
def test_logits_are_those_of_the_user_s_module(case: Case) -> None:
    random = np.random.default_rng(5)
    targets = [[IDS["bos_id"], *random.integers(4, TGT_VOCAB, len(source) - 1)] for source in case.sources]
    wanted = ModuleRuntime(case.module, case.checkpoint.config).logits(case.sources, targets)
    model = case.checkpoint.build_model()
    (src_ids, src_len), (tgt_ids, tgt_len) = pad(case.sources, 1), pad(targets, 1)
    with torch.inference_mode():
        found = model(*(torch.from_numpy(array) for array in (src_ids, src_len, tgt_ids))).numpy()
    real = np.arange(tgt_ids.shape[1]) < tgt_len[:, None]
    assert np.abs(wanted[real] - found[real]).max() < 1e-4
    assert wanted[real].std() > 0.1


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("beam", [1, 4])
def test_tokens_are_those_of_the_user_s_module_run_anew_for_each(case: Case, beam: int) -> None:
    wanted = case.decoded(ModuleRuntime(case.module, case.checkpoint.config), beam)
    assert case.decoded(load_runtime("ort-cpu", case.bundle, threads=1), beam) == wanted
    assert len({tuple(row) for row in wanted}) >= 20  # it does not say the same to all
    assert {row[-1] == EOS for row in wanted} == {True, False}


def test_what_was_given_reads_the_file_again_as_it_was(case: Case) -> None:
    origin = case.bundle.origin
    path = case.checkpoint.path
    assert_same_model(load_checkpoint(path, origin.given, family=origin.family), case.checkpoint)


ARITHMETIC = {
    "tutorial": {"final_norm": True, "tie_output": False, "output_bias": True, "positions": "stored"},
    "stacks": {"final_norm": False, "tie_output": False, "output_bias": False, "positions": "stored"},
    "shared": {"final_norm": True, "tie_output": True, "attention_bias": False, "feed_forward_bias": False},
    "tied": {"final_norm": True, "tie_output": True, "tie_source_target": False, "output_bias": True},
}


def test_the_file_tells_sizes_biases_and_ties(case: Case) -> None:
    config = case.checkpoint.config
    expected = {"d_model": D, "d_ff": D_FF, "n_encoder_layers": 3, "n_decoder_layers": 2, **ARITHMETIC[case.name]}
    assert {name: getattr(config, name) for name in expected} == expected
    assert (config.max_source_length, config.max_target_length) == (LENGTH, LENGTH)
    assert case.checkpoint.family == "torch"


@torch.inference_mode()
def test_stacks_may_have_other_heads_one_final_norm_and_no_positions(load: Callable[..., Checkpoint]) -> None:
    module = randomised(Uneven(), seed=1).eval()
    checkpoint = load(module.state_dict(), {"n_heads": HEADS, **IDS, **Uneven.hints})
    config = checkpoint.config
    assert (config.final_norm, config.final_norm_in, config.positions) == (True, "decoder", "none")
    src_ids, tgt_ids = torch.randint(4, SRC_VOCAB, (3, 9)), torch.randint(4, TGT_VOCAB, (3, 7))
    src_ids[1, 5:] = IDS["pad_id"]
    found = checkpoint.build_model()(src_ids, torch.tensor([9, 5, 9]), tgt_ids)
    assert (found - module(src_ids, tgt_ids)).abs().max() < 1e-4
    assert found.std() > 0.1


def test_probe_compares_stacks_with_other_heads(tmp_path: Path) -> None:
    torch.save(randomised(Uneven(), seed=1).state_dict(), tmp_path / "uneven.pt")
    hints = {"n_heads": HEADS, **IDS, **Uneven.hints}
    compared = probe(tmp_path / "uneven.pt", hints)
    assert compared.passed
    assert compared.layers is not None
    assert "output of encoder.layers.0.self_attention" in {value.ours for value in compared.layers.values}


# --- what the file does not tell


def test_what_the_file_does_not_tell_is_asked_for_with_the_tutorial_s_own_values(
    load: Callable[..., Checkpoint],
) -> None:
    message = refused(load, Tutorial().state_dict(), {})
    assert (
        "does not contain n_heads, pad_id, bos_id, eos_id, norm_first, activation, embedding_scale. Give --heads N"
        in message
    )
    assert "--no-norm-first, --activation relu, --embedding-scale sqrt" in message


@pytest.mark.parametrize("field", ["norm_first", "activation", "embedding_scale"])
def test_nothing_is_guessed(load: Callable[..., Checkpoint], field: str) -> None:
    hints = {name: value for name, value in hints_of("tutorial").items() if name != field}
    assert f"does not contain {field}." in refused(load, Tutorial().state_dict(), hints)


def test_computed_positions_need_a_length(load: Callable[..., Checkpoint]) -> None:
    hints = {name: value for name, value in hints_of("shared").items() if "length" not in name}
    message = refused(load, Shared().state_dict(), hints)
    assert "Give --max-length N, or" in message
    message = refused(load, Shared().state_dict(), {name: hints[name] for name in hints if name != "positions"})
    assert "--positions NAME (or sinusoidal, sinusoidal-halves, sinusoidal-t2t, none) (embedding.weight" in message
    assert "(tfexport does not compute rotary positions and ALiBi)" in message


def test_inspection_tells_what_it_takes_for_what(tmp_path: Path) -> None:
    torch.save(made("tutorial").state_dict(), tmp_path / "ckpt.pt")
    found = inspect_checkpoint(tmp_path / "ckpt.pt", {})
    assert (found.family, found.problems) == ("torch", ())
    assert found.notes[0] == (
        "embeddings: src_tok_emb.embedding.weight (source), tgt_tok_emb.embedding.weight (target); output layer: "
        "generator.weight; positions: positional_encoding.pos_embedding"
    )
    assert "norm_eps" in found.notes[1]


def unclear() -> Weights:
    """Names that say nothing, and matrices without a bias."""
    names = {"src_tok_emb.embedding": "a", "tgt_tok_emb.embedding": "b", "generator": "c", "positional_encoding": "d"}
    weights = {name: tensor for name, tensor in made("tutorial").state_dict().items() if name != "generator.bias"}
    for old, new in names.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    return weights


def test_layers_whose_names_say_nothing_are_asked_for_with_their_shapes(
    load: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    shapes = f"a.weight [{SRC_VOCAB}, {D}], b.weight [{TGT_VOCAB}, {D}], c.weight [{TGT_VOCAB}, {D}]"
    message = refused(load, unclear(), hints_of("tutorial"))
    for flag in ("--src-embedding", "--tgt-embedding", "--output-layer"):
        assert f"{flag} NAME" in message
    assert shapes in message.replace("c.weight [37, 24], a.weight [41, 24], b.weight [37, 24]", shapes)
    torch.save(unclear(), tmp_path / "ckpt.pt")
    assert set(inspect_checkpoint(tmp_path / "ckpt.pt", {}).missing) >= {
        "src_embedding",
        "tgt_embedding",
        "output_layer",
    }


def test_layers_are_named_by_flags(load: Callable[..., Checkpoint]) -> None:
    named = {"src_embedding": "a", "tgt_embedding": "b.weight", "output_layer": "c", "positions": "d.pos_embedding"}
    found = load(unclear(), {**hints_of("tutorial"), **named})
    wanted = load({**made("tutorial").state_dict(), "generator.bias": torch.zeros(TGT_VOCAB)}, hints_of("tutorial"))
    for name in ("encoder.tokens.weight", "decoder.tokens.weight", "output_weight", "encoder.positions.table"):
        assert torch.equal(found.weights[name], wanted.weights[name]), name
    message = refused(load, unclear(), {**hints_of("tutorial"), **named, "tgt_embedding": "nosuch"})
    assert "--tgt-embedding is nosuch" in message
    assert f"b.weight [{TGT_VOCAB}, {D}]" in message


def test_a_named_output_layer_may_be_the_target_embedding(load: Callable[..., Checkpoint]) -> None:
    weights = {name: tensor for name, tensor in made("tutorial").state_dict().items() if "generator" not in name}
    for hints in ({}, {"output_layer": "tgt_tok_emb.embedding"}):
        config = load(weights, {**hints_of("tutorial"), **hints}).config
        assert (config.tie_output, config.src_vocab_size, config.tgt_vocab_size) == (True, SRC_VOCAB, TGT_VOCAB)
    hints = {**hints_of("tutorial"), "output_layer": "src_tok_emb.embedding"}
    assert "the output layer is the source's embedding" in refused(load, weights, hints)


def test_names_of_layers_mean_nothing_to_another_family(load: Callable[..., Checkpoint]) -> None:
    from tests.support.checkpoints import weights_of

    assert "src_embedding has no effect" in refused(load, weights_of("tutorial"), {"src_embedding": "a"})


def test_an_offset_of_positions_leaves_fewer_of_them(load: Callable[..., Checkpoint]) -> None:
    config = load(made("stacks").state_dict(), {**hints_of("stacks"), "position_offset": 2}).config
    assert (config.position_offset, config.max_source_length) == (2, LENGTH - 2)


# --- what is refused


def test_the_transformer_alone_is_refused(load: Callable[..., Checkpoint]) -> None:
    message = refused(load, nn.Transformer(24, 3, 2, 1, 40).state_dict())
    assert "was the torch.nn.Transformer saved alone?" in message


def test_an_encoder_alone_is_refused(load: Callable[..., Checkpoint]) -> None:
    weights = {name: t for name, t in made("tutorial").state_dict().items() if ".decoder." not in name}
    assert "an encoder or a decoder alone is not read" in refused(load, weights)


SELF = "transformer.encoder.layers.1.self_attn"


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        (
            f"{SELF}.in_proj_weight",
            torch.ones(71, D),
            f"{SELF}.in_proj_weight (part 3 of 3) is [23, {D}], not [{D}, {D}]",
        ),
        (f"{SELF}.bias_k", torch.ones(1, 1, D), f"unexpected: {SELF}.bias_k"),
        ("adapter.weight", torch.ones(5), "unexpected: adapter.weight"),
        ("adapter.table", torch.ones(D, 5), "unexpected: adapter.table"),
        (f"{SELF}.in_proj_bias", None, f"missing: {SELF}.in_proj_bias."),
        ("transformer.decoder.layers.0.norm2.bias", None, "missing: transformer.decoder.layers.0.norm2.bias."),
    ],
)
def test_other_weights_are_refused_by_name(
    load: Callable[..., Checkpoint], name: str, tensor: torch.Tensor | None, problem: str
) -> None:
    weights = {**made("tutorial").state_dict(), name: tensor}
    content = {name: tensor for name, tensor in weights.items() if tensor is not None}
    assert problem in refused(load, content, hints_of("tutorial"))


@pytest.mark.parametrize("width", [D, D + 1])
def test_separate_projections_are_read_where_their_sizes_are_equal(load: Callable[..., Checkpoint], width: int) -> None:
    weights = made("tutorial").state_dict()
    wanted = load(weights, hints_of("tutorial"))
    for part, matrix in zip("qkv", weights.pop(f"{SELF}.in_proj_weight").chunk(3), strict=True):
        weights[f"{SELF}.{part}_proj_weight"] = matrix
    if width == D:
        assert_same_model(load(weights, hints_of("tutorial")), wanted)
    else:
        weights[f"{SELF}.v_proj_weight"] = torch.ones(D, width)
        assert f"is [{D}, {width}], not [{D}, {D}]" in refused(load, weights, hints_of("tutorial"))


# --- matrices that may be more than one thing


TOLD = {"n_heads": HEADS, "norm_first": False, "activation": "relu", "embedding_scale": 1.0, **IDS}


def matrices(**shapes: tuple[int, ...]) -> Weights:
    """Layers of `nn.Transformer` and random tensors beside them; `__` in a name is a dot, a name in `..._bias` a bias."""
    torch.manual_seed(0)
    layers = {f"transformer.{name}": t for name, t in nn.Transformer(D, HEADS, 1, 1, D_FF).state_dict().items()}
    return {**layers, **{name.replace("__", "."): torch.randn(*shape) for name, shape in shapes.items()}}


def taken(load: Callable[..., Checkpoint], weights: Weights, **hints: str) -> str:
    return load(weights, {**TOLD, **hints}).notes[0]


def asked(load: Callable[..., Checkpoint], weights: Weights, **hints: str) -> str:
    return refused(load, weights, {**TOLD, **hints}).partition("does not contain ")[2].partition(". Give")[0]


TABLE = {"pos": (LENGTH, D)}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("encoder", "decoder"),
        ("embed_in", "embed_out"),
        ("embedding", "embedding_out"),
        ("input_emb", "output_emb"),
        ("input", "output"),
    ],
)
def test_a_shared_embedding_with_an_output_and_two_with_a_tied_one_look_the_same(
    load: Callable[..., Checkpoint], one: str, other: str
) -> None:
    weights = matrices(**{f"{one}__weight": (37, D), f"{other}__weight": (37, D)}, **TABLE)
    assert asked(load, weights) == "tgt_embedding"
    assert f"{one}.weight [37, {D}], {other}.weight [37, {D}]" in refused(load, weights, TOLD)
    assert asked(load, weights, output_layer=other) == "tgt_embedding"
    shared = f"embeddings: {one}.weight; output layer: {other}.weight; positions: pos"
    assert taken(load, weights, tgt_embedding=one) == shared
    assert taken(load, weights, tgt_embedding=other) == (
        f"embeddings: {one}.weight (source), {other}.weight (target); output layer: {other}.weight; positions: pos"
    )


def test_an_output_of_other_rows_is_none_of_a_shared_embedding(load: Callable[..., Checkpoint]) -> None:
    weights = matrices(embed_in__weight=(41, D), embed_out__weight=(37, D), **TABLE)
    assert "embed_in.weight (source), embed_out.weight (target); output layer: embed_out" in taken(load, weights)


@pytest.mark.parametrize("names", [("embed", "deembed"), ("tok_embed", "tok_unembed_out")])
def test_names_that_say_nothing_are_asked_for(load: Callable[..., Checkpoint], names: tuple[str, str]) -> None:
    weights = matrices(**{f"{name}__weight": (37, D) for name in names}, **TABLE)
    assert asked(load, weights) == "src_embedding, tgt_embedding, output_layer"


@pytest.mark.parametrize("output", ["fc", "out", "lm_head"])
def test_one_embedding_beside_an_output_layer_may_be_the_source_s_alone(
    load: Callable[..., Checkpoint], output: str
) -> None:
    """The target's may be the output layer, whose name alone the file kept."""
    weights = matrices(**{"embedding__weight": (37, D), f"{output}__weight": (37, D)}, **TABLE)
    assert asked(load, weights) == "tgt_embedding"
    assert f"--tgt-embedding NAME ({output}.weight if it is tied to the output layer)" in refused(load, weights, TOLD)
    shared = f"embeddings: embedding.weight; output layer: {output}.weight; positions: pos"
    assert taken(load, weights, tgt_embedding="embedding") == shared
    tied = f"embeddings: embedding.weight (source), {output}.weight (target); output layer: {output}.weight; positions: pos"
    assert taken(load, weights, tgt_embedding=output) == tied


@pytest.mark.parametrize("third", ["speaker_embedding", "pos_tag_embedding", "adapter", "encoder__type_embedding"])
def test_a_third_matrix_is_not_the_source_s_embedding_for_want_of_another(
    load: Callable[..., Checkpoint], third: str
) -> None:
    weights = matrices(
        embedding__weight=(37, D), fc__weight=(37, D), fc__bias=(37,), **{f"{third}__weight": (8, D)}, **TABLE
    )
    assert asked(load, weights) == "src_embedding, tgt_embedding"
    named = {"src_embedding": "embedding", "tgt_embedding": "embedding", "output_layer": "fc"}
    assert f"unexpected: {third.replace('__', '.')}.weight" in refused(load, weights, {**TOLD, **named})


def test_a_source_s_name_and_the_rows_of_the_output_tell_both_embeddings(load: Callable[..., Checkpoint]) -> None:
    weights = matrices(src_emb__weight=(41, D), embedding__weight=(37, D), fc__weight=(37, D), fc__bias=(37,), **TABLE)
    assert "src_emb.weight (source), embedding.weight (target); output layer: fc.weight" in taken(load, weights)


def test_matrices_of_equal_numbers_need_no_names(load: Callable[..., Checkpoint]) -> None:
    weights = matrices(enc_emb__weight=(41, D), dec_emb__weight=(37, D), **TABLE)
    weights["unembed.weight"] = weights["dec_emb.weight"].clone()
    config = load(weights, TOLD).config
    assert (config.tie_output, config.src_vocab_size, config.tgt_vocab_size) == (True, 41, 37)
    assert "dec_emb.weight (target); output layer: unembed.weight" in taken(load, weights)


def test_matrices_that_are_no_plain_numbers_are_told(load: Callable[..., Checkpoint]) -> None:
    embedding = torch.full((37, D), torch.nan)
    weights = {**matrices(fc__weight=(37, D), **TABLE), "embedding.weight": embedding}
    assert "NaN or infinite: embedding.weight" in refused(load, weights, {**TOLD, "tgt_embedding": "embedding"})
    weights = {**weights, "embedding.weight": embedding.half().to_sparse()}
    assert "embedding.weight" in refused(load, weights, TOLD)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("time_embedding.weight", (LENGTH, D)),
        ("encoding", (LENGTH, D)),
        ("memory_tokens", (1, LENGTH, D)),
        ("cls_token", (1, 1, D)),
        ("tgt_pos", (LENGTH, D)),
    ],
)
def test_a_table_of_positions_is_asked_for_where_its_name_is_not_one_of_both(
    load: Callable[..., Checkpoint], name: str, shape: tuple[int, ...]
) -> None:
    weights = {**matrices(embedding__weight=(37, D), fc__weight=(37, D), fc__bias=(37,)), name: torch.randn(shape)}
    assert "positions" in asked(load, weights)
    assert f"{name} {list(shape)}" in refused(load, weights, TOLD)
    assert taken(load, weights, positions=name, tgt_embedding="embedding") == (
        f"embeddings: embedding.weight; output layer: fc.weight; positions: {name}"
    )


@pytest.mark.parametrize("name", ["pos_encoder.pe", "wpe.weight", "PositionalEncoding.weight", "posenc"])
def test_usual_names_of_positions_are_known(load: Callable[..., Checkpoint], name: str) -> None:
    weights = {**matrices(embedding__weight=(37, D), fc__weight=(37, D)), name: torch.randn(LENGTH, D)}
    assert taken(load, weights, tgt_embedding="embedding").endswith(f"positions: {name}")


def test_positions_are_no_embedding(load: Callable[..., Checkpoint]) -> None:
    weights = matrices(embedding__weight=(37, D), fc__weight=(37, D), **TABLE)
    hints = {**TOLD, "positions": "pos", "src_embedding": "pos"}
    assert "pos is given for --positions and for --src-embedding" in refused(load, weights, hints)
