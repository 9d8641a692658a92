"""Which settings of a checkpoint are confirmed, and where a bundle says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tfexport
from makers.tiny import TinyCheckpoint, randomised
from tests.support.commands import Run
from tfexport.bundle.reader import open_bundle
from tfexport.config import ModelConfig
from tfexport.confirmation import Confirmation
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats.native import Tokenizers, save
from tfexport.models.transformer import Transformer

SHAPELESS = ("n_heads", "norm_first", "activation", "embedding_scale", "norm", "norm_eps", "source_bos", "source_eos")


def test_settings_from_flags_are_unconfirmed(tiny_checkpoint: TinyCheckpoint) -> None:
    confirmation = tiny_checkpoint.load().confirmation
    assert confirmation.by == ""
    assert tuple(confirmation.unconfirmed) == SHAPELESS  # the vocabularies confirm the special ids
    assert confirmation.unconfirmed["n_heads"] == 3


def test_ids_that_no_vocabulary_has_are_unconfirmed(tiny_checkpoint: TinyCheckpoint) -> None:
    hints = {"n_heads": 3, "pad_id": 1, "bos_id": 2, "eos_id": 3}
    unconfirmed = load_checkpoint(tiny_checkpoint.path, hints).confirmation.unconfirmed
    assert tuple(unconfirmed) == (*SHAPELESS, "pad_id", "bos_id", "eos_id")


def test_ids_that_the_vocabularies_have_too_are_confirmed(tiny_checkpoint: TinyCheckpoint) -> None:
    def unconfirmed(**ids: int) -> list[str]:
        hints = {"n_heads": 3, "pad_id": 1, "bos_id": 2, "eos_id": 3, **ids}
        loaded = load_checkpoint(tiny_checkpoint.path, hints, tokenizers=tiny_checkpoint.tokenizers())
        return [name for name in loaded.confirmation.unconfirmed if name.endswith("_id")]

    assert unconfirmed() == []
    assert unconfirmed(bos_id=5) == ["bos_id"]


def test_a_file_that_describes_itself_confirms_its_settings(tmp_path: Path) -> None:
    config = ModelConfig(
        unk_id=3, src_vocab_size=9, tgt_vocab_size=9, d_model=8, n_heads=2, d_ff=8, n_encoder_layers=1, n_decoder_layers=1,
        max_source_length=5, max_target_length=5, pad_id=0, bos_id=1, eos_id=2,
    )  # fmt: skip
    weights = randomised(Transformer(config)).state_dict()
    save(tmp_path / "own.safetensors", weights, config, Tokenizers(None, None), torch.float32)
    assert load_checkpoint(tmp_path / "own.safetensors", {}).confirmation.is_confirmed
    shorter = load_checkpoint(tmp_path / "own.safetensors", {"max_target_length": 4}).confirmation
    assert (shorter.by, shorter.is_confirmed) == ("file", True)


def test_bundle_and_inspection_say_it(own_bundle: Path, tiny_checkpoint: TinyCheckpoint, run: Run) -> None:
    confirmation = open_bundle(own_bundle).origin.confirmation
    assert confirmation == tiny_checkpoint.load().confirmation
    assert f"these settings are {confirmation.text}" in run("inspect", tiny_checkpoint.path, "--heads", "3").lines[-1]
    record = json.loads(run("inspect", tiny_checkpoint.path, "--json").stdout)["confirmation"]
    assert "n_heads" not in record["unconfirmed"]  # nobody gives it
    assert tuple(record["unconfirmed"]) == SHAPELESS[1:]


def test_a_manifest_without_a_record_is_unconfirmed(own_bundle: Path) -> None:
    path = own_bundle / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["source"]["confirmation"] = "by me"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    assert open_bundle(own_bundle).origin.confirmation == Confirmation()


@pytest.mark.parametrize("spoiled", [False, True])
def test_an_export_tells_how_often_int8_chooses_as_float32(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, run: Run, spoiled: bool
) -> None:
    """One large weight in each row leaves nearly no steps of int8 for the other weights."""
    weights = torch.load(tiny_checkpoint.path)
    if spoiled:
        for name, tensor in weights.items():
            if name.endswith(("fc_2.weight", "fc_o.weight")):
                tensor[:, 0] = 40.0
    torch.save(weights, tmp_path / "model.pt")
    outcome = run("export", tmp_path / "model.pt", *tiny_checkpoint.flags, "--precision", "fp32,int8")
    assert outcome.code == 0, outcome.stderr
    assert sum("int8 chooses the token of float32 at" in line for line in outcome.lines) == 1
    assert ("warning: int8 chooses the token of float32" in outcome.stderr) == spoiled


def test_an_export_in_python_returns_it(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    exported = tfexport.export(
        tiny_checkpoint.path,
        tmp_path / "out",
        heads=3,
        src_vocab=tiny_checkpoint.src_vocab,
        tgt_vocab=tiny_checkpoint.tgt_vocab,
    )
    assert tuple(exported.confirmation.unconfirmed) == SHAPELESS
    assert exported.agreements["float32"].same == exported.agreements["float32"].steps
