"""A user's own family file: the documented example end to end, and what is said of files that fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from makers.paths import ROOT
from makers.tiny import HINTS, tiny_transformer
from tests.support.checkpoints import refused, saved
from tests.support.module_runtime import ModuleRuntime
from tfexport.bundle.reader import open_bundle
from tfexport.cli import app
from tfexport.errors import ConfigError, TfexportError
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.checkpoints.user_family import read_family_file
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, search

EXAMPLES = ROOT / "examples"
VOCABULARIES = ("--src-vocab", "src_vocab.json", "--tgt-vocab", "tgt_vocab.json")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with the checkpoint that it makes."""
    folder = Path(shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("own") / "examples"))
    subprocess.run([sys.executable, "make_checkpoint.py"], cwd=folder, check=True)
    return folder


@pytest.fixture
def run(example: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(example)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def own_module(example: Path) -> nn.Module:
    (family,) = read_family_file(example / "my_family.py")
    path = example / "ckpt.pt"
    checkpoint = load_checkpoint(path, {"n_heads": 4, "pad_id": 0, "bos_id": 1, "eos_id": 2}, family=(family,))
    assert family.reference is not None
    return family.reference(torch.load(path, weights_only=True), checkpoint.config)


@pytest.mark.thorough
def test_the_example_decodes_as_its_own_module(example: Path, run: Any) -> None:
    family = ("--family", "my_family.py", "--heads", 4, *VOCABULARIES)
    assert run("probe", "ckpt.pt", *family).exit_code == 0
    done = run("export", "ckpt.pt", *family, "-o", "bundle", "--force")
    assert done.exit_code == 0
    assert "family my-model" in done.stdout
    bundle = open_bundle(example / "bundle")
    random = np.random.default_rng(1)
    sources = [random.integers(3, 40, length).tolist() for length in random.integers(1, 30, 60)]
    for beam in (1, 4):
        options = SearchOptions(beam=beam, max_length=10)
        theirs = ModuleRuntime(own_module(example), bundle.config, pad_id=0)
        wanted, found = (search(runtime, sources, options) for runtime in (theirs, load_runtime("ort-cpu", bundle)))
        assert [h[0].ids for h in found] == [h[0].ids for h in wanted]
        assert len({h[0].ids for h in wanted}) > 10
    compared = run("parity", "bundle", "--checkpoint", "ckpt.pt", "--family", "my_family.py")
    assert compared.exit_code == 0


@pytest.mark.thorough
def test_probe_finds_wrong_heads(run: Any) -> None:
    done = run("probe", "ckpt.pt", "--family", "my_family.py", "--heads", 8, *VOCABULARIES)
    assert done.exit_code == 1
    assert "input of encoder.layers.0.self_attention.output is the first to differ" in done.stdout
    assert "in MyModel: input of encoder.0.attn.out. Usually the attention: n_heads" in done.stdout


def test_probe_finds_norms_exchanged(example: Path, run: Any) -> None:
    (example / "exchanged.py").write_text(GOOD.replace('("ln1", "ln2", "ln3")', '("ln2", "ln1", "ln3")'))
    done = run("probe", "ckpt.pt", "--family", "exchanged.py", "--heads", 4, *VOCABULARIES)
    assert done.exit_code == 1
    assert "decoder.layers.0.norms.0 is the first to differ" in done.stdout


def test_a_bundle_alone_never_runs_a_family_file(tiny_bundle: Path, run: Any, tmp_path: Path) -> None:
    """A manifest may come from anyone: the name in it is looked up, and no file is run for it."""
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    manifest = json.loads((folder / "manifest.json").read_text())
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for name in ("my-model", str(tmp_path / "evil.py")):
        manifest["source"]["family"] = name
        (folder / "manifest.json").write_text(json.dumps(manifest))
        done = run("parity", folder, "--checkpoint", "ckpt.pt")
        assert isinstance(done.exception, TfexportError)
        assert f"cannot be read as {name!r}. Give --family one of:" in str(done.exception)
        assert "--family my_family.py" in str(done.exception)
    assert not (tmp_path / "ran").exists()


def test_a_family_for_parity_needs_a_checkpoint(run: Any) -> None:
    assert "Give --checkpoint CKPT too" in str(run("parity", "bundle", "--family", "my_family.py").exception)


def test_inspect_takes_a_family_file(run: Any) -> None:
    done = run("inspect", "ckpt.pt", "--family", "my_family.py")
    assert done.exit_code == 0
    assert "family my-model, the model of examples/my_model.py" in done.stdout
    assert "not in the file: n_heads (give --heads N)" in done.stdout


def test_inspect_without_heads_checks_no_shape_that_depends_on_them(example: Path, run: Any) -> None:
    """The size of a head says nothing of a matrix's rows before the number of heads is known."""
    (example / "sized.py").write_text(GOOD.replace('"d_model": d_model,', '"d_model": d_model, "d_head": 16,'))
    done = run("inspect", "ckpt.pt", "--family", "sized.py")
    assert done.exit_code == 0
    assert "n_heads (give --heads N)" in done.stdout
    assert "misshapen" not in done.stdout
    assert (
        "misshapen: encoder.0.attn.qkv.weight" in run("inspect", "ckpt.pt", "--family", "sized.py", "--heads", 3).stdout
    )


GOOD = (EXAMPLES / "my_family.py").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD.replace("count_indices(", "cuont(", 1), "line 39: NameError: name 'cuont' is not defined. Correct"),
        (GOOD.replace('["src_embed.weight"].shape', '["no.weight"].shape'), "line 35: KeyError: 'no.weight'"),
        ("import nosuchmodule", "line 1: ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("def f(:\n    pass", "line 1: SyntaxError"),
        ("x = 1", "has no FAMILY. Let it say FAMILY = Family("),
        ("FAMILY = 'tutorial'", "has no FAMILY"),
        (GOOD.replace('name="my-model"', 'name="tutorial"'), "a family 'tutorial', which tfexport has itself"),
        (
            GOOD.replace('f"{ours}.mlp.0.{{p}}"', 'f"{ours}.{{p}}.mlp.0.{{p}}"'),
            "{p} comes twice in 'encoder.{i}.{p}.mlp.0.{p}'. Placeholders are {i}, {h} and {p}, each once",
        ),
        (
            GOOD.replace('"src_pos.weight",', '"no_pos.weight",'),
            "is not of the family my-model: it has no no_pos.weight",
        ),
        (GOOD.replace('norms.{k}.{{p}}"', 'norm{k}.{{p}}"'), "missing: encoder.layers.0.norms.0.weight"),
    ],
)
def test_what_is_wrong_with_a_family_file_is_told(example: Path, content: str, message: str) -> None:
    (example / "bad.py").write_text(content)
    (example / "ids.json").write_text('{"n_heads": 4, "pad_id": 0, "bos_id": 1, "eos_id": 2}')
    done = CliRunner().invoke(
        app,
        [
            "export",
            str(example / "ckpt.pt"),
            "--family",
            str(example / "bad.py"),
            "--config",
            str(example / "ids.json"),
        ],
    )
    assert isinstance(done.exception, TfexportError)
    assert message in str(done.exception)


IN_PLACE = """
def adjust(weights):
    weights["output_bias"] = weights.pop("output_bias", None) or weights["encoder.norm.weight"].mul_(2)
    return weights
"""


def test_weights_that_are_written_into_are_refused(example: Path) -> None:
    content = GOOD.replace("FAMILY = Family(", f"{IN_PLACE}\n\nFAMILY = Family(\n    adjust=adjust,")
    (example / "in_place.py").write_text(content)
    families = read_family_file(example / "in_place.py")
    with pytest.raises(ConfigError, match=r"in_place.py writes into encoder.norm.weight. Let it make new tensors"):
        load_checkpoint(example / "ckpt.pt", {"n_heads": 4, "pad_id": 0, "bos_id": 1, "eos_id": 2}, family=families)


def test_a_missing_family_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no family file"):
        read_family_file(tmp_path / "nosuch.py")


def test_a_family_of_one_s_own_is_asked_alone(tmp_path: Path, example: Path) -> None:
    """The file that tfexport would know itself is read as its owner says, and not otherwise."""
    (tmp_path / "ckpt.pt").write_bytes(saved(dict(tiny_transformer().state_dict())))
    families = read_family_file(example / "my_family.py")
    with pytest.raises(TfexportError, match="is not of the family my-model"):
        load_checkpoint(tmp_path / "ckpt.pt", HINTS, family=families)


def test_weights_beside_those_of_a_loss_are_read_without_it(example: Path, load: Any) -> None:
    """As Lightning saves them. With other names beside them, `model.` is part of no name of the family."""
    families = read_family_file(example / "my_family.py")
    own = torch.load(example / "ckpt.pt", weights_only=True)
    weights = {**{f"model.{name}": tensor for name, tensor in own.items()}, "crit.weight": torch.ones(3)}
    hints = {"n_heads": 4, "pad_id": 0, "bos_id": 1, "eos_id": 2}
    message = refused(load, weights, hints, family=families)
    assert "Its names begin with model. in this file" in message
    assert "--ignore 'crit.*'" in message
    assert load(weights, {**hints, "ignore": ("crit.*",)}, family=families).ignored == ("crit.weight",)


def test_modules_beside_the_file_are_found_and_the_path_is_left_as_it_was(example: Path) -> None:
    before = list(sys.path)
    read_family_file(example / "my_family.py")
    assert sys.path == before


def test_a_tensor_that_cannot_be_cut_is_told(example: Path, load: Any) -> None:
    families = read_family_file(example / "my_family.py")
    weights = torch.load(example / "ckpt.pt", weights_only=True)
    weights["decoder.1.cross.qkv.bias"] = torch.ones(2)
    hints = {"n_heads": 4, "pad_id": 0, "bos_id": 1, "eos_id": 2}
    message = refused(load, weights, hints, family=families)
    assert "decoder.1.cross.qkv.bias (part 1 of 3) is [2], not [32]" in message
