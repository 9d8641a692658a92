"""Graphs in the form that TensorRT builds compute what those of the bundle compute, and what PyTorch computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from makers.engine_bundles import different_outputs, write_bundle
from makers.ort_bundles import CONFIG, random_model
from tests.support.graph_checks import self_check
from tfexport import contract
from tfexport.contract import GraphSpec, Precision
from tfexport.exporter.engine_graphs import buildable_attention, longer_positions
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.weights import write_variant
from tfexport.graph_checks.session import session_of

half = pytest.mark.parametrize("precision", ["float16", "bfloat16"])
ROLES = ("encoder", "decoder_step")

KINDS: dict[str, dict[str, Any]] = {
    "heads of 20": {"d_model": 60},
    "heads of 9": {"d_model": 27, "positions": "learned", "position_offset": 2},
    "own heads of 5": {"d_model": 33, "d_head": 5, "norm_first": True},
    "relative positions": {"d_model": 36, "positions": "relative", "max_distance": 4},
}


def attentions_of(model: onnx.ModelProto) -> list[int]:
    """The types in which attention is computed."""
    known = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*known.value_info, *known.input, *known.output)}
    return [types[node.input[1]] for node in model.graph.node if node.op_type == "Attention"]


def masks_of(model: onnx.ModelProto) -> set[int]:
    """The types of the masks of attention."""
    known = onnx.shape_inference.infer_shapes(model).graph.value_info
    types = {value.name: value.type.tensor_type.elem_type for value in known}
    return {types[node.input[3]] for node in model.graph.node if node.op_type == "Attention"}


def written(folder: Path, precision: Precision, keep: tuple[str, ...] = (), **changes: Any) -> dict[str, GraphSpec]:
    """The graphs `ROLES` of a random model in this precision."""
    folder.mkdir(exist_ok=True)
    model = random_model(CONFIG.replace(**changes))
    write_variant(model, "float32", folder)
    write_variant(model, precision, folder, keep)
    graphs = write_graphs(model.config, precision, folder, keep, dialects=["onnx24"])
    return {graph.role: graph for graph in graphs if graph.role in ROLES}


def loaded(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


@pytest.mark.sampled(every=3)
@half
@pytest.mark.parametrize("kind", KINDS)
def test_every_output_has_the_same_bits(kind: str, precision: Precision, tmp_path: Path) -> None:
    bundle = write_bundle(random_model(CONFIG.replace(**KINDS[kind])), tmp_path / "bundle")
    assert list(different_outputs(bundle, precision, tmp_path / "engines")) == []


@pytest.mark.sampled(every=2)
@half
@pytest.mark.parametrize("kind", ["heads of 20", "heads of 9"])
def test_every_value_is_within_rounding_of_pytorchs(kind: str, precision: Precision, tmp_path: Path) -> None:
    graphs = written(tmp_path, precision, **KINDS[kind])
    for graph in graphs.values():
        model = loaded(tmp_path / graph.file)
        buildable_attention(model)
        onnx.save(model, tmp_path / graph.file)
    assert self_check(random_model(CONFIG.replace(**KINDS[kind])), list(graphs.values()), tmp_path) <= 1


@pytest.mark.parametrize(
    ("precision", "changes", "wanted"),
    [
        ("float16", {"d_model": 60}, {TensorProto.FLOAT16}),
        ("bfloat16", {"d_model": 60}, {TensorProto.BFLOAT16}),
        ("bfloat16", {"d_model": 33, "d_head": 7}, {TensorProto.BFLOAT16}),
        ("float32", {"d_model": 60}, {TensorProto.BOOL}),
        ("float16", {"d_model": 24}, {TensorProto.BOOL}),
    ],
)
def test_masks_are_numbers_where_heads_are_no_multiples_of_8_in_half_precision(
    precision: Precision, changes: dict[str, Any], wanted: set[int], tmp_path: Path
) -> None:
    for graph in written(tmp_path, precision, **changes).values():
        model = loaded(tmp_path / graph.file)
        before = len(model.graph.node)
        buildable_attention(model)
        assert masks_of(model) == wanted, graph.role
        most = 0 if TensorProto.BOOL in wanted else 2  # one for self-attention, one for cross-attention
        assert len(model.graph.node) - before <= most, "a mask that several layers have is made once"


@pytest.mark.parametrize("kind", ["heads of 20", "relative positions"])
def test_attention_that_stays_in_float32_is_written_out(kind: str, tmp_path: Path) -> None:
    kept = ("encoder.layers.0.self_attention", "decoder.layers.1.self_attention", "decoder.layers.0.cross_attention")
    graphs = written(tmp_path, "float16", keep=kept, **KINDS[kind])
    for graph in graphs.values():
        model = loaded(tmp_path / graph.file)
        before = attentions_of(model)
        buildable_attention(model)
        after = attentions_of(model)
        assert {TensorProto.FLOAT, TensorProto.FLOAT16} == set(before)
        assert list(after) == [dtype for dtype in before if dtype == TensorProto.FLOAT16]
        onnx.save(model, tmp_path / graph.file)
        onnx.checker.check_model(tmp_path / graph.file, full_check=True)
    model_of_it = random_model(CONFIG.replace(**KINDS[kind]))
    assert self_check(model_of_it, list(graphs.values()), tmp_path, kept) <= 1


@pytest.mark.parametrize("offset", [0, 2])
def test_sources_may_be_padded_beyond_the_positions(offset: int, tmp_path: Path) -> None:
    graph = written(tmp_path, "float32", position_offset=offset, max_source_length=9)["encoder"]
    model = loaded(tmp_path / graph.file)
    longer_positions(model, source=32)
    ids = np.random.default_rng(0).integers(4, CONFIG.src_vocab_size, (2, 9))
    lengths = np.array([9, 4])
    wanted = session_of(tmp_path / graph.file, tmp_path).run(None, {"src_ids": ids, "src_len": lengths})
    padded = np.pad(ids, ((0, 0), (0, 23)))
    found = session_of(model, tmp_path).run(None, {"src_ids": padded, "src_len": lengths})
    for before, after in zip(wanted, found, strict=True):
        assert after.shape[2] == 32
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(after[row, :, :length], before[row, :, :length], atol=1e-5)


def test_tables_that_are_long_enough_are_left_as_they_are(tmp_path: Path) -> None:
    graph = written(tmp_path, "float32", position_offset=2)["encoder"]
    model = loaded(tmp_path / graph.file)
    before = model.SerializeToString()
    longer_positions(model, source=CONFIG.max_source_length)
    buildable_attention(model)
    assert model.SerializeToString() == before
    longer_positions(model, source=CONFIG.max_source_length + 1)
    zeros = next(tensor for tensor in model.graph.initializer if tensor.name.endswith(".zeros"))
    assert list(zeros.dims) == [1, CONFIG.d_model]
    assert contract.weights_file("float32") not in str(zeros)
