"""`tfexport triton`: a model repository of a bundle."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import (
    Run,
    modules_after,
    one_error,
)
from tfexport.bundle.reader import Engine, open_bundle


def test_a_model_repository_of_a_bundle(run: Run, own_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = own_bundle.with_name("own.triton")
    outcome = run("triton", own_bundle, "--beam", "3", "--max-length", "17", "--batch-size", "5")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.lines == [
        f"wrote {repository} in fp32: encoder, decoder_step, translate",
        f"next: tritonserver --model-repository={repository}",
    ]
    config = (repository / "translate" / "config.pbtxt").read_text()
    assert "max_batch_size: 5" in config
    parameters = dict(re.findall(r'key: "(\w+)"\n\s*value \{\n\s*string_value: "(.*?)"', config))
    assert (parameters["beam"], parameters["max_length"], parameters["runtime"]) == ("3", "17", "ort-cpu")
    assert one_error(run("triton", own_bundle)).endswith(
        "own.triton exists. Replace it with --force, or give another folder with -o."
    )
    assert run("triton", own_bundle, "--force").code == 0
    assert run("triton", own_bundle, "-o", own_bundle.with_name("other")).code == 0
    monkeypatch.chdir(own_bundle)
    assert run("triton", ".", "--force").code == 0  # beside the bundle, also when it has no name
    assert {path.name for path in own_bundle.parent.iterdir()} == {"own", "own.triton", "other"}


def test_a_bundle_with_engines_is_served_with_them(
    run: Run, half_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default in the precision that the engines have."""
    bundle = open_bundle(half_bundle)
    engine = Engine(
        file="encoder.engine",
        role="encoder",
        precision="float16",
        library="tensorrt_rtx",
        version="1",
        gpu="sm89",
        cache=0,
        profile={},
        seconds=1.0,
    )
    monkeypatch.setattr("tfexport.bundle.reader.open_bundle", lambda _: replace(bundle, engines=(engine,)))
    outcome = run("triton", half_bundle, "-o", tmp_path / "models", "--runtime", "tensorrt")
    assert outcome.code == 0, outcome.stderr
    assert outcome.lines[0] == f"wrote {tmp_path / 'models'} in fp16: encoder, decoder_step, translate"
    assert (
        run("triton", half_bundle, "-o", tmp_path / "on cpu")
        .lines[0]
        .endswith("in fp32: encoder, decoder_step, translate")
    )
    wrong = run("triton", half_bundle, "-o", tmp_path / "other", "--runtime", "tensorrt", "--precision", "fp32")
    assert "no TensorRT fp32 engines" in one_error(wrong)


@pytest.mark.thorough
def test_a_model_repository_is_written_without_pytorch(tiny_bundle: Path, tmp_path: Path) -> None:
    modules, _ = modules_after(["triton", tiny_bundle, "-o", tmp_path / "models"])
    assert not modules & {"torch", "onnx", "onnxruntime"}
