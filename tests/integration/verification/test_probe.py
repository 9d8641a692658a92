"""`tfexport probe`: mistakes of a family are found, and the layer named; and what it finds of a checkpoint by itself."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from makers.tiny import BOS, EOS, HEADS, IDS, PAD, TinyCheckpoint, tiny_classifier, tiny_transformer
from makers.torch_models import IDS as TORCH_IDS
from makers.torch_models import MODELS, D, Tutorial, made
from tests.support.checkpoints import saved
from tfexport import cli
from tfexport.cli import app
from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.models.checkpoints.load import read_checkpoint
from tfexport.models.families import tutorial
from tfexport.models.families.family import Family
from tfexport.models.model import EncoderClassifier
from tfexport.models.positions import PositionTable
from tfexport.system.json_text import json_text
from tfexport.verification.probe import Probe, probe

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")

HINTS = {"n_heads": HEADS, **IDS}


def own_module(weights: Mapping[str, Tensor], config: ModelConfig) -> nn.Module:
    model = tiny_transformer()
    model.load_state_dict(dict(weights))
    return model


OWN = replace(tutorial.FAMILIES[2], name="own", reference=own_module)
"""A right description of `tiny_transformer`, which every mistake starts from."""


def configured(**fields: Any) -> Family:
    return replace(OWN, read_config=lambda weights: {**OWN.read_config(weights), **fields})


def renamed(*swaps: tuple[str, str]) -> Family:
    """Canonical names exchanged."""
    table = dict(OWN.renames)
    for one, other in swaps:
        keys = {value: key for key, value in table.items()}
        table[keys[one]], table[keys[other]] = other, one
    return replace(OWN, renames=table)


def adjusted(change: Callable[[dict[str, Tensor]], None]) -> Family:
    def adjust(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = dict(weights)
        change(weights)
        return weights

    return replace(OWN, adjust=adjust)


def norms(side: str, one: int, other: int) -> tuple[str, str]:
    return f"{side}.layers.{{i}}.norms.{one}.{{p}}", f"{side}.layers.{{i}}.norms.{other}.{{p}}"


def projections(attention: str, one: str, other: str) -> tuple[str, str]:
    return f"{attention}.{one}.{{p}}", f"{attention}.{other}.{{p}}"


def attentions(part: str) -> tuple[str, str]:
    return f"decoder.layers.{{i}}.self_attention.{part}.{{p}}", f"decoder.layers.{{i}}.cross_attention.{part}.{{p}}"


def transposed(name: str) -> Family:
    return adjusted(lambda weights: weights.update({name: weights[name].T.contiguous()}))


def tied(weights: dict[str, Tensor]) -> None:
    del weights["output_weight"]


MISTAKES: dict[str, tuple[Family, dict[str, Any], str, str]] = {
    "heads": (OWN, {"n_heads": 4}, "input of encoder.layers.0.self_attention.output", "n_heads"),
    "norms of the encoder": (renamed(norms("encoder", 0, 1)), {}, "input of encoder.layers.0.norms.0", "norm"),
    "norms of the decoder": (renamed(norms("decoder", 1, 2)), {}, "input of decoder.layers.0.norms.1", "norm"),
    "pre-norm": (configured(norm_first=True), {}, "input of encoder.layers.0.norms.0", "norm_first"),
    "activation": (configured(activation="gelu"), {}, "input of encoder.layers.0.feed_forward.output", "activation"),
    "scale": (configured(embedding_scale=1.0), {}, "input of encoder.layers.0.self_attention.key", "embedding_scale"),
    "offset": (
        configured(position_offset=1, max_source_length=19, max_target_length=19),
        {}, "input of encoder.layers.0.self_attention.key", "position_offset",
    ),
    "eps": (configured(norm_eps=1e-6), {}, "output of encoder.layers.0.norms.0", "norm_eps"),
    "tied output": (
        replace(configured(tie_output=True), adjust=adjusted(tied).adjust), {}, "logits", "tie_output",
    ),
    "transposed weight": (
        transposed("encoder.layers.1.self_attention.value.weight"),
        {}, "output of encoder.layers.1.self_attention.value", "transposed",
    ),
    "query and key": (
        renamed(projections("decoder.layers.{i}.cross_attention", "query", "key")),
        {}, "input of decoder.layers.0.cross_attention.output", "query, key and value",
    ),
    "query and key of the encoder": (
        renamed(projections("encoder.layers.{i}.self_attention", "query", "key")),
        {}, "input of encoder.layers.0.self_attention.output", "query, key and value",
    ),
    "attentions of the decoder": (
        renamed(*(attentions(part) for part in ("query", "key", "value", "output"))),
        {}, "input of decoder.layers.0.self_attention.query", "attentions exchanged",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "own.pt"
    path.write_bytes(saved(dict(tiny_transformer().state_dict())))
    return path


def check(found: Probe, name: str) -> Any:
    return next(check for check in found.checks if check.name == name)


def test_a_right_family_passes(path: Path) -> None:
    found = probe(path, HINTS, family=(OWN,))
    assert found.passed
    own = ["weights", "special ids", "cached step", "longest", "padding", "batch", "beams"]
    assert [c.name for c in found.checks if c.passed] == [*own, "reference", "steps", "padded batch"]
    assert found.layers is not None
    assert found.layers.first is None
    assert found.layers.logits < 1e-12  # in float64
    named = {value.ours.partition(" of ")[2] for value in found.layers.values}
    for layer in (
        "encoder.layers.1.norms.1",
        "decoder.layers.0.cross_attention.key",
        "decoder.layers.0.feed_forward.hidden",
    ):
        assert layer in named
    assert "a source of 20 ids; 20 steps throughout 20 tokens, the last one too" in check(found, "longest").about


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_and_its_layer_named(path: Path, mistake: str) -> None:
    family, hints, first, hint = MISTAKES[mistake]
    found = probe(path, {**HINTS, **hints}, family=(family,))
    assert not found.passed
    assert [c.name for c in found.checks if c.passed is False] == ["reference"]
    assert found.layers is not None
    assert found.layers.first is not None
    assert found.layers.first.ours == first
    assert hint in found.layers.first.hint
    assert first in check(found, "reference").about


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norms of ones and zeros, biases of zeros."""
    weights = dict(tiny_transformer().state_dict())
    for name, tensor in weights.items():
        if tensor.dim() == 1:
            weights[name] = torch.full_like(tensor, float("norm" in name and name.endswith("weight")))
    path = tmp_path_factory.mktemp("untrained") / "own.pt"
    path.write_bytes(saved(weights))
    return path


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", ["norms of the encoder", "norms of the decoder"])
def test_untrained_norms_hide_no_mistake(untrained: Path, mistake: str) -> None:
    right = probe(untrained, HINTS, family=(OWN,))
    assert right.passed
    assert "as they are, and with random numbers added to norms and biases" in check(right, "reference").about
    family, _, first, _ = MISTAKES[mistake]
    found = probe(untrained, HINTS, family=(family,))
    assert [c.name for c in found.checks if c.passed is False] == ["reference"]
    assert found.layers is not None
    assert found.layers.first is not None
    assert found.layers.first.ours == first
    assert (
        "with random numbers added to norms and biases (those of the file hide it)" in check(found, "reference").about
    )


def test_a_module_with_weights_from_elsewhere_is_compared_as_it_is(path: Path) -> None:
    found = probe(path, HINTS, family=(replace(OWN, reference=lambda weights, config: tiny_transformer()),))
    assert found.passed
    assert (
        "weights as they are alone: with other norms and biases the two could not be made"
        in check(found, "reference").about
    )


@pytest.mark.thorough
def test_a_module_that_is_made_once_is_compared_with_each_of_its_weights(path: Path) -> None:
    module = tiny_transformer()

    def loaded(weights: Mapping[str, Tensor], config: ModelConfig) -> nn.Module:
        module.load_state_dict(dict(weights))
        return module

    found = probe(path, HINTS, family=(replace(OWN, reference=loaded),))
    assert found.passed
    assert "with random numbers added" in check(found, "reference").about


def test_arithmetic_that_fails_on_other_norms_is_no_mistake(path: Path) -> None:
    norm = "encoder.layers.0.norms.0.weight"
    trained = tiny_transformer().state_dict()["encoder.layers.0.self_attn_layer_norm.weight"]

    def adjust(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**weights, norm: weights[norm] + (0.0 if torch.equal(weights[norm], trained) else math.nan)}

    assert probe(path, HINTS, family=(replace(OWN, adjust=adjust),)).passed


def test_names_of_both_sides_are_told(path: Path) -> None:
    family = transposed("decoder.layers.0.cross_attention.value.weight")
    found = check(probe(path, HINTS, family=(family,)), "reference")
    assert "output of decoder.layers.0.cross_attention.value is the first to differ" in found.about
    assert "in TutorialTransformer: output of decoder.layers.0.encoder_attention.fc_v" in found.about


def test_a_module_that_was_not_given_the_weights_is_told(path: Path) -> None:
    family = replace(OWN, reference=lambda weights, config: tiny_transformer(seed=1))
    found = check(probe(path, HINTS, family=(family,)), "reference")
    assert found.passed is False
    assert "the module holds other numbers than the file: encoder.tok_embedding.weight" in found.about


class Wrapped(nn.Module):
    """A module within another, whose mask or arguments may be wrong."""

    def __init__(self, forward: Callable[[nn.Module, Tensor, Tensor], Any]):
        super().__init__()
        self.inner, self.call = tiny_transformer(), forward

    def forward(self, src: Tensor, tgt: Tensor) -> Any:
        return self.call(self.inner, src, tgt)


def wrapped(forward: Callable[[nn.Module, Tensor, Tensor], Any]) -> tuple[Family]:
    return (replace(OWN, reference=lambda weights, config: Wrapped(forward)),)


def test_the_model_may_lie_within_the_module(path: Path) -> None:
    found = probe(path, HINTS, family=wrapped(lambda model, src, tgt: model(src, tgt)))
    assert found.passed
    assert found.layers is not None
    assert "output of inner.encoder.layers.0.self_attention.fc_k" in {value.theirs for value in found.layers.values}


def test_masks_of_the_module_that_hide_another_id_are_told(path: Path) -> None:
    def elsewhere(model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
        return model(torch.where(src == PAD, 7, src), tgt)

    found = probe(path, HINTS, family=wrapped(elsewhere))
    assert [c.name for c in found.checks if c.passed is False] == ["padded batch"]


def sentences(path: Path) -> list[tuple[list[int], list[int]]]:
    """What `probe` compares on, as a module sees it."""
    seen: list[tuple[list[int], list[int]]] = []

    def note(model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
        seen.append((src[0].tolist(), tgt[0].tolist()))
        return model(src, tgt)

    probe(path, HINTS, family=wrapped(note))
    return seen[:6]


def test_a_module_that_sees_later_tokens_is_told(path: Path) -> None:
    def ahead(model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
        """Of whole targets all is right: what is added to a prefix is taken back."""
        return model(src, tgt) + (0.1 if 1 < tgt.shape[1] < 20 and (tgt[:, :2] == longest[:2]).all() else 0.0)

    longest = torch.tensor(max((target for _, target in sentences(path)), key=len))
    found = probe(path, HINTS, family=wrapped(ahead))
    assert [c.name for c in found.checks if c.passed is False] == ["steps"]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("sentence", [0, 2])
def test_numbers_that_are_none_are_not_passed_over(path: Path, sentence: int) -> None:
    """As of a row whose mask hides everything; in the first sentence, and in a later one."""
    seen = sentences(path)

    def none(model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
        position = next(i for i, (source, _) in enumerate(seen) if source == src[0].tolist())
        return model(src, tgt) * (math.nan if position == sentence else 1.0)

    found = probe(path, HINTS, family=wrapped(none))
    assert check(found, "reference").passed is False
    assert json.loads(json_text(found.to_dict()))["first"]["error"] is None


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda model, src, tgt: model(src), "fails on src_ids [1, 1], tgt_ids [1, 20]: TypeError"),
        (lambda model, src, tgt: model(src, tgt)[:, -1], "gives [1, 37] of tgt_ids [1, 20]"),
    ],
)
def test_a_module_that_fails_is_an_error(path: Path, forward: Callable[..., Any], message: str) -> None:
    with pytest.raises(TfexportError) as caught:
        probe(path, HINTS, family=wrapped(forward))
    assert message in str(caught.value)


def test_a_module_that_computes_in_float32_alone_is_compared_in_it(path: Path) -> None:
    def single(model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
        if model.decoder.fc_out.weight.dtype == torch.float64:
            raise RuntimeError("expected scalar type Float but found Double")
        return model(src, tgt)

    found = probe(path, HINTS, family=wrapped(single))
    assert found.passed
    assert "in float32" in check(found, "reference").about


# --- without a module of the user's


class SingleSoftmax(nn.Module):
    """Attention weights in float32, whatever the type of the weights, as many write them for training in half precision."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.inner = attention

    def forward(self, *given: Any) -> Any:
        softmax = torch.softmax
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "softmax", lambda scores, dim: softmax(scores.float(), dim).type_as(scores))
            return self.inner(*given)


def test_code_that_computes_in_float32_is_named_and_its_effect_told(path: Path) -> None:
    def rounding(weights: Mapping[str, Tensor], config: ModelConfig) -> nn.Module:
        return SingleSoftmax(own_module(weights, config))

    found = probe(path, HINTS, family=(replace(OWN, reference=rounding),))
    assert found.passed
    assert check(found, "reference").error < 1e-12
    narrow = check(found, "float32")
    assert re.match(r"test_probe.py, line \d+ computes in float32 or less; .* changes logits by", narrow.about)
    assert 1e-9 < narrow.error < 1e-5


def test_the_tolerance_is_that_of_every_check(path: Path) -> None:
    def clumsy(model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
        return model(src, tgt) * (1 + 1e-5)

    assert not probe(path, HINTS, family=wrapped(clumsy)).passed
    assert probe(path, HINTS, family=wrapped(clumsy), tolerance=1e-3).passed
    strict = probe(path, HINTS, family=wrapped(lambda model, src, tgt: model(src, tgt)), tolerance=0.0)
    assert {"cached step", "batch", "longest"} <= {check.name for check in strict.checks if check.passed is False}


def test_weights_that_are_not_the_family_s_are_told(tmp_path: Path) -> None:
    weights = dict(tiny_transformer().state_dict())
    del weights["decoder.fc_out.bias"]
    (tmp_path / "cut.pt").write_bytes(saved(weights))
    found = probe(tmp_path / "cut.pt", HINTS)
    assert [(c.name, c.passed, c.about) for c in found.checks] == [("weights", False, "missing: decoder.fc_out.bias")]


def test_ids_that_the_vocabularies_contradict_fail(tiny_checkpoint: TinyCheckpoint) -> None:
    found = probe(tiny_checkpoint.path, {**HINTS, "eos_id": 9}, tokenizers=tiny_checkpoint.tokenizers())
    assert [c.name for c in found.checks if c.passed is False] == ["special ids"]
    assert "eos_id is 9, the source vocabulary's own is 3" in check(found, "special ids").about


def test_ties_and_limits_are_told(tmp_path: Path) -> None:
    model = made("tied")
    torch.save(model.state_dict(), tmp_path / "tied.pt")
    found = probe(tmp_path / "tied.pt", {"n_heads": 3, **TORCH_IDS, **MODELS["tied"].hints})
    assert "the output layer is the target embedding (embed_tgt.weight)" in check(found, "tied weights").about
    assert "sources to 30 ids, outputs to 30 tokens" in check(found, "positions").about
    assert "norm_first True" in check(found, "told by you").about


def test_states_beyond_float16_are_told(tmp_path: Path) -> None:
    model = tiny_transformer()
    with torch.no_grad():
        model.encoder.layers[1].positionwise_feedforward.fc_1.weight *= 1e5
        model.encoder.layers[1].positionwise_feedforward.fc_2.weight *= 1e-5
    (tmp_path / "large.pt").write_bytes(saved(dict(model.state_dict())))
    found = probe(tmp_path / "large.pt", HINTS)
    assert "overflows in encoder.layers.1.feed_forward.hidden" in check(found, "float16").about


def test_a_broken_cache_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of our own arithmetic, so it is broken here."""

    def misplaced(cache: Tensor, update: Tensor, position: Tensor) -> Tensor:
        cache[:, :, (position - (position == 5).long())[0]] = update[:, :, 0]
        return cache

    monkeypatch.setattr("tfexport.verification.probe_self.write_in_place", misplaced)
    found = probe(path, HINTS)
    assert [c.name for c in found.checks if c.passed is False] == ["cached step"]


def test_positions_that_are_wrong_only_at_the_end_are_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of our own arithmetic, too."""
    right = PositionTable.forward

    def cut(self: PositionTable, position: Tensor) -> Tensor:
        return right(self, position.clamp(max=18) if len(position) == 1 else position)

    monkeypatch.setattr(PositionTable, "forward", cut)
    found = probe(path, {**HINTS, "max_target_length": 20})
    assert "longest" in [c.name for c in found.checks if c.passed is False]


def own_classifier(weights: Mapping[str, Tensor], config: ModelConfig) -> nn.Module:
    model = tiny_classifier()
    model.load_state_dict(dict(weights))
    return model


CLASSIFIER = next(family for family in tutorial.FAMILIES if family.name == "tutorial-classifier")


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    path = tmp_path / "classifier.pt"
    path.write_bytes(saved(dict(tiny_classifier().state_dict())))
    return path


def test_a_classifier_is_held_against_itself_and_its_module(classifier: Path) -> None:
    alone = probe(classifier, HINTS)
    assert alone.passed
    assert {c.name for c in alone.checks} == {
        *("weights", "told by you", "positions", "special ids", "longest", "padding", "batch", "float16")
    }
    family = replace(recognised(classifier), name="own-classifier", reference=own_classifier)
    beside = probe(classifier, HINTS, family=[family])
    assert beside.passed
    assert {"reference", "padded batch"} <= {c.name for c in beside.checks}


def test_mistakes_of_a_classifier_are_found(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = recognised(classifier)
    wrong = replace(
        right,
        name="own-classifier",
        reference=own_classifier,
        read_config=lambda weights: {**right.read_config(weights), "activation": "gelu"},
    )
    found = probe(classifier, HINTS, family=[wrong])
    assert found.layers is not None
    assert found.layers.first is not None
    assert "feed_forward.output" in found.layers.first.ours
    monkeypatch.setattr(
        EncoderClassifier, "forward", lambda self, ids, length: self.head(self.encoder(ids, length).mean(1))
    )
    assert {"padding", "batch"} <= {c.name for c in probe(classifier, HINTS).checks if c.passed is False}


def recognised(path: Path) -> Family:
    family = read_checkpoint(path, HINTS).family
    assert family is not None
    assert family.name == CLASSIFIER.name
    return family


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_layers_of_torch_are_held_against_pytorch_s_own(tmp_path: Path, name: str) -> None:
    torch.save(made(name).state_dict(), tmp_path / "ckpt.pt")
    found = probe(tmp_path / "ckpt.pt", {"n_heads": 3, **TORCH_IDS, **MODELS[name].hints})
    assert found.passed
    assert "reference" not in [c.name for c in found.checks]
    beside = check(found, "torch.nn")
    assert beside.error < 1e-12
    assert "as PyTorch's own layers have them, in float64, with what you told of the file, which it cannot check" in (
        beside.about
    )
    assert "against torch.nn run again for each" in check(found, "steps").about
    assert found.layers is not None
    named = {value.ours for value in found.layers.values}
    assert {"output of encoder.layers.2.norms.1", "output of decoder.layers.1.cross_attention"} <= named


# --- the command


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["probe", *map(str, arguments)])


FLAGS = ("--heads", 3, "--unk", 0, "--pad", PAD, "--bos", BOS, "--eos", EOS)


def test_the_command_takes_the_flags_of_export() -> None:
    """All but those of what is written, and the module, with which an export compares what it read."""
    written = {
        "module",
        "write_family",
        "output",
        "force",
        "parity",
        "precision",
        "target",
        "gpu",
        "library",
        "cache",
        "gpu_memory",
        "runtime",
        "beam",
    }
    written |= {
        "budget",
        "budget_input",
        "budget_targets",
        "max_batch",
        "max_beam",
        "max_source",
        "alignments",
        "shortlist",
    }
    own = {"as_json", "source"}
    assert signature(cli.export).parameters.keys() ^ signature(cli.probe).parameters.keys() == written | own


def test_the_command_passes_and_fails(path: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    done = command(path, *FLAGS)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "PASSED: it can be exported with the same flags")
    wrong = command(tiny_checkpoint.path, *tiny_checkpoint.flags, "--eos", 9)
    assert (wrong.exit_code, wrong.stdout.splitlines()[-1]) == (1, "FAILED: special ids")
    assert any(line.startswith("FAILED  special ids") for line in wrong.stdout.splitlines())


def test_the_command_reads_sentences_and_writes_json(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("de5 de9 de12\nde7\n\nde30 de4\n")
    done = command(tiny_checkpoint.path, *tiny_checkpoint.flags, "--input", tmp_path / "input.txt", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert (found["passed"], found["family"], found["first"]) == (True, "tutorial", None)
    batch = next(check for check in found["checks"] if check["name"] == "batch")
    assert batch["about"].startswith("3 sentences")
    assert 0 <= batch["error"] < 1e-4


def test_the_tutorial_s_checkpoint_needs_one_line(tmp_path: Path) -> None:
    torch.save(made("tutorial").state_dict(), tmp_path / "ckpt.pt")
    told = ("--heads", 3, "--no-norm-first", "--activation", "relu", "--embedding-scale", "sqrt")
    done = command(tmp_path / "ckpt.pt", *told, *FLAGS[2:], "--json")
    assert done.exit_code == 0
    checks = {check["name"]: check["about"] for check in json.loads(done.stdout)["checks"]}
    assert f"embedding_scale {math.sqrt(D)}" in checks["told by you"]
    wrong = command(tmp_path / "ckpt.pt", *told[:-1], "root", *FLAGS[2:])
    assert isinstance(wrong.exception, TfexportError)
    assert "--embedding-scale is 'root'" in str(wrong.exception)


@pytest.mark.thorough
def test_names_of_layers_are_flags(tmp_path: Path) -> None:
    weights = {
        name.replace("src_tok_emb", "a").replace("tgt_tok_emb", "b"): t for name, t in Tutorial().state_dict().items()
    }
    weights["b.embedding.weight"] = torch.randn(41, D)
    weights["generator.weight"], weights["generator.bias"] = torch.randn(41, D), torch.randn(41)
    torch.save(weights, tmp_path / "ckpt.pt")
    told = ("--heads", 3, "--no-norm-first", "--activation", "relu", "--embedding-scale", "sqrt", *FLAGS[2:])
    asked = command(tmp_path / "ckpt.pt", *told)
    assert "does not contain src_embedding, tgt_embedding. Give --src-embedding NAME" in str(asked.exception)
    named = ("--src-embedding", "a.embedding", "--tgt-embedding", "b.embedding", "--output-layer", "generator")
    assert (
        command(tmp_path / "ckpt.pt", *told, *named, "--positions", "positional_encoding.pos_embedding").exit_code == 0
    )
