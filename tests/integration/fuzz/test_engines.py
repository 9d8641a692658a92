"""The fuzzer of engines counts what is built, refused and failed, and finds graphs that compute something else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import onnx
import pytest

from fuzz.models import engines
from makers import engine_bundles
from makers.engine_bundles import different_outputs, write_bundle
from makers.ort_bundles import CONFIG, random_model
from tfexport.bundle.reader import Engine
from tfexport.errors import EngineError
from tfexport.exporter.engine_graphs import buildable_attention
from tfexport.exporter.engine_request import EngineRequest

ODD = CONFIG.replace(d_model=60)


def test_the_random_models_are_of_every_kind() -> None:
    families = list(engines.FAMILIES) * 50
    configs = [engines.random_config(random.Random(seed), family) for seed, family in enumerate(families)]
    heads = {config.head_dim for config in configs}
    assert 4 <= min(heads) <= 6
    assert 120 < max(heads) <= 128
    assert sum(config.head_dim % 8 != 0 for config in configs) > len(configs) // 2
    assert any(config.d_head and config.d_model % 2 for config in configs)
    assert {config.positions for config in configs} == {"sinusoidal", "learned", "relative", "none"}
    assert {config.final_norm_in for config in configs} == {"both", "encoder", "decoder"}
    assert {(config.norm, config.gated) for config in configs} >= {("rms", True), ("rms", False), ("layer", True)}
    assert sum(config.encoder_head_dim != config.head_dim for config in configs) > len(configs) // 5
    assert any(config.is_classifier for config in configs)


def test_a_graph_that_computes_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: onnx.ModelProto) -> None:
        buildable_attention(model)
        for tensor in model.graph.initializer:
            if tensor.name.startswith("constant/float16/-"):
                tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, tensor.data_type, [], [-2.0]))

    bundle = write_bundle(random_model(ODD), tmp_path / "bundle")
    assert list(different_outputs(bundle, "float16", tmp_path / "right")) == []
    monkeypatch.setattr(engine_bundles, "buildable_attention", wrong)
    found = set(different_outputs(bundle, "float16", tmp_path / "wrong"))
    assert {"encoder.fp16.onnx: cross.0.key", "decoder_step.fp16.onnx: logits"} <= found


@pytest.mark.thorough
def test_engines_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="the tensorrt-rtx extra is not installed")

    def build(request: EngineRequest, directory: Path, built: Any) -> list[Engine]:
        if request.precisions == ("float16",):
            raise EngineError("TensorRT cannot build it.")
        return [None] * 3  # type: ignore[list-item]

    monkeypatch.setattr(EngineRequest, "build", build)
    (tmp_path / "kept").mkdir()
    found = engines.check(ODD, 0, tmp_path, ["sm80", "portable"])
    assert found == {"built": 4, "engines": 12, "failed": 2, "differ": 0}
    assert "fp16 for sm80: EngineError: TensorRT cannot build it." in capsys.readouterr().out
    assert engines.check(ODD, 0, tmp_path / "kept", ["sm80"], keep_modules=True) == {"failed": 1}
    classifier = ODD.replace(n_classes=2, n_decoder_layers=0, tgt_vocab_size=0)
    assert engines.check(classifier, 0, tmp_path, ["sm80"]) == {"refused": 3}
    assert "an encoder classifier" in capsys.readouterr().out
    monkeypatch.setattr(engines, "check", lambda config, seed, folder, gpus, keep_modules: {"failed": seed})
    assert (engines.main(["--models", "1"]), engines.main(["--models", "2"])) == (0, 1)
