"""What no file tells is asked for or refused, never guessed: small models whose own greedy loops say what is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from makers.torch_models import EOS, HEADS, IDS, LENGTH, MODELS, SRC_VOCAB, TGT_VOCAB, D, made
from tests.support import foreign
from tests.support.checkpoints import refused
from tfexport.bundle.reader import open_bundle
from tfexport.errors import TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import Checkpoint, inspect_checkpoint, load_checkpoint
from tfexport.models.checkpoints.user_family import read_family_file
from tfexport.models.formats.native import Tokenizers
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, search
from tfexport.text.tokenizers import word_tokenizer
from tfexport.verification.probe import probe

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")

MAX_LENGTH, BOS = 8, IDS["bos_id"]


def hints_of(name: str, **more: Any) -> dict[str, Any]:
    return {"n_heads": HEADS, **IDS, **MODELS[name].hints, **more}  # type: ignore[attr-defined]


def some_sources(count: int = 40) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(4, TGT_VOCAB, random.integers(3, 14)).tolist() for _ in range(count)]


SOURCES = some_sources()


def owner_s(module: nn.Module, sources: list[list[int]] = SOURCES) -> list[list[int]]:
    """The model's own greedy loop: each token from the whole target before it, without a cache.

    Sources of one length are a batch, so that there is no padding.
    """
    outputs: dict[int, list[int]] = {}
    with torch.inference_mode():
        for length in {len(source) for source in sources}:
            places = [place for place, source in enumerate(sources) if len(source) == length]
            src, tokens = torch.tensor([sources[place] for place in places]), torch.full((len(places), 1), BOS)
            for _ in range(MAX_LENGTH):
                tokens = torch.cat([tokens, module(src, tokens)[:, -1:].argmax(-1)], 1)
            outputs |= {place: until_eos(row) for place, row in zip(places, tokens[:, 1:].tolist(), strict=True)}
    return [outputs[place] for place in range(len(sources))]


def until_eos(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def exported(checkpoint: Checkpoint, folder: Path) -> list[list[int]]:
    export(checkpoint, folder, gate=None, force=True)
    runtime = load_runtime("ort-cpu", open_bundle(folder), threads=1)
    found = search(runtime, SOURCES, SearchOptions(beam=1, max_length=MAX_LENGTH))
    return [list(hypotheses[0].ids) for hypotheses in found]


@pytest.fixture
def outputs(tmp_path: Path) -> Callable[..., list[list[int]]]:
    """What a checkpoint's bundle decodes."""

    def decoded(weights: Mapping[str, Tensor] | Path, hints: Mapping[str, Any]) -> list[list[int]]:
        path = weights if isinstance(weights, Path) else tmp_path / "model.pt"
        if not isinstance(weights, Path):
            torch.save(weights, path)
        return exported(load_checkpoint(path, hints), tmp_path / "bundle")

    return decoded


# --- norms


def rms_norms(model: nn.Module, *, final: bool = True) -> None:
    """RMSNorm in place of the norms of the layers, and of the final ones."""
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.LayerNorm) and (final or not name.endswith(".norm")):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, nn.RMSNorm(D, eps=1e-6))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", ["tutorial", "stacks", "shared"])
def test_norms_without_biases_are_asked_for(
    name: str, load: Callable[..., Checkpoint], outputs: Callable[..., list[list[int]]]
) -> None:
    """Final norms too; only norms of layers; no biases at all."""
    module = made(name, rms_norms)
    hints = {field: value for field, value in hints_of(name).items() if field != "norm"}
    message = refused(load, module.state_dict(), hints)
    assert "does not contain norm. Give --norm layer (or rms)" in message
    assert "does not contain norm_eps" in refused(load, module.state_dict(), {**hints, "norm": "rms"})
    wanted = owner_s(module)
    assert outputs(module.state_dict(), {**hints, "norm": "rms", "norm_eps": 1e-6}) == wanted
    assert outputs(module.state_dict(), {**hints, "norm": "layer"}) != wanted


def test_layer_norms_without_biases_are_read_as_such(outputs: Callable[..., list[list[int]]]) -> None:
    def without_biases(model: nn.Module) -> None:
        for name, part in list(model.named_modules()):
            if isinstance(part, nn.LayerNorm) and ".layers." in name:
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, nn.LayerNorm(D, bias=False))

    module = made("tutorial", without_biases)  # the final norms have biases
    assert outputs(module.state_dict(), hints_of("tutorial", norm="layer")) == owner_s(module)


def test_two_kinds_of_norms_are_refused_by_name(load: Callable[..., Checkpoint]) -> None:
    weights = made("tutorial", lambda model: rms_norms(model, final=False)).state_dict()
    message = refused(load, weights, hints_of("tutorial", norm="rms", norm_eps=1e-6))
    assert (
        "transformer.encoder.norm has a bias, as LayerNorm has and RMSNorm has not, unlike transformer.encoder."
        in message
    )
    assert "a model with LayerNorm and RMSNorm is not computed" in message
    message = refused(load, made("tutorial").state_dict(), hints_of("tutorial", norm="rms", norm_eps=1e-6))
    assert "has a bias, as LayerNorm has and RMSNorm has not. Leave out --norm" in message


# --- tied names


def tied(model: Any, *, rows: int = TGT_VOCAB) -> None:
    model.src_tok_emb.embedding = nn.Embedding(rows, D)
    model.generator.weight = model.tgt_tok_emb.embedding.weight


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("rows", [TGT_VOCAB, SRC_VOCAB])
def test_a_name_that_safetensors_dropped_is_restored(
    rows: int, tmp_path: Path, outputs: Callable[..., list[list[int]]]
) -> None:
    module = made("tutorial", lambda model: tied(model, rows=rows))
    save_model(module, str(tmp_path / "model.safetensors"))
    assert outputs(tmp_path / "model.safetensors", hints_of("tutorial")) == owner_s(module)


def without_target(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in module.state_dict().items() if "tgt_tok_emb" not in name}


def test_a_target_embedding_without_a_name_is_asked_for(
    load: Callable[..., Checkpoint], outputs: Callable[..., list[list[int]]]
) -> None:
    module = made("tutorial", tied)
    weights = without_target(module)
    message = refused(load, weights, hints_of("tutorial"))
    assert "does not contain tgt_embedding" in message
    assert "--tgt-embedding NAME (generator.weight if it is tied to the output layer)" in message
    assert outputs(weights, hints_of("tutorial", tgt_embedding="generator")) == owner_s(module)
    assert outputs(weights, hints_of("tutorial", tgt_embedding="src_tok_emb.embedding")) != owner_s(module)


def test_a_target_embedding_of_other_rows_than_the_source_s_is_the_output_layer(
    outputs: Callable[..., list[list[int]]],
) -> None:
    module = made("tutorial", lambda model: tied(model, rows=SRC_VOCAB))
    assert outputs(without_target(module), hints_of("tutorial")) == owner_s(module)


# --- positions


class Computed(nn.Module):
    """A table that is in no file: all sin before all cos."""

    def __init__(self, least: float):
        super().__init__()
        frequency = torch.exp(-math.log(10000) * torch.arange(D // 2) / least)
        angles = torch.arange(LENGTH)[:, None] * frequency
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], 1)[:, None], persistent=False)

    def forward(self, embedded: Tensor) -> Tensor:
        return embedded + self.table[: embedded.shape[0]]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("kind", "least"), [("sinusoidal-halves", D / 2), ("sinusoidal-t2t", D / 2 - 1)])
def test_positions_that_code_computes_are_of_the_kind_that_the_user_says(
    kind: str, least: float, load: Callable[..., Checkpoint], outputs: Callable[..., list[list[int]]]
) -> None:
    module = made("tutorial", lambda model: setattr(model, "positional_encoding", Computed(least)))
    hints = hints_of("tutorial", max_source_length=LENGTH, max_target_length=LENGTH)
    message = refused(load, module.state_dict(), hints)
    for said in (
        "sinusoidal, sinusoidal-halves, sinusoidal-t2t, none",
        "does not compute rotary positions and ALiBi",
    ):
        assert said in message
    assert outputs(module.state_dict(), {**hints, "positions": kind}) == owner_s(module)
    assert outputs(module.state_dict(), {**hints, "positions": "sinusoidal"}) != owner_s(module)
    checkpoint = load(module.state_dict(), {**hints, "positions": kind})
    assert (checkpoint.config.positions, checkpoint.notes[0].rpartition("; ")[2]) == (
        "stored",
        f"positions: computed, {kind}",
    )
    assert "positions" in checkpoint.assumed


@pytest.mark.parametrize("kind", ["rotary", "rope", "alibi", "ALiBi", "relative"])
def test_positions_that_no_option_describes_are_refused_by_name(kind: str, load: Callable[..., Checkpoint]) -> None:
    weights = {name: t for name, t in made("tutorial").state_dict().items() if "positional" not in name}
    message = refused(load, weights, hints_of("tutorial", positions=kind))
    assert f"no option describes {kind} positions. Export with --module my_code.py:build" in message


# --- what the configuration says and the arithmetic follows


def more_heads_in_the_decoder(model: Any) -> None:
    for layers, heads in ((model.transformer.encoder.layers, 4), (model.transformer.decoder.layers, 8)):
        for part in layers.modules():
            if isinstance(part, nn.MultiheadAttention):
                part.num_heads, part.head_dim = heads, D // heads


def norm_of_one_stack(model: Any) -> None:
    model.transformer.encoder.norm = None


def no_positions(model: Any) -> None:
    model.positional_encoding = nn.Identity()


NO_TABLE = {"positions": "none", "max_source_length": LENGTH, "max_target_length": LENGTH}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("change", "hints"),
    [
        (more_heads_in_the_decoder, {"n_heads": 8, "n_encoder_heads": 4}),
        (norm_of_one_stack, {}),
        (no_positions, NO_TABLE),
    ],
)
def test_stacks_that_differ_decode_as_their_owner_s(
    change: Callable[[Any], None], hints: dict[str, Any], outputs: Callable[..., list[list[int]]]
) -> None:
    module = made("tutorial", change)
    assert outputs(module.state_dict(), hints_of("tutorial", **hints)) == owner_s(module)


# --- family files

UNSAID = ("norm_first", "activation", "positions", "norm", "norm_eps", "embedding_scale", "source_bos", "source_eos")


@pytest.fixture
def family_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A family file of a pre-norm model that says its sizes only."""
    folder = Path(foreign.__file__).parent
    monkeypatch.syspath_prepend(str(folder))
    lines = (folder / "shared_layers_family.py").read_text().splitlines()
    dropped = (*UNSAID, "final_norm", "tie_source_target", "tie_output")
    kept = [line for line in lines if not line.strip().startswith(tuple(f'"{name}":' for name in dropped))]
    (tmp_path / "family.py").write_text("\n".join(kept))
    return tmp_path / "family.py"


SAID = {
    "norm_first": True, "activation": "gelu", "positions": "learned", "norm": "layer", "norm_eps": 1e-5,
    "embedding_scale": 1.0,
}  # fmt: skip


def test_a_family_file_leaves_no_arithmetic_to_a_default(
    family_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.integration.models.checkpoints.test_foreign import HINTS
    from tests.integration.models.checkpoints.test_foreign import made as made_foreign

    module = made_foreign("shared_layers", monkeypatch)
    torch.save(module.state_dict(), tmp_path / "model.pt")
    family = read_family_file(family_file)
    with pytest.raises(TfexportError) as caught:
        load_checkpoint(tmp_path / "model.pt", HINTS, family=family)
    for name in SAID:
        assert f'"{name}": ' in str(caught.value).partition("Or let `read_config` of the family file return")[2]
    assert "source_bos" not in str(caught.value)
    assert set(inspect_checkpoint(tmp_path / "model.pt", HINTS, family=family).missing) == {*SAID}
    config = load_checkpoint(tmp_path / "model.pt", {**HINTS, **SAID}, family=family).config
    shown = {
        "final_norm": True, "final_norm_in": "both", "tie_source_target": True, "tie_output": True, "gated": False,
        "attention_bias": True, "feed_forward_bias": True, "output_bias": False, "embedding_norm": False,
        "embedding_norm_in": "both", "final_norm_eps": 0.0, "embedding_norm_eps": 0.0,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in shown} == shown
    words = Tokenizers(word_tokenizer({f"w{k}": k for k in range(41)}), None)
    with pytest.raises(TfexportError, match=r"does not contain source_bos, source_eos\. Give"):
        load_checkpoint(tmp_path / "model.pt", {**HINTS, **SAID}, tokenizers=words, family=family)


def test_fields_that_a_family_asks_for_are_asked_once(family_file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from tests.integration.models.checkpoints.test_foreign import HINTS
    from tests.integration.models.checkpoints.test_foreign import made as made_foreign

    torch.save(made_foreign("shared_layers", monkeypatch).state_dict(), tmp_path / "model.pt")
    text = family_file.read_text().replace("FAMILY = Family(", 'FAMILY = Family(asked=("norm_first",),')
    family_file.write_text(text)
    hints = {**HINTS, **{name: value for name, value in SAID.items() if name != "norm_first"}}
    with pytest.raises(TfexportError, match=r"does not contain norm_first\. Give --norm-first"):
        load_checkpoint(tmp_path / "model.pt", hints, family=read_family_file(family_file))


# --- afterwards


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("name", "change", "hints"),
    [
        ("tutorial", rms_norms, {"norm": "rms", "norm_eps": 1e-6}),
        ("shared", rms_norms, {"norm": "rms", "norm_eps": 1e-6}),
        (
            "tutorial",
            lambda model: setattr(model, "positional_encoding", Computed(D / 2)),
            {"positions": "sinusoidal-halves", "max_source_length": LENGTH, "max_target_length": LENGTH},
        ),
    ],
)
def test_probe_builds_the_layers_that_the_user_says(
    name: str, change: Callable[[Any], None], hints: dict[str, Any], tmp_path: Path
) -> None:
    torch.save(made(name, change).state_dict(), tmp_path / "model.pt")
    probed = probe(tmp_path / "model.pt", hints_of(name, **hints))
    assert probed.passed, [check for check in probed.checks if check.passed is False]
    assert "torch.nn" in {check.name for check in probed.checks}
