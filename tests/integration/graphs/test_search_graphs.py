"""TensorRT builds the graphs that choose tokens, though no engine of a bundle has them yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from tfexport.contract import GraphSpec
from tfexport.graph_contract import SEARCH_GRAPHS

SIZES = {
    **{"rows": (1, 32, 64), "batch": (1, 8, 16), "beam": (1, 4, 4), "found": (9, 17, 17), "cache": (8, 64, 256)},
    "candidates": (2, 8, 8),
}
"""The least, usual and largest size of each axis."""


@pytest.mark.thorough
@pytest.mark.parametrize("graph", SEARCH_GRAPHS, ids=lambda graph: graph.role)
def test_tensorrt_builds_an_engine(tiny_bundle: Path, graph: GraphSpec) -> None:
    """It has no float64: there log-probabilities would be summed in float32."""
    trt: Any = pytest.importorskip("tensorrt_rtx", reason="TensorRT is not installed: pip install tensorrt-rtx")
    model = onnx.load(tiny_bundle / graph.file)
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model.SerializeToString()), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    profile, settings = builder.create_optimization_profile(), builder.create_builder_config()
    for value in model.graph.input:
        axes = [SIZES.get(axis.dim_param, (axis.dim_value,) * 3) for axis in value.type.tensor_type.shape.dim]
        profile.set_shape(value.name, *zip(*axes, strict=True))
    settings.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, settings)
    assert engine is not None
    assert engine.nbytes > 0
