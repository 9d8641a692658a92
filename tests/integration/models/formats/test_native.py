"""Our own checkpoints: complete in one file, and refused when they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from makers.tiny import (
    TinyCheckpoint,
)
from tests.support.checkpoints import (
    NATIVE,
    native_weights,
)
from tfexport.errors import CheckpointError, ConfigError, TfexportError
from tfexport.models.checkpoints.load import inspect_checkpoint, load_checkpoint
from tfexport.models.formats import native
from tfexport.models.formats.native import Tokenizers
from tfexport.text.vocabularies import read_vocabulary


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_native_round_trip(tmp_path: Path, tiny_checkpoint: TinyCheckpoint, dtype: torch.dtype) -> None:
    tokenizers, weights = tiny_checkpoint.tokenizers(), native_weights()
    native.save(tmp_path / "model.safetensors", weights, NATIVE, tokenizers, dtype)
    checkpoint = load_checkpoint(tmp_path / "model.safetensors", {})
    assert checkpoint.family == "native"
    assert checkpoint.config == NATIVE
    assert checkpoint.weights.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(checkpoint.weights[name], tensor.to(dtype).float())
    assert checkpoint.tokenizers.source.encode("de5 nothing de7") == [5, 0, 7]
    assert checkpoint.tokenizers.target.decode([5, 6]) == "wört5 wört6"
    inspection = inspect_checkpoint(tmp_path / "model.safetensors", {})
    assert (inspection.vocabulary, inspection.missing, inspection.problems) == (True, {}, ())


def test_native_joint_vocabulary_is_stored_once(tmp_path: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    joint = tiny_checkpoint.tokenizers().target
    sizes = []
    for tokenizers in (Tokenizers(joint, joint), Tokenizers(joint, None)):
        native.save(tmp_path / "model.safetensors", native_weights(), NATIVE, tokenizers, torch.float32)
        sizes.append((tmp_path / "model.safetensors").stat().st_size)
        read = load_checkpoint(tmp_path / "model.safetensors", {}).tokenizers
        assert read.source.to_dict() == joint.to_dict()
        assert (read.target is None) == (tokenizers.target is None)
    assert abs(sizes[0] - sizes[1]) < 50


def test_native_fields_may_be_overruled(tmp_path: Path) -> None:
    native.save(tmp_path / "model.safetensors", native_weights(), NATIVE, Tokenizers(None, None), torch.float32)
    checkpoint = load_checkpoint(tmp_path / "model.safetensors", {"max_source_length": 4})
    assert checkpoint.config == NATIVE.replace(max_source_length=4)
    assert checkpoint.weights["encoder.positions.table"].shape == (4, 12)


def test_native_fields_may_not_be_contradicted(tmp_path: Path) -> None:
    native.save(tmp_path / "model.safetensors", native_weights(), NATIVE, Tokenizers(None, None), torch.float32)
    with pytest.raises(ConfigError, match=rf"n_heads is {NATIVE.n_heads}, not 4\. Leave out --heads"):
        load_checkpoint(tmp_path / "model.safetensors", {"n_heads": 4})


def test_native_output_equal_to_the_shared_embedding_is_stored_once(tmp_path: Path) -> None:
    weights = native_weights()
    weights["output_weight"] = weights["encoder.tokens.weight"].clone()
    native.save(tmp_path / "model.safetensors", weights, NATIVE, Tokenizers(None, None), torch.float32)
    checkpoint = load_checkpoint(tmp_path / "model.safetensors", {})
    assert checkpoint.config == NATIVE.replace(tie_output=True)
    assert "output_weight" not in checkpoint.weights


def test_native_vocabularies_are_replaced_one_by_one(tmp_path: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    native.save(tmp_path / "model.safetensors", native_weights(), NATIVE, tiny_checkpoint.tokenizers(), torch.float32)
    other = read_vocabulary(tiny_checkpoint.tgt_vocab)
    read = load_checkpoint(tmp_path / "model.safetensors", {}, tokenizers=Tokenizers(other, None)).tokenizers
    assert read.source is other
    assert read.target is not None


def test_native_checkpoint_of_another_family_is_refused(tmp_path: Path) -> None:
    native.save(tmp_path / "model.safetensors", native_weights(), NATIVE, Tokenizers(None, None), torch.float32)
    with pytest.raises(CheckpointError, match="of the family native, not tutorial"):
        load_checkpoint(tmp_path / "model.safetensors", {}, family="tutorial")
    assert load_checkpoint(tmp_path / "model.safetensors", {}, family="native").family == "native"


DESCRIPTION = {"revision": native.REVISION, "config": NATIVE.to_dict(), "tokenizers": {}}


@pytest.mark.parametrize(
    "description",
    [{**DESCRIPTION, "revision": native.REVISION + 1}, {"revision": native.REVISION + 1, "model": {"layers": []}}],
    ids=["same keys", "other keys"],
)
def test_native_newer_revision_asks_for_an_upgrade(tmp_path: Path, description: dict[str, Any]) -> None:
    save_file(native_weights(), tmp_path / "model.safetensors", {"tfexport": json.dumps(description)})
    with pytest.raises(CheckpointError, match=rf"of revision {native.REVISION + 1}.*Upgrade tfexport"):
        load_checkpoint(tmp_path / "model.safetensors", {})


@pytest.mark.parametrize(
    "description",
    [
        "",
        "{",
        "[]",
        "5",
        "{}",
        "[" * 100_000,
        json.dumps({**DESCRIPTION, "config": 5}),
        json.dumps({**DESCRIPTION, "config": {}}),
        json.dumps({**DESCRIPTION, "config": {**NATIVE.to_dict(), "d_model": "12"}}),
        json.dumps({**DESCRIPTION, "config": {**NATIVE.to_dict(), "colour": "red"}}),
        json.dumps({**DESCRIPTION, "config": {**NATIVE.to_dict(), "d_ff": 21}}),
        json.dumps({**DESCRIPTION, "tokenizers": 5}),
        json.dumps({**DESCRIPTION, "tokenizers": {"joint": 5}}),
        json.dumps({**DESCRIPTION, "tokenizers": {"source": {"tokenizer": {}}}}),
    ],
)
def test_native_corrupt_description_is_refused(tmp_path: Path, description: str) -> None:
    save_file(native_weights(), tmp_path / "model.safetensors", {"tfexport": description})
    with pytest.raises(TfexportError, match=r"model\.safetensors|the model configuration"):
        load_checkpoint(tmp_path / "model.safetensors", {})
