"""Checkpoints whose tensors lie in several files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from makers.tiny import HINTS, TinyCheckpoint
from tests.support.checkpoints import assert_same_model, weights_of
from tfexport.errors import CheckpointError
from tfexport.models.checkpoints.load import load_checkpoint


def write_shards(folder: Path, save: Callable[..., None], name: str) -> Path:
    """Write the weights of a model of the tutorial in two shards; returns their index."""
    stem, suffix = name.split(".")
    weights = {key: tensor.clone() for key, tensor in weights_of("tutorial").items()}
    places = {key: f"{stem}-0000{1 + k % 2}-of-00002.{suffix}" for k, key in enumerate(weights)}
    for shard in {*places.values()}:
        save({key: weights[key] for key in weights if places[key] == shard}, folder / shard)
    index = folder / f"{name}.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index


@pytest.mark.parametrize(("save", "name"), [(save_file, "model.safetensors"), (torch.save, "pytorch_model.bin")])
def test_shards_are_one_model(
    save: Callable[..., None], name: str, tmp_path: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    index = write_shards(tmp_path, save, name)
    plain = load_checkpoint(tiny_checkpoint.path, HINTS)
    of_index, of_folder = (load_checkpoint(path, HINTS) for path in (index, tmp_path))
    for loaded in (of_index, of_folder):
        assert_same_model(loaded, plain)
    assert of_index.sha256 == of_folder.sha256
    shard = min(tmp_path.glob("*-00001-*"))
    with pytest.raises(CheckpointError, match=rf"one of 2 shards. Give their index, {index}"):
        load_checkpoint(shard, HINTS)
    content = dict(weights_of("tutorial"))
    save({key: content[key] + 1 for key in json.loads(index.read_text())["weight_map"] if key in content}, shard)
    assert load_checkpoint(index, HINTS).sha256 != of_index.sha256
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"lists {shard.name}, which is missing"):
        load_checkpoint(index, HINTS)
    index.write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(CheckpointError, match="no weight_map"):
        load_checkpoint(index, HINTS)


def test_a_folder_with_weights_under_their_usual_name_needs_no_config(
    tmp_path: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    save_file({key: tensor.clone() for key, tensor in weights_of("tutorial").items()}, tmp_path / "model.safetensors")
    assert_same_model(load_checkpoint(tmp_path, HINTS), load_checkpoint(tiny_checkpoint.path, HINTS))
