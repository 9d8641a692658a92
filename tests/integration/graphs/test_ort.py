"""The graphs of the dialect `ort`: they compute what PyTorch computes, and leave nothing out that a model has."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from safetensors.numpy import load_file

from makers.ort_bundles import CONFIG, configs, outputs_of, random_model, session_of, write_graphs
from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.contract import GraphSpec
from tfexport.graph_checks.cases_ort import Case, case
from tfexport.models.transformer import Transformer

LARGEST_EMBEDDED = 16
"""Numbers of the largest tensor that may lie in a graph itself."""

Emitted = dict[str, onnx.GraphProto]
"""The graphs of a model by their roles, as they lie in their files."""


@pytest.fixture
def emit(tmp_path: Path) -> Callable[..., Emitted]:
    """Write the graphs of `CONFIG` with changes."""

    def write(**changes: Any) -> Emitted:
        model = random_model(CONFIG.replace(**changes))
        return {
            graph.role: onnx.load(tmp_path / graph.file, load_external_data=False).graph
            for graph in write_graphs(model, tmp_path)
        }

    return write


def nodes(graph: onnx.GraphProto, op_type: str = "", path: str = "") -> list[onnx.NodeProto]:
    """The nodes of a kind whose names begin so."""
    return [node for node in graph.node if node.op_type == (op_type or node.op_type) and node.name.startswith(path)]


def weights_behind(graph: onnx.GraphProto, value: str) -> list[str]:
    """The stored tensors that a value is, or is joined of."""
    makers = {output: node for node in graph.node for output in node.output}
    while value in makers and makers[value].op_type in ("Transpose", "Reshape", "Pad"):  # into blocks
        value = makers[value].input[0]
    if value not in makers:
        return [value]
    assert makers[value].op_type == "Concat"
    return list(makers[value].input)


def products(graph: onnx.GraphProto, path: str = "") -> list[onnx.NodeProto]:
    """The projections whose names begin so."""
    return [node for kind in ("Linear", "LinearRectified") for node in nodes(graph, kind, path)]


# --- what they compute


def largest_error(graph: GraphSpec, model: Transformer, checked: Case, found: dict[str, NDArray[Any]]) -> float:
    """The largest absolute difference, best tokens and caches included."""
    with torch.inference_mode():
        expected = {name: tensor.numpy() for name, tensor in checked.outputs(model).items()}
    errors = []
    if graph.role == "greedy_step":
        best = expected["logits"].max(axis=1, keepdims=True)  # of what is not banned
        errors.append(found["best.logits"] - best)
        errors.append(np.take_along_axis(expected["logits"], found["best.ids"], axis=1) - best)
    elif "logits" in expected:
        log_probs = torch.log_softmax(torch.from_numpy(expected["logits"]).double(), -1).numpy()
        best = -np.sort(-log_probs, axis=1)[:, : int(checked.inputs["count"][0])]
        assert found["best.ids"].shape == found["best.log_probs"].shape == best.shape
        errors.append(found["best.log_probs"] - best)
        errors.append(np.take_along_axis(log_probs, found["best.ids"], axis=1) - best)
        for ids in found["best.ids"]:
            assert len(set(ids.tolist())) == len(ids)
    for name in found.keys() & expected.keys():
        difference = found[name] - expected[name]
        if graph.step == "decoder_step" and name.startswith("present."):
            # Behind the filled slots the operator writes nothing.
            filled = np.arange(difference.shape[2]) <= checked.inputs["position"][:, None]
            difference = difference.swapaxes(1, 2)[filled]
        errors.append(difference)
    outputs = {tensor.name for tensor in graph.outputs}
    assert outputs == set(found)
    assert outputs - set(expected) <= {"best.log_probs", "best.logits", "best.ids"}
    return max(float(np.abs(error).max()) for error in errors)


def check_all(model: Transformer, *, seed: int) -> set[str]:
    """Every graph of `model` on random cases; returns the roles."""
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        graphs = write_graphs(model, folder)
        for graph in graphs:
            session = session_of(folder / graph.file)
            for _ in range(3):
                highest = {"batch": 5, "beam": 4, "src": 12, "cache": 9, "count": 8}
                sizes = {name: int(random.integers(1, most + 1)) for name, most in highest.items()}
                with torch.inference_mode():
                    checked = case(model, graph, sizes, random)
                found = outputs_of(session, checked.inputs)
                assert largest_error(graph, model, checked, found) < 1e-4, (graph.role, sizes)
    return {graph.role for graph in graphs}


@pytest.mark.thorough
@given(config=configs())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_every_graph_computes_what_pytorch_computes(config: ModelConfig) -> None:
    """Outputs alone, by NumPy. graph_checks/test_check.py holds every value of each kind of model."""
    roles = check_all(random_model(config, seed=config.d_ff), seed=config.d_model)
    assert roles == {"encoder", "beam_step"} | ({"decoder_step", "greedy_step"} if config.head_dim % 8 == 0 else set())


@pytest.mark.parametrize("role", ["decoder_step", "beam_step"])
def test_rows_of_one_batch_are_at_different_positions(tmp_path: Path, role: str) -> None:
    """Each row has the result that it has alone, at its own position."""
    model = random_model(CONFIG)
    (graph,) = [graph for graph in write_graphs(model, tmp_path) if graph.role == role]
    session = session_of(tmp_path / graph.file)
    sizes = {"batch": 4, "beam": 2, "src": 7, "cache": 12, "count": 3}
    with torch.inference_mode():
        inputs = case(model, graph, sizes, np.random.default_rng(3)).inputs
    position = np.array([2, 0, 11, 5], dtype=np.int32)
    inputs["position"] = position if role == "decoder_step" else np.stack([position, position[::-1]], axis=1)
    if role == "decoder_step":
        inputs["total"] = np.array([12], dtype=np.int32)
    together = outputs_of(session, inputs)["logits"].reshape(4, -1)
    single = {"total", "count"}
    for row in range(4):
        alone = {name: array if name in single else array[row : row + 1] for name, array in inputs.items()}
        if role == "decoder_step":
            alone["total"] = position[row : row + 1] + 1
        assert np.abs(outputs_of(session, alone)["logits"].ravel() - together[row]).max() < 1e-5
    moved = {**inputs, "position": np.roll(inputs["position"], 1, axis=0)}
    assert (np.abs(outputs_of(session, moved)["logits"].reshape(4, -1) - together).max(axis=1) > 1e-2).all()


@pytest.mark.parametrize("changes", [{}, {"n_heads": 2}])
def test_what_lies_in_a_hidden_slot_changes_no_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = random_model(CONFIG.replace(**changes))
    (graph,) = [graph for graph in write_graphs(model, tmp_path) if graph.role == "beam_step"]
    session = session_of(tmp_path / graph.file)
    random = np.random.default_rng(0)
    with torch.inference_mode():
        inputs = case(model, graph, {"batch": 3, "beam": 3, "src": 7, "cache": 9, "count": 3}, random).inputs
    slot = int(inputs["slot"][0])
    seen = inputs["mask"][:, 0].any(axis=1)  # [batch, cache]
    seen[:, slot : slot + 3] = True
    assert seen.all(axis=1).sum() == 0  # there is something to hide in every sentence
    clean = outputs_of(session, inputs)
    for garbage in (1e6, -1e30, 1e-38):
        changed = dict(inputs)
        for name in contract.cache_names(model.config, "past"):
            changed[name] = np.where(seen[:, None, :, None], inputs[name], np.float32(garbage))
        found = outputs_of(session, changed)
        for name in ("logits", "best.log_probs", "best.ids"):
            assert np.array_equal(found[name], clean[name]), (garbage, name)
    # A slot that one hypothesis sees and another does not: only the first may notice.
    rows = np.flatnonzero(inputs["mask"][0, 0, 0] & ~inputs["mask"][0, 0, 1])[:1]
    assert rows.size == 1
    changed = {**inputs, "past.1.value": inputs["past.1.value"].copy()}
    changed["past.1.value"][0, :, rows] = 100.0
    found = outputs_of(session, changed)["logits"]
    assert np.array_equal(found[1], clean["logits"][1])
    assert np.abs(found[0] - clean["logits"][0]).max() > 1e-3


def test_empty_slots_behind_a_row_are_not_read_by_a_greedy_step(tmp_path: Path) -> None:
    model = random_model(CONFIG)
    (graph,) = [graph for graph in write_graphs(model, tmp_path) if graph.role == "decoder_step"]
    session = session_of(tmp_path / graph.file)
    with torch.inference_mode():
        sizes = {"batch": 4, "beam": 1, "src": 7, "cache": 9, "count": 3}
        inputs = case(model, graph, sizes, np.random.default_rng(0)).inputs
    empty = np.arange(9) >= inputs["position"][:, None]  # the new slot is written over
    changed = dict(inputs)
    for name in contract.cache_names(model.config, "past"):
        changed[name] = np.where(empty[:, None, :, None], np.float32(np.nan), inputs[name])
    assert np.array_equal(outputs_of(session, inputs)["logits"], outputs_of(session, changed)["logits"])


@pytest.mark.parametrize("role", ["encoder", "decoder_step", "beam_step"])
def test_padding_of_sources_counts_for_nothing(tmp_path: Path, role: str) -> None:
    model = random_model(CONFIG)
    (graph,) = [graph for graph in write_graphs(model, tmp_path) if graph.role == role]
    session = session_of(tmp_path / graph.file)
    with torch.inference_mode():
        sizes = {"batch": 4, "beam": 2, "src": 9, "cache": 5, "count": 3}
        inputs = case(model, graph, sizes, np.random.default_rng(0)).inputs
    real = np.arange(9) < inputs["src_len"][:, None]
    assert not real.all()
    changed = dict(inputs)
    if role == "encoder":
        changed["src_ids"] = np.where(real, inputs["src_ids"], 30)
    else:
        for name in contract.cache_names(model.config, "cross"):
            changed[name] = np.where(real[:, None, :, None], inputs[name], np.float32(1e9))
    results = []
    for given_inputs in (inputs, changed):
        found = outputs_of(session, given_inputs)
        results.append(found["cross"].swapaxes(2, 3)[:, real] if role == "encoder" else found["logits"])
    assert np.array_equal(*results)


# --- what they consist of


def test_there_is_a_greedy_graph_only_where_heads_are_a_multiple_of_8(emit: Callable[..., Emitted]) -> None:
    for heads, has_one in ((3, True), (1, True), (2, False), (6, False), (24, False)):
        graphs = emit(n_heads=heads)
        assert set(graphs) == {"encoder", "beam_step"} | ({"decoder_step", "greedy_step"} if has_one else set())
        for role, graph in graphs.items():
            found = nodes(graph, "GroupQueryAttention")
            assert [node.name.rpartition("/")[0] for node in found] == (
                [f"decoder.layers.{i}.self_attention" for i in range(2)]
                if role in ("decoder_step", "greedy_step")
                else []
            )


def test_keys_and_values_of_the_cache_are_written_where_they_lie(emit: Callable[..., Emitted]) -> None:
    graphs = emit()
    names = zip(contract.cache_names(CONFIG, "past"), contract.cache_names(CONFIG, "present"), strict=True)
    written = dict(names)
    greedy = nodes(graphs["decoder_step"], "GroupQueryAttention")
    found = [dict(zip(node.input[3:5], node.output[1:3], strict=True)) for node in greedy]
    assert {**found[0], **found[1]} == written
    scatters = nodes(graphs["beam_step"], "TensorScatter")
    assert {node.input[0]: node.output[0] for node in scatters} == written
    assert {node.input[2] for node in scatters} == {"slot"}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("changes", "with_bias"),
    [
        ({}, {"attention", "feed_forward"}),
        ({"attention_bias": False}, {"feed_forward"}),
        ({"feed_forward_bias": False}, {"attention"}),
        ({"output_bias": True}, {"attention", "feed_forward", "output"}),
        ({"attention_bias": False, "feed_forward_bias": False}, set()),
    ],
)
def test_a_projection_has_a_bias_where_the_model_has_one(
    emit: Callable[..., Emitted], changes: dict[str, Any], with_bias: set[str]
) -> None:
    kinds = Counter()
    for graph in emit(**changes).values():
        for node in products(graph):
            module = node.name.rpartition("/")[0]
            kind = next((kind for kind in ("feed_forward", "attention") if kind in module), module)
            kind = "attention" if kind == "cross" else kind
            weights = weights_behind(graph, node.input[1])
            if kind in with_bias:
                expected = [name.removesuffix("weight") + "bias" for name in weights]
                assert weights_behind(graph, node.input[2]) == (["output_bias"] if module == "output" else expected)
            else:
                (zeros,) = (other for other in graph.node if node.input[2] in other.output)
                assert zeros.op_type == "Expand", node.name
            kinds[kind] += 1
    # Encoder: 4 and 2 a layer, and cross. Each of the three steps: 4 and 2 a layer, and the output.
    assert kinds == {"attention": 8 + 1 + 3 * 8, "feed_forward": 4 + 3 * 4, "output": 3}
    names = {tensor.name for graph in emit(**changes).values() for tensor in graph.initializer}
    assert any("attention" in name and name.endswith(".bias") for name in names) == ("attention" in with_bias)


def test_projections_are_joined_and_nothing_else(emit: Callable[..., Emitted]) -> None:
    graphs = emit()
    (cross,) = products(graphs["encoder"], "cross/")
    parts = [f"decoder.layers.{i}.cross_attention.{part}.weight" for i in range(2) for part in ("key", "value")]
    assert weights_behind(graphs["encoder"], cross.input[1]) == parts
    for role in ("decoder_step", "beam_step"):
        for node in products(graphs[role]):
            module = node.name.rpartition("/")[0]
            found = weights_behind(graphs[role], node.input[1])
            if module.endswith("query_key_value"):
                own = module.removesuffix("query_key_value")
                assert found == [f"{own}{part}.weight" for part in ("query", "key", "value")]
            else:
                assert found == (["output_weight"] if module == "output" else [f"{module}.weight"])


@pytest.mark.parametrize(
    ("tied", "embeddings", "output"),
    [
        ({}, "decoder.tokens.weight", "output_weight"),
        ({"tie_output": True}, "decoder.tokens.weight", "decoder.tokens.weight"),
        ({"tgt_vocab_size": 31, "tie_source_target": True}, "encoder.tokens.weight", "output_weight"),
        (
            {"tgt_vocab_size": 31, "tie_source_target": True, "tie_output": True},
            "encoder.tokens.weight",
            "encoder.tokens.weight",
        ),
    ],
)
def test_tied_matrices_are_one_initializer(
    emit: Callable[..., Emitted], tied: dict[str, Any], embeddings: str, output: str
) -> None:
    for role, graph in emit(**tied).items():
        tables = [node.input[0] for node in nodes(graph, "Gather") if node.name.endswith(tuple("0123456789"))]
        used = {name for name in tables if name.endswith("tokens.weight")}
        assert used == {"encoder.tokens.weight" if role == "encoder" else embeddings}
        if role != "encoder":
            (projection,) = products(graph, "output/")
            assert weights_behind(graph, projection.input[1]) == [output]


@pytest.mark.parametrize("scale", [1.0, 24**0.5, 0.5])
def test_embeddings_are_scaled_where_the_model_scales_them(emit: Callable[..., Emitted], scale: float) -> None:
    for role, graph in emit(embedding_scale=scale).items():
        found = nodes(graph, "Mul")
        assert len(found) == (scale != 1.0)
        for node in found:
            side = "encoder" if role == "encoder" else "decoder"
            assert node.name.startswith(f"{side}.tokens/")
            (factor,) = [tensor for tensor in graph.initializer if tensor.name in node.input]
            assert numpy_helper.to_array(factor) == np.float32(scale)


@pytest.mark.parametrize("offset", [0, 2])
def test_positions_are_shifted_where_the_model_shifts_them(emit: Callable[..., Emitted], offset: int) -> None:
    for role, graph in emit(position_offset=offset).items():
        (position,) = [
            node for node in graph.node if node.input and node.input[0].endswith("positions.table")
        ]  # Slice of the table, or Gather
        given_ = position.input[2 if position.op_type == "Slice" else 1]
        makers = [node for node in nodes(graph, "Add") if given_ in node.output]
        assert len(makers) == (offset > 0)
        if role != "encoder" and not offset:
            assert given_ == "position"


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("norm_first", "final_norm", "shared_norm"), [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
)
def test_norms_are_those_of_the_model(
    emit: Callable[..., Emitted], norm_first: bool, final_norm: bool, shared_norm: bool
) -> None:
    changes = {"norm_first": bool(norm_first), "final_norm": bool(final_norm), "shared_norm": bool(shared_norm)}
    for role, graph in emit(**changes, norm_eps=0.125).items():
        side, sublayers = ("encoder", 2) if role == "encoder" else ("decoder", 3)
        wanted = [f"{side}.layers.{i}.norms.{0 if shared_norm else k}" for i in range(2) for k in range(sublayers)]
        wanted += [f"{side}.norm"] * bool(final_norm)
        found = [node for node in graph.node if node.op_type in ("LayerNormalization", "ResidualNorm")]
        assert [node.name.rpartition("/")[0] for node in found] == wanted
        for node, path in zip(found, wanted, strict=True):
            weights = [f"{path}.weight", f"{path}.bias"]
            if node.op_type == "ResidualNorm":
                assert list(node.input[2:]) == weights
                assert {a.name: a.f for a in node.attribute} == {"epsilon": 0.125}
                continue
            assert list(node.input[1:]) == weights
            assert {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} == {
                "axis": -1,
                "epsilon": 0.125,
            }
        alone = [node.op_type for node in found].count("LayerNormalization")
        assert alone == (1 if norm_first else bool(final_norm))  # the first, or the last, follows no sum


def operators_as_run(path: Path, folder: Path) -> Counter[str]:
    """What ONNX Runtime makes of a graph when it loads it."""
    optimized = folder / "optimized.onnx"
    session_of(path, optimized_model_filepath=str(optimized))
    return Counter(node.op_type for node in onnx.load(optimized, load_external_data=False).graph.node)


@pytest.mark.thorough
def test_relu_becomes_a_part_of_a_product_and_gelu_does_not(emit: Callable[..., Emitted], tmp_path: Path) -> None:
    for activation in ("relu", "gelu"):
        for role, graph in emit(activation=activation).items():
            found = Counter(node.op_type for node in graph.node)
            assert (found["LinearRectified"], found["Gelu"]) == ((2, 0) if activation == "relu" else (0, 2))
            assert found["Relu"] == 0
            run = operators_as_run(tmp_path / f"{role}.ort.onnx", tmp_path)  # without kernels
            assert run["Relu"] == 0
            assert run["FusedGemm"] == (2 if activation == "relu" else 0)
            assert run["Gemm"] == found["Linear"] + found["LinearRectified"] - run["FusedGemm"]


def test_joined_weights_are_joined_once_when_the_graph_is_loaded(emit: Callable[..., Emitted], tmp_path: Path) -> None:
    """One Concat of a source's shape may stay: what is joined of weights is a constant."""
    for role, graph in emit().items():
        makers = {output for node in graph.node for output in node.output}
        of_weights = [node for node in nodes(graph, "Concat") if not set(node.input) & makers]
        assert len(of_weights) == (2 if role == "encoder" else 4)  # weights and biases of each joined projection
        run = operators_as_run(tmp_path / f"{role}.ort.onnx", tmp_path)
        of_functions = role == "greedy_step"  # in the definition of BestToken
        assert run["Concat"] == len(nodes(graph, "Concat")) - len(of_weights) + of_functions


def test_nodes_are_named_by_their_modules(emit: Callable[..., Emitted]) -> None:
    modules = {name for name, _ in random_model(CONFIG).named_modules()}
    joined = {"cross", "output", *(f"decoder.layers.{i}.self_attention.query_key_value" for i in range(2))}
    for role, graph in emit(embedding_scale=2.0, position_offset=1, final_norm=True).items():
        names = [node.name for node in graph.node]
        assert len(set(names)) == len(names)
        paths = {name.rpartition("/")[0] for name in names} - {"", "shape"}
        assert paths <= modules | joined
        side = "encoder" if role == "encoder" else "decoder"
        parts = ["norms.0", "norms.1", "feed_forward.hidden", "feed_forward.output"]
        parts += ["self_attention.output", "self_attention.query" if side == "encoder" else "cross_attention.query"]
        wanted = {f"{side}.layers.{i}.{part}" for i in range(2) for part in parts}
        assert {*wanted, f"{side}.norm", f"{side}.tokens", "output" if side == "decoder" else "cross"} <= paths
        assert not [node.name for node in graph.node if node.doc_string or node.metadata_props]


def test_weights_are_pointed_at_and_all_are_used(tmp_path: Path) -> None:
    model = random_model(CONFIG.replace(output_bias=True, feed_forward="conv1d", final_norm=True, position_offset=2))
    used = set()
    file = tmp_path / "weights.safetensors"
    for spec in write_graphs(model, tmp_path):
        path = tmp_path / spec.file
        assert path.stat().st_size < 40_000
        graph = onnx.load(path, load_external_data=False).graph
        raw, weights = file.read_bytes(), load_file(file)
        for tensor in graph.initializer:
            if tensor.data_location != TensorProto.EXTERNAL:
                assert np.prod(tensor.dims) <= LARGEST_EMBEDDED
                assert tensor.name.startswith("constant.")
                continue
            place = {entry.key: entry.value for entry in tensor.external_data}
            begin, length = int(place["offset"]), int(place["length"])
            assert place["location"] == file.name
            assert raw[begin : begin + length] == weights[tensor.name].tobytes()
            shape = weights[tensor.name].shape
            assert tuple(tensor.dims) == (shape[:2] if len(shape) == 3 else shape)
            used.add(tensor.name)
    assert used == set(model.state_dict())


def test_no_constant_is_infinite_and_what_hides_stays_finite_with_a_score_added(emit: Callable[..., Emitted]) -> None:
    for role, graph in emit().items():
        constants = [numpy_helper.to_array(t) for t in graph.initializer if t.data_location != TensorProto.EXTERNAL]
        floats = [array for array in constants if array.dtype.kind == "f"]
        assert all(np.isfinite(array).all() for array in floats)
        assert bool([array for array in floats if array.min() < -1e30]) == (role == "beam_step")
        for node in nodes(graph, "MultiHeadAttention"):
            hidden = {a.name: a.f for a in node.attribute}["mask_filter_value"]
            assert -np.finfo(np.float32).max < hidden + -1e30 < -1e38


def test_a_model_whose_beams_see_nothing_gives_numbers(tmp_path: Path) -> None:
    """A row of a mask that hides all, as no search makes it: still no NaN."""
    model = random_model(CONFIG)
    (graph,) = [graph for graph in write_graphs(model, tmp_path) if graph.role == "beam_step"]
    with torch.inference_mode():
        sizes = {"batch": 2, "beam": 2, "src": 3, "cache": 4, "count": 3}
        inputs = case(model, graph, sizes, np.random.default_rng(0)).inputs
    found = outputs_of(session_of(tmp_path / graph.file), {**inputs, "mask": np.zeros_like(inputs["mask"])})
    assert all(np.isfinite(array).all() for array in found.values())


# --- the cases that graphs are checked with


def test_cases_find_a_step_that_reads_another_hypothesis_past(tmp_path: Path) -> None:
    """The reference of a beam's case is built from each hypothesis' own slots: a moved mask must show."""
    model = random_model(CONFIG)
    (graph,) = [graph for graph in write_graphs(model, tmp_path) if graph.role == "beam_step"]
    session = session_of(tmp_path / graph.file)
    random = np.random.default_rng(1)
    with torch.inference_mode():
        checked = case(model, graph, {"batch": 2, "beam": 3, "src": 5, "cache": 9, "count": 3}, random)
    assert 0 < int(checked.inputs["position"][0, 0]) < int(checked.inputs["slot"][0])
    assert largest_error(graph, model, checked, outputs_of(session, checked.inputs)) < 1e-4
    other = {**checked.inputs, "mask": np.roll(checked.inputs["mask"], 1, axis=2)}
    assert largest_error(graph, model, checked, outputs_of(session, other)) > 1e-2
