"""Which of the entries of a training script's file the weights are, and what else it may hold."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tfexport
from makers.tiny import HINTS, TinyCheckpoint
from tests.support.checkpoints import Weights, assert_same_model, refused, weights_of
from tests.support.commands import Run
from tfexport.errors import TfexportError
from tfexport.models.checkpoints.load import Checkpoint, inspect_checkpoint, load_checkpoint
from tfexport.models.formats.files import read_file
from tfexport.models.formats.pickles import InertObject
from tfexport.models.formats.state_dicts import Picked


@dataclass
class Settings:
    """As a user's own module has it."""

    layers: int = 2


class Tagged(torch.Tensor):
    """A user's own kind of tensor."""


def trained(weights: Weights) -> dict[str, Any]:
    """What training scripts save beside the weights, and `weights_only` readers refuse."""
    return {
        "args": argparse.Namespace(heads=3, lr=np.float32(0.1)),
        "settings": Settings(),
        "best": np.float64(12.5),
        "step": np.int64(7),
        "when": np.datetime64("2020-01-01"),
        "history": np.arange(3.0),
        "optimizer": {
            "state": {0: {"exp_avg": torch.ones(2), "step": torch.tensor(1.0)}},
            "param_groups": [{"lr": 1.0}],
        },
        "random": torch.get_rng_state(),
        "path": Path("runs/1"),
    }


def inside(*keys: str) -> Callable[[Weights], Any]:
    def put(weights: Weights) -> Any:
        content: Any = weights
        for key in reversed(keys):
            content = {**trained(weights), key: content}
        return content

    return put


@pytest.fixture
def plain(tiny_checkpoint: TinyCheckpoint) -> Checkpoint:
    return load_checkpoint(tiny_checkpoint.path, HINTS)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "put", [inside(key) for key in ("state_dict", "model", "net", "params")] + [inside("checkpoint", "net")]
)
def test_weights_among_objects_of_any_class_are_found(
    tmp_path: Path, plain: Checkpoint, put: Callable[[Weights], Any], zipped: bool
) -> None:
    path = tmp_path / "model.chkpt"
    torch.save(put(weights_of("tutorial")), path, _use_new_zipfile_serialization=zipped)
    assert_same_model(load_checkpoint(path, HINTS), plain)


def test_weights_of_parameters_that_have_attributes_are_read(
    load: Callable[..., Checkpoint], plain: Checkpoint
) -> None:
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in weights_of("tutorial").items()}
    for tensor in weights.values():
        tensor.label = "mine"  # type: ignore[attr-defined]
    assert_same_model(load({"net": weights}), plain)
    assert_same_model(
        load({name: tensor.as_subclass(Tagged) for name, tensor in weights_of("tutorial").items()}), plain
    )


def two(weights: Weights) -> dict[str, Any]:
    other = {name: tensor + 1 for name, tensor in weights.items()}
    return {"net": weights, "ema": {"shadow": other, "decay": 0.9}}


def test_of_two_the_user_says_which(load: Callable[..., Checkpoint], plain: Checkpoint) -> None:
    message = refused(load, two(weights_of("tutorial")))
    n_tensors = len(weights_of("tutorial"))
    assert f"in 2 places: net ({n_tensors} tensors), ema.shadow ({n_tensors} tensors). Choose one with --key" in message
    assert_same_model(load(two(weights_of("tutorial")), {**HINTS, "key": "net"}), plain)
    other = load(two(weights_of("tutorial")), {**HINTS, "key": "ema.shadow"})
    assert torch.equal(other.weights["output_weight"], plain.weights["output_weight"] + 1)


def test_of_two_usual_keys_the_user_says_which(load: Callable[..., Checkpoint], plain: Checkpoint) -> None:
    """Scripts save an average beside the model, and either may have either name."""
    average = {name: tensor + 1 for name, tensor in weights_of("tutorial").items()}
    both = {"model": average, "state_dict": weights_of("tutorial"), "epoch": 3}
    assert "in 2 places: model (" in refused(load, both)
    assert_same_model(load(both, {**HINTS, "key": "state_dict"}), plain)


@pytest.mark.parametrize("suffix", ["", "_state_dict", "_state"])
def test_an_encoder_and_a_decoder_that_were_saved_one_by_one_are_one_model(
    suffix: str, load: Callable[..., Checkpoint], plain: Checkpoint
) -> None:
    content: dict[str, Any] = {f"{side}{suffix}": {} for side in ("encoder", "decoder")}
    for name, tensor in weights_of("tutorial").items():
        side, _, own = name.partition(".")
        content[f"{side}{suffix}"][own] = tensor
    optimizer = trained({})["optimizer"]
    assert_same_model(load({**content, "optimizer": optimizer, "epoch": 3}), plain)
    assert_same_model(load({"model": content, "optimizer": optimizer}), plain)
    loss = {"crit": {"weight": torch.ones(3)}}
    assert "--ignore crit.weight" in refused(load, {**content, **loss})
    assert_same_model(load({**content, **loss}, {**HINTS, "ignore": ["crit.*"]}), plain)
    del content[f"encoder{suffix}"]
    assert "decoder" in refused(load, content)


def test_a_key_that_is_not_there_names_those_that_are(load: Callable[..., Checkpoint]) -> None:
    message = refused(load, two(weights_of("tutorial")), {**HINTS, "key": "ema.model"})
    assert "no entry 'ema.model': it has weights in net (" in message


def test_keys_may_have_dots_and_lead_through_objects(load: Callable[..., Checkpoint], plain: Checkpoint) -> None:
    held = argparse.Namespace(**{"best.model": weights_of("tutorial")})
    content = {"run": held, "net": weights_of("tutorial")}
    assert_same_model(load(content, {**HINTS, "key": "run.best.model"}), plain)


def test_names_that_belong_to_no_layer_are_ignored(load: Callable[..., Checkpoint], plain: Checkpoint) -> None:
    weights = {f"model.{name}": tensor for name, tensor in weights_of("tutorial").items()}
    content = {"state_dict": {**weights, "crit.weight": torch.ones(3), "crit.scale": torch.ones(1)}}
    assert "Leave out names that belong to no layer with --ignore" in refused(load, content)
    found = load(content, {**HINTS, "ignore": ["crit.*"]})
    assert_same_model(found, plain)
    assert found.ignored == ("crit.weight", "crit.scale")
    assert "'loss.*'" in refused(load, content, {**HINTS, "ignore": ["crit.*", "loss.*"]})


def test_entries_that_are_no_tensors_are_ignored_too(load: Callable[..., Checkpoint], plain: Checkpoint) -> None:
    content = {**weights_of("tutorial"), "epoch": 3}
    assert "--ignore epoch" in refused(load, content)
    assert_same_model(load(content, {**HINTS, "ignore": ["epoch"]}), plain)


@pytest.mark.parametrize("hints", [{"key": 3}, {"ignore": 3}, {"ignore": [3]}])
def test_a_configuration_may_have_anything_there(load: Callable[..., Checkpoint], hints: dict[str, Any]) -> None:
    assert "Correct them" in refused(load, weights_of("tutorial"), {**HINTS, **hints})


def test_objects_are_records_of_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(trained({}), path)
    from tfexport.models.formats.pickled_options import read_inert

    found = read_inert(path)
    assert isinstance(found["settings"], InertObject)
    assert found["settings"].of.endswith("test_state_dicts.Settings")
    assert found["settings"].attributes == {"layers": 2}
    assert found["args"].attributes["heads"] == 3


@pytest.mark.thorough
def test_python_and_the_command_line_say_the_same(tmp_path: Path, tiny_checkpoint: TinyCheckpoint, run: Run) -> None:
    """Both report what was ignored, and the manifest lists it, so that parity reads the file again as the export did."""
    path = tmp_path / "two.ckpt"
    content = two({**weights_of("tutorial"), "crit.weight": torch.ones(3), "loss.scale": torch.ones(1)})
    torch.save(content, path)
    flags = ["--key", "net", "--ignore", "crit.*", "--ignore", "loss.*"]
    found = json.loads(run("inspect", path, *flags, "--json").stdout)
    assert found["ignored"] == ["crit.weight", "loss.scale"]
    assert "ignored: crit.weight, loss.scale" in run("inspect", path, *flags).stdout
    with pytest.raises(TfexportError, match="in 2 places"):
        tfexport.inspect(path)
    assert tfexport.inspect(path, key="net", ignore=["crit.*", "loss.*"]).ignored == ("crit.weight", "loss.scale")
    done = run("export", path, "-o", tmp_path / "b", *flags, *tiny_checkpoint.flags)
    assert done.code == 0, done.stderr
    assert "left out crit.weight, loss.scale" in done.stderr
    source = json.loads((tmp_path / "b" / "manifest.json").read_text(encoding="utf-8"))["source"]
    assert source["ignored"] == ["crit.weight", "loss.scale"]
    again = run("parity", tmp_path / "b", "--checkpoint", path, "--no-certify")
    assert again.code == 0, again.stderr


def test_safetensors_have_one_place_for_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({**weights_of("tutorial"), "crit.weight": torch.ones(3)}, path)
    with pytest.raises(TfexportError, match="no entry 'net'"):
        read_file(path, picked=Picked("net"))
    assert inspect_checkpoint(path, {**HINTS, "ignore": ["crit.*"]}).ignored == ("crit.weight",)
