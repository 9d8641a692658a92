"""What engines are planned to need, against a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.support.fakes import tiny_config
from tfexport.bundle.reader import open_bundle
from tfexport.exporter.engine_plan import LengthPlan, cost, weight_bytes

CONFIG = tiny_config(
    d_model=24,
    n_heads=3,
    d_ff=40,
    n_encoder_layers=2,
    n_decoder_layers=3,
    max_source_length=500,
    max_target_length=400,
)


PLAN = LengthPlan(max_batch=16, max_beam=5, max_source=96, cache=(32, 64))


def costs(plan: LengthPlan = PLAN, precision: Any = "float16", **options: Any) -> Any:
    defaults = {"n_gpus": 1, "limit": 8 << 30, "library": "tensorrt_rtx"}
    return cost(plan, CONFIG, precision, **{**defaults, **options})


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("role", ["encoder", "decoder_step"])
def test_weights_are_about_what_the_graphs_point_at(half_bundle: Path, role: Any, precision: Any) -> None:
    bundle = open_bundle(half_bundle)
    graph = onnx.load(bundle.graph(role, precision), load_external_data=False).graph
    matrices = sum(
        int(entry.value)
        for tensor in graph.initializer
        for entry in tensor.external_data
        if entry.key == "length" and len(tensor.dims) > 1
    )
    assert weight_bytes(bundle.config, precision)[role] == matrices
