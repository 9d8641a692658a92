"""The graphs of the dialect `onnx24` compute what PyTorch computes, and name what computes shapes as such."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from makers.ort_bundles import CONFIG, random_model
from makers.tiny import tiny_classifier
from tests.support.graph_checks import self_check
from tfexport import contract, graph_contract
from tfexport.bundle.reader import open_bundle
from tfexport.config import ModelConfig
from tfexport.contract import GraphSpec, Precision
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.weights import write_weights
from tfexport.graph_checks.cases_portable import random_inputs
from tfexport.models.checkpoints.load import Checkpoint
from tfexport.models.model import Model
from tfexport.models.precision import in_precision

SIZES = [
    {"batch": 1, "rows": 1, "src": 1, "cache": 1, "from": 1},
    {"batch": 3, "rows": 12, "src": 7, "cache": 9, "from": 1},
    {"batch": 4, "rows": 4, "src": 20, "cache": 16, "from": 1},
    {"batch": 2, "rows": 10, "src": 3, "cache": 20, "from": 1},
]

sizes_of_all_kinds = pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())))
both_sides = pytest.mark.parametrize("role", ["encoder", "decoder_step"])


def run(path: Path, inputs: Mapping[str, Any], *, outputs: list[str] | None = None) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(outputs, inputs)


def largest_error(model: Model, folder: Path, precision: Precision = "float32") -> float:
    """Of the standard graphs of a precision, as a part of what rounding explains."""
    for each in dict.fromkeys(("float32", precision)):
        write_weights(in_precision(model, each), each, folder)
    graphs = write_graphs(model.config, precision, folder, dialects=["onnx24"])
    assert graphs
    return self_check(model, graphs, folder)


# --- a kind of model that has no other graphs (`graph_checks/test_check.py` compares those of Transformers)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_a_classifier(load: Callable[..., Checkpoint], tmp_path: Path, precision: Any) -> None:
    model = load(tiny_classifier().state_dict()).build_model()
    assert 0 < largest_error(model, tmp_path, precision) < 1


# --- the mask


def spec_of(config: ModelConfig, role: str, precision: Precision = "float32") -> GraphSpec:
    (spec,) = [spec for spec in graph_contract.graphs_of(config, precision) if spec.role == role]
    return spec


@sizes_of_all_kinds
@both_sides
def test_what_lies_behind_the_length_changes_nothing(tiny_bundle: Path, role: Any, sizes: dict[str, int]) -> None:
    bundle = open_bundle(tiny_bundle)
    random = np.random.default_rng(5)
    given = random_inputs(spec_of(bundle.config, role), bundle.config, sizes, random)
    other = {name: tensor.copy() for name, tensor in given.items()}
    for row, length in enumerate(given["src_len"]):
        if role == "encoder":
            other["src_ids"][row, length:] = random.integers(0, bundle.config.src_vocab_size, sizes["src"] - length)
        for name in other:
            if name.startswith("cross."):
                other[name][row, :, length:] = 77.0
    for name in other:
        if name.startswith("past."):
            for row, position in enumerate(given["position"]):
                other[name][row, :, position:] = 77.0
    path = bundle.graph(role, "float32")
    before, after = run(path, given), run(path, other)
    if role == "decoder_step":
        np.testing.assert_array_equal(before[0], after[0])
        return
    for one, another in zip(before, after, strict=True):
        for row, length in enumerate(given["src_len"]):
            np.testing.assert_array_equal(one[row, :, :length], another[row, :, :length])


# --- arithmetic on shapes


def is_shape(name: str) -> bool:
    return name.startswith(contract.SHAPE_NODE)


@both_sides
def test_shape_nodes_depend_on_shapes_alone(half_bundle: Path, tmp_path: Path, role: Any) -> None:
    """Their values are the same whatever numbers the inputs hold, and they are integers."""
    bundle = open_bundle(half_bundle)
    spec = spec_of(bundle.config, role)
    model = onnx.load(bundle.graph(role, "float32"))
    outputs = [name for node in model.graph.node if is_shape(node.name) for name in node.output]
    assert outputs
    for name in outputs:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None))
    exposed = tmp_path / "exposed.onnx"
    onnx.save(model, exposed)
    random = np.random.default_rng(0)
    found = [run(exposed, random_inputs(spec, bundle.config, SIZES[1], random), outputs=outputs) for _ in range(3)]
    for one, *others in zip(*found, strict=True):
        assert one.dtype == np.int64
        assert one.size <= 4
        assert all(np.array_equal(one, other) for other in others)


@pytest.mark.parametrize("role", ["encoder", "decoder_step", "select_rows", "encoder.fp16"])
def test_no_node_that_computes_is_a_shape_node(half_bundle: Path, role: str) -> None:
    graph = onnx.load(half_bundle / f"{role}.onnx", load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL}
    inputs = {value.name for value in graph.input}
    for node in graph.node:
        if is_shape(node.name):
            assert node.op_type in ("Shape", "Squeeze", "Concat", "Div", "Add")
            assert not weights & set(node.input)
            assert node.op_type == "Shape" or not inputs & set(node.input)
    computing = {node.op_type for node in graph.node if not is_shape(node.name)}
    assert "Shape" not in computing
    assert "Gather" in computing  # of embeddings, or of rows
    if role != "select_rows":
        assert {"Attention", "MatMul", "LayerNormalization", "Add"} <= computing


@both_sides
def test_nodes_are_named_by_modules_of_the_model(tmp_path: Path, role: str) -> None:
    model = random_model(CONFIG.replace(position_offset=1, final_norm=True, embedding_scale=2.0))
    largest_error(model, tmp_path)
    modules = {name for name, _ in model.named_modules()}
    graph = onnx.load(tmp_path / f"{role}.onnx", load_external_data=False).graph
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)
    assert {name.rpartition("/")[0] for name in names} <= modules | {"shape", "mask", "output"}


@pytest.mark.thorough
def test_a_model_is_not_touched_by_its_export(tmp_path: Path) -> None:
    model = random_model(CONFIG)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    largest_error(model, tmp_path, "float16")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
