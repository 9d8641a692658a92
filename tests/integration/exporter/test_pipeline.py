"""The graphs: what they are made of, that they hold no weights, and that a wrong one is not exported."""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file

from makers.tiny import BOS, EOS, HEADS, HINTS, PAD, SRC_VOCAB, TinyCheckpoint, tiny_classifier, tiny_transformer
from tests.support.graph_checks import self_check
from tfexport import __version__, contract, graph_contract
from tfexport.bundle.reader import open_bundle
from tfexport.contract import GraphSpec
from tfexport.dialects import DIALECTS
from tfexport.errors import BundleError, TfexportError
from tfexport.exporter.graphs import emit
from tfexport.exporter.pipeline import Exported, export
from tfexport.graph_checks.check import Compared, GraphCheck, check_graph
from tfexport.graph_checks.definition import Definition
from tfexport.graph_checks.gate import GraphGate
from tfexport.graphs.projections import PARTS, STACKED
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.runtimes import RUNTIMES, load_runtime
from tfexport.search.search import SearchOptions, search
from tfexport.verification.parity import check

DTYPES = {
    TensorProto.INT64: "int64",
    TensorProto.INT32: "int32",
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "uint8",
    TensorProto.BOOL: "bool",
    TensorProto.DOUBLE: "float64",
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
}
LARGEST_EMBEDDED = 64
"""Numbers of the largest tensor that may lie in a graph itself."""

VARIANTS = [f"{role}{precision}.onnx" for role in ("encoder", "decoder_step") for precision in ("", ".fp16", ".bf16")]
FILES = [
    *VARIANTS,
    *(f"{role}{precision}.onnx" for role in graph_contract.WITHOUT_MODULES for precision in ("", ".fp16", ".bf16")),
    "encoder_classifier.onnx",
]
ORT_FILES = [
    f"{role}{precision}.ort.onnx"
    for role in ("encoder", "decoder_step", "beam_step", "greedy_step")
    for precision in ("", ".int8", ".int4")
]
"""`graphs/test_ort.py` tests what they consist of."""
CUDA_FILES = [
    f"{role}{precision}.ort-cuda.onnx"
    for role in ("encoder", "decoder_step", "beam_step")
    for precision in ("", ".fp16", ".bf16")
]


@pytest.fixture(params=[*FILES, *ORT_FILES, *CUDA_FILES])
def path(request: pytest.FixtureRequest) -> Path:
    """A graph of each kind."""
    bundle = "classifier_bundle" if "classifier" in request.param else "tiny_bundle"
    if "fp16" in request.param or "bf16" in request.param:
        bundle = "half_bundle"
    if "int8" in request.param or "int4" in request.param:
        bundle = "quantized_bundle"
    return request.getfixturevalue(bundle) / request.param


standard = pytest.mark.parametrize("path", FILES, indirect=True)
"""Only the graphs of standard operators."""


@pytest.fixture
def spec(path: Path) -> GraphSpec:
    """What the contract says of it."""
    config = open_bundle(path.parent).config
    dialects: tuple[Any, ...] = tuple(DIALECTS)
    specs = [
        spec
        for precision in contract.PRECISIONS.values()
        for dialect in dialects
        for spec in graph_contract.graphs_of(config, precision, dialect)
    ]
    (found,) = [spec for spec in specs if spec.file == path.name]
    return found


@pytest.fixture
def graph(path: Path) -> onnx.GraphProto:
    """The graph as it lies in its file: what is stored outside is not read."""
    return onnx.load(path, load_external_data=False).graph


def constants(graph: onnx.GraphProto) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """All tensors that lie in the graph's own file."""
    for tensor in graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            yield tensor.name, numpy_helper.to_array(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            assert not attribute.HasField("g"), f"{node.name} holds a graph, which these tests do not look into"
            if attribute.HasField("t"):
                yield node.name, numpy_helper.to_array(attribute.t)
            elif attribute.type in (onnx.AttributeProto.FLOAT, onnx.AttributeProto.FLOATS):
                yield node.name, np.array([attribute.f, *attribute.floats])


def external(graph: onnx.GraphProto) -> dict[str, dict[str, str]]:
    """Where the tensors outside the graph's file lie."""
    return {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL
    }


# --- the graphs


@pytest.mark.sampled(every=4)
def test_graph_is_valid(path: Path) -> None:
    onnx.checker.check_model(path, full_check=True)


def test_there_is_a_graph_of_every_role_precision_and_dialect(
    half_bundle: Path, quantized_bundle: Path, classifier_bundle: Path
) -> None:
    folders = (half_bundle, quantized_bundle, classifier_bundle)
    found = {path.name for folder in folders for path in folder.glob("*.onnx")}
    assert found == {*FILES, *ORT_FILES, *CUDA_FILES}


def test_inputs_and_outputs_are_the_contract_s(path: Path, graph: onnx.GraphProto, spec: GraphSpec) -> None:
    config = open_bundle(path.parent).config
    for values, tensors in ((graph.input, spec.inputs), (graph.output, spec.outputs)):
        found = [
            (
                value.name,
                DTYPES[value.type.tensor_type.elem_type],
                [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim],
            )
            for value in values
        ]
        assert found == [(tensor.name, tensor.dtype, contract.shape(tensor, config)) for tensor in tensors]
    assert graph.name == spec.role


@standard
def test_only_standard_operators_are_used(path: Path, graph: onnx.GraphProto) -> None:
    model = onnx.load(path, load_external_data=False)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)]
    assert not model.functions
    assert {node.domain for node in graph.node} == {""}
    assert (model.producer_name, model.producer_version) == ("tfexport", __version__)


@standard
def test_attention_is_one_operator_and_the_cache_is_written_in_place(graph: onnx.GraphProto, spec: GraphSpec) -> None:
    count = 0 if spec.role in graph_contract.WITHOUT_MODULES else 2  # 2 encoder layers; self and cross
    attentions = [node for node in graph.node if node.op_type == "Attention"]
    assert len(attentions) == count
    for node in attentions:
        given = [index for index, name in enumerate(node.input) if name]
        assert given == ([0, 1, 2, 3] if spec.dialect == "onnx24" else [0, 1, 2, 6])  # a mask, or lengths
        assert len(node.output) == 1
    scatters = [node for node in graph.node if node.op_type == "TensorScatter"]
    written = {f"past.0.{part}": f"present.0.{part}" for part in ("key", "value") if spec.role == "decoder_step"}
    assert {node.input[0]: node.output[0] for node in scatters} == written
    assert not [node.name for node in graph.node if node.op_type in ("Softmax", "Where", "ScatterND")]


@standard
def test_masks_are_not_numbers(graph: onnx.GraphProto) -> None:
    """No infinity and no -1e9 that would stand for it: what is hidden is hidden by a bool."""
    for name, values in constants(graph):
        if values.dtype.kind not in "biu":
            assert np.isfinite(values.astype(np.float32)).all(), name
            assert (np.abs(values.astype(np.float32)) < 1000).all(), name


def test_graph_holds_no_weights(path: Path, graph: onnx.GraphProto) -> None:
    for name, values in constants(graph):
        assert values.size <= LARGEST_EMBEDDED, name
    assert path.stat().st_size < 40_000
    assert {path.suffix for path in path.parent.iterdir()} == {".onnx", ".safetensors", ".json"}


def test_weights_are_those_of_the_files(path: Path, graph: onnx.GraphProto, spec: GraphSpec) -> None:
    """Each precision has one of its own; what int8 and int4 leave in float32 is in that of float32."""
    files = {contract.weights_file(spec.precision)}
    if spec.precision in contract.QUANTIZED:
        files.add("weights.safetensors")
    raw = {file: (path.parent / file).read_bytes() for file in files}
    weights = {file: load_torch_file(path.parent / file) for file in files}
    places = external(graph)
    assert {place["location"] for place in places.values()} == (
        set() if spec.role in graph_contract.WITHOUT_MODULES else files
    )
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for name, place in places.items():
        begin, length = int(place["offset"]), int(place["length"])
        tensor = stored_tensor(weights[place["location"]], name).contiguous()
        stored = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor
        assert raw[place["location"]][begin : begin + length] == stored.numpy().tobytes()
        assert tuple(tensors[name].dims) == tensor.shape
        assert DTYPES[tensors[name].data_type] == str(tensor.dtype).removeprefix("torch.")


def stored_tensor(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A tensor of a weights file; those of query, key and value may be one."""
    if name in weights:
        return weights[name]
    module, kind = name.rsplit(".", 1)
    path, part = module.rsplit(".", 1)
    return weights[f"{path}.{STACKED}.{kind}"].chunk(len(PARTS))[PARTS.index(part)]


def parts(names: Iterable[str]) -> set[str]:
    """`names` with those of query, key and value for the tensor that is all three."""
    return {name.replace(STACKED, part) for name in names for part in PARTS}


@pytest.mark.parametrize("bundle", ["half_bundle", "classifier_bundle"])
def test_every_weight_is_used_by_the_graphs_of_a_dialect(bundle: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(bundle)
    used = weights_used(folder)
    assert len(used) == (1 if bundle == "classifier_bundle" else 7)
    for (precision, dialect), names in used.items():
        stored = set(load_torch_file(folder / contract.weights_file(precision)))
        assert parts(names) == parts(stored)
        # Only float32 has the three weights of self-attention apart.
        assert (dialect != "ort-cuda") or names == stored


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_graphs_use_every_quantized_matrix_and_of_float32_only_the_rest(
    quantized_bundle: Path, precision: Any
) -> None:
    names = weights_used(quantized_bundle)[precision, "ort"]
    exact = load_torch_file(quantized_bundle / "weights.safetensors")
    rounded = load_torch_file(quantized_bundle / contract.weights_file(precision))
    assert set(rounded) <= names
    rest = {name for name, tensor in exact.items() if tensor.dim() == 1 or ".tokens." in name or ".positions." in name}
    assert names - set(rounded) == rest
    assert {str(tensor.dtype) for name, tensor in rounded.items() if name.endswith((".int8", ".int4"))} == {
        "torch.int8" if precision == "int8" else "torch.uint8"
    }


def weights_used(folder: Path) -> dict[tuple[str, str], set[str]]:
    """The stored tensors that the graphs of a precision and dialect point to."""
    used: dict[tuple[str, str], set[str]] = {}
    for graph in open_bundle(folder).graphs:
        names = external(onnx.load(folder / graph.file, load_external_data=False).graph)
        used.setdefault((graph.precision, graph.dialect), set()).update(names)
    return used


@standard
def test_nodes_are_named_by_their_modules(path: Path, graph: onnx.GraphProto, spec: GraphSpec) -> None:
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)
    model = open_bundle(path.parent).config
    side = "decoder" if spec.role == "decoder_step" else "encoder"
    modules = {name.rpartition("/")[0] for name in names}
    layers = model.n_decoder_layers if side == "decoder" else model.n_encoder_layers
    parts = ["self_attention.query", "self_attention.output", "feed_forward.hidden", "norms.0", "norms.1"]
    parts += ["cross_attention.query", "norms.2"] * (side == "decoder")
    if spec.role not in graph_contract.WITHOUT_MODULES:
        assert {f"{side}.layers.{layer}.{part}" for layer in range(layers) for part in parts} <= modules
    for node in graph.node:  # the exporter's own notes name files of the machine that exported
        assert not node.metadata_props
        assert not node.doc_string


@pytest.mark.thorough
def test_export_is_the_same_in_another_process(
    tiny_bundle: Path, command_export: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    folder, done = command_export
    assert done.returncode == 0, done.stderr
    for path in tiny_bundle.iterdir():
        other = folder / "tiny" / path.name
        if path.name == "manifest.json":  # which tells where vocabularies were read, if a command read them
            one, another = (json.loads(file.read_text(encoding="utf-8")) for file in (path, other))
            assert another["source"].pop("text").keys() == {"src_vocab", "tgt_vocab"}
            assert one["source"].pop("text") == {}
            assert json.dumps(one) == json.dumps(another)
        else:
            assert path.read_bytes() == other.read_bytes(), path.name


# --- the self-check


@pytest.fixture
def altered_export(tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Run `export` with a change to one of its graphs, as a fault of the lines that emit it would make it.

    The other graphs are not checked, which takes most of the time of an export, unless `check_all` is given.
    """

    def run(
        change: Callable[[onnx.GraphProto], None],
        file: str,
        directory: Path,
        *,
        check_all: bool = False,
        **options: Any,
    ) -> Exported:
        def emit_altered(spec: GraphSpec, *arguments: Any) -> ir.Model:
            emitted = emit(spec, *arguments)
            if spec.file != file:
                return emitted
            proto = ir.to_proto(emitted)
            change(proto.graph)
            return ir.from_proto(proto)

        def check_altered(definition: Definition, spec: GraphSpec, *arguments: Any, **more: Any) -> GraphCheck:
            if check_all or spec.file == file:
                return check_graph(definition, spec, *arguments, **more)
            return GraphCheck(spec.file, (Compared("node", "about", 0.0, 0.0, 1.0),))

        monkeypatch.setattr("tfexport.exporter.graphs.emit", emit_altered)
        monkeypatch.setattr("tfexport.graph_checks.gate.check_graph", check_altered)
        return export(tiny_checkpoint.load(), directory, **options)

    return run


def other_weight(graph: onnx.GraphProto) -> None:
    """Two biases of one size change places."""
    tensors = {tensor.name.rpartition("layers.")[2]: tensor for tensor in graph.initializer}
    one, other = tensors["0.self_attention.query.bias"], tensors["0.self_attention.output.bias"]
    one_place, other_place = list(one.external_data), list(other.external_data)
    del one.external_data[:], other.external_data[:]
    one.external_data.extend(other_place)
    other.external_data.extend(one_place)


def other_operator(graph: onnx.GraphProto) -> None:
    other = {"Relu": "Tanh", "LinearRectified": "Linear", "Int8LinearRectified": "Int8Linear"}
    node = next(node for node in graph.node if node.op_type in other)
    node.op_type = other[node.op_type]


def other_epsilon(graph: onnx.GraphProto) -> None:
    norm = next(node for node in graph.node if node.op_type in ("LayerNormalization", "ResidualNorm"))
    next(attribute for attribute in norm.attribute if attribute.name == "epsilon").f = 0.01


def swapped_operands(graph: onnx.GraphProto) -> None:
    attention = next(node for node in graph.node if node.op_type in ("Attention", "MultiHeadAttention"))
    attention.input[1], attention.input[2] = attention.input[2], attention.input[1]


def no_number(graph: onnx.GraphProto) -> None:
    """The last output becomes NaN: a comparison that only looks for large errors would let it pass."""
    output = graph.output[-1].name
    node = next(node for node in graph.node if output in node.output)
    node.output[list(node.output).index(output)] = "before"
    for reader in graph.node:
        for index, name in enumerate(reader.input):
            if name == output:
                reader.input[index] = "before"
    dtype = np.float16 if graph.output[-1].type.tensor_type.elem_type == TensorProto.FLOAT16 else np.float32
    graph.initializer.append(numpy_helper.from_array(np.array(math.nan, dtype=dtype), "nan"))
    graph.node.append(onnx.helper.make_node("Add", ["before", "nan"], [output], name="poison"))


CHANGES = [other_weight, other_operator, other_epsilon, swapped_operands, no_number]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("role", ["encoder", "decoder_step"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_that_computes_something_else_is_not_exported(
    altered_export: Callable, tmp_path: Path, change: Callable[[onnx.GraphProto], None], role: str
) -> None:
    with pytest.raises(TfexportError, match=rf"{role}\.onnx departs from PyTorch at .* so nothing was exported"):
        altered_export(change, f"{role}.onnx", tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("change", [other_weight, other_operator, swapped_operands, no_number])
def test_a_half_precision_graph_that_computes_something_else_is_not_exported(
    altered_export: Callable, tmp_path: Path, change: Callable[[onnx.GraphProto], None]
) -> None:
    message = (
        r"decoder_step\.fp16\.onnx departs from PyTorch at .* so nothing was exported\. .* export in fp32, or in bf16"
    )
    with pytest.raises(TfexportError, match=message):
        altered_export(change, "decoder_step.fp16.onnx", tmp_path / "bundle", precisions=("float16",))
    assert list(tmp_path.iterdir()) == []


def other_mask(graph: onnx.GraphProto) -> None:
    """What is seen is hidden, and the other way round."""
    where = next(node for node in graph.node if node.op_type == "Where")
    where.input[1], where.input[2] = where.input[2], where.input[1]


def other_slot(graph: onnx.GraphProto) -> None:
    """Keys go where those of other hypotheses lie."""
    graph.node.insert(0, onnx.helper.make_node("Sub", ["slot", "slot"], ["first"], name="first"))
    next(node for node in graph.node if node.op_type == "TensorScatter").input[2] = "first"


def other_positions(graph: onnx.GraphProto) -> None:
    """Every row is given the first position."""
    position = next(node for node in graph.node if node.input[0] == "decoder.positions.table")
    graph.node.insert(0, onnx.helper.make_node("Sub", ["position", "position"], ["nowhere"], name="nowhere"))
    position.input[1] = "nowhere"


def one_best(graph: onnx.GraphProto) -> None:
    """One best token is told, however many are asked for."""
    graph.initializer.append(numpy_helper.from_array(np.array([1], dtype=np.int64), "only"))
    next(node for node in graph.node if node.op_type == "BestTokens").input[1] = "only"


def other_lengths(graph: onnx.GraphProto) -> None:
    """Attention is not told how long sources are."""
    for node in graph.node:
        if node.op_type == "MultiHeadAttention" and "src_len" in node.input:
            node.input[list(node.input).index("src_len")] = ""


ORT_CHANGES = [
    *((change, role) for change in CHANGES for role in ("encoder", "decoder_step", "beam_step")),
    *((other_mask, "beam_step"), (other_slot, "beam_step")),
    *((change, role) for change in (other_positions, one_best) for role in ("decoder_step", "beam_step")),
    *((other_lengths, role) for role in ("encoder", "decoder_step", "beam_step")),
]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("change", "role"), ORT_CHANGES)
def test_an_emitted_graph_that_computes_something_else_is_not_exported(
    altered_export: Callable, tmp_path: Path, change: Callable[[onnx.GraphProto], None], role: str
) -> None:
    with pytest.raises(TfexportError, match=rf"{role}\.ort\.onnx departs from PyTorch at .* nothing was exported"):
        altered_export(change, f"{role}.ort.onnx", tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def other_scale(graph: onnx.GraphProto) -> None:
    """A projection is given the scales of another one of its size."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    side = next(name.split(".")[0] for name in tensors if ".layers." in name)
    one, other = (f"{side}.layers.0.{part}.scale" for part in ("self_attention.output", "feed_forward.output"))
    if tensors[one].dims != tensors[other].dims:
        other = next(name for name in tensors if name.endswith("query.scale"))
    place = list(tensors[other].external_data)
    del tensors[one].external_data[:]
    tensors[one].external_data.extend(place)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize(
    ("change", "role"),
    [
        *((change, "encoder") for change in (other_operator, other_lengths, other_scale)),
        *(
            (change, role)
            for change in (swapped_operands, no_number)
            for role in ("encoder", "decoder_step", "beam_step")
        ),
        (other_mask, "beam_step"),
    ],
)
def test_a_quantized_graph_that_computes_something_else_is_not_exported(
    altered_export: Callable, tmp_path: Path, change: Callable[[onnx.GraphProto], None], role: str, precision: Any
) -> None:
    with pytest.raises(TfexportError, match=rf"{role}\.{precision}\.ort\.onnx departs .* nothing was exported"):
        altered_export(change, f"{role}.{precision}.ort.onnx", tmp_path / "bundle", precisions=(precision,))
    assert list(tmp_path.iterdir()) == []


def row_before(graph: onnx.GraphProto) -> None:
    """The row before the one that the index names; before the first is the last."""
    gather = graph.node[-1]
    assert gather.op_type == "Gather"
    graph.initializer.append(numpy_helper.from_array(np.array(1, dtype=np.int64), "one"))
    graph.node.insert(len(graph.node) - 1, onnx.helper.make_node("Sub", [gather.input[1], "one"], ["before"]))
    graph.node[-1].input[1] = "before"


def test_rows_that_are_selected_wrongly_are_found(altered_export: Callable, tmp_path: Path) -> None:
    with pytest.raises(TfexportError, match=r"select_rows\.onnx departs .* at Gather_1: the graph's selected is off"):
        altered_export(row_before, "select_rows.onnx", tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def worst_tokens(graph: onnx.GraphProto) -> None:
    best = next(node for node in graph.node if node.op_type == "TopK")
    best.attribute.append(onnx.helper.make_attribute("largest", 0))


def no_ids(graph: onnx.GraphProto) -> None:
    """The log-probabilities are right, but all are said to be those of token 0."""
    best = next(node for node in graph.node if node.op_type == "TopK")
    best.output[1] = "found"
    graph.node.append(onnx.helper.make_node("Sub", ["found", "found"], ["best.ids"]))


@pytest.mark.parametrize(("change", "name"), [(worst_tokens, "best.log_probs"), (no_ids, "best.ids")])
def test_best_tokens_that_are_not_the_best_are_found(
    altered_export: Callable, tmp_path: Path, change: Callable[[onnx.GraphProto], None], name: str
) -> None:
    with pytest.raises(TfexportError, match=rf"decoder_step\.onnx departs .*: the graph's {re.escape(name)} is off"):
        altered_export(change, "decoder_step.onnx", tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def every_key(graph: onnx.GraphProto) -> None:
    """The mask shows the padding, too."""
    next(node for node in graph.node if node.op_type == "Less").op_type = "LessOrEqual"


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (every_key, "decoder_step.onnx"),
        (every_key, "encoder.onnx"),
        (other_positions, "decoder_step.onnx"),
    ],
)
def test_a_standard_graph_that_sees_other_keys_or_positions_is_not_exported(
    altered_export: Callable, tmp_path: Path, change: Callable[[onnx.GraphProto], None], file: str
) -> None:
    with pytest.raises(TfexportError, match=rf"{re.escape(file)} departs from PyTorch at "):
        altered_export(change, file, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_the_unaltered_graphs_pass(altered_export: Callable, tmp_path: Path) -> None:
    options = {"check_all": True, "precisions": ("bfloat16",)}
    altered_export(lambda graph: None, "encoder.onnx", tmp_path / "bundle", **options)
    assert open_bundle(tmp_path / "bundle").precisions == ["float32", "bfloat16"]


@pytest.mark.thorough
def test_the_export_tells_what_came_closest_in_each_precision(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    precisions: tuple[Any, ...] = ("float32", "float16", "bfloat16", "int8", "int4")
    exported = export(tiny_checkpoint.load(), tmp_path / "bundle", precisions=precisions)
    assert list(exported.closest) == list(precisions)
    for value in exported.closest.values():
        assert 0 < value.share < 1
    # Of float32's rounding in 8 and 4 bits, too: graphs are held against the very numbers that they are made of.
    assert max(exported.closest[precision].allowed for precision in ("float32", "int8", "int4")) < 1e-3
    assert (
        exported.closest["float32"].allowed < exported.closest["float16"].allowed < exported.closest["bfloat16"].allowed
    )


def test_an_export_without_its_check_tells_nothing_of_it(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    assert export(tiny_checkpoint.load(), tmp_path / "bundle", gate=None).closest == {}


def test_a_tolerance_takes_the_place_of_what_rounding_explains(altered_export: Callable, tmp_path: Path) -> None:
    def as_it_was(graph: onnx.GraphProto) -> None:
        pass

    with pytest.raises(TfexportError, match=r"--tolerance allows 0\.0e\+00 .* allow more with --tolerance N"):
        altered_export(as_it_was, "encoder.onnx", tmp_path / "bundle", gate=GraphGate(0.0))
    assert list(tmp_path.iterdir()) == []
    exported = altered_export(as_it_was, "encoder.onnx", tmp_path / "bundle", gate=GraphGate(0.5))
    assert exported.closest["float32"].allowed == 0.5


def test_weights_that_differ_by_a_hundredth_are_found(own_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    model = tiny_checkpoint.load().build_model()
    graphs = graph_contract.graphs_of(model.config)
    assert 0 < self_check(model, graphs, own_bundle) < 1
    weights = load_file(own_bundle / "weights.safetensors")
    weights["decoder.layers.0.feed_forward.hidden.weight"] *= 1.01
    save_file(weights, own_bundle / "weights.safetensors", {"format": "pt"})
    with pytest.raises(
        TfexportError,
        match=r"decoder_step\.onnx departs from PyTorch at decoder\.layers\.0\.feed_forward\.hidden/.* so nothing was",
    ):
        self_check(model, graphs, own_bundle)


# --- models at the edge


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("shared", ["positions", "layers"])
def test_tensors_that_share_memory_in_the_checkpoint_are_exported(tmp_path: Path, shared: str) -> None:
    """One position table for both sides, or one layer used twice: PyTorch saves and loads them as one tensor."""
    model = tiny_transformer()
    if shared == "positions":
        model.decoder.pos_embedding = model.encoder.pos_embedding
    else:
        model.encoder.layers[1] = model.encoder.layers[0]
    torch.save(model.state_dict(), tmp_path / "shared.pt")
    checkpoint = load_checkpoint(tmp_path / "shared.pt", HINTS)
    export(checkpoint, tmp_path / "bundle", gate=None)
    stored = load_torch_file(tmp_path / "bundle" / "weights.safetensors")
    assert set(stored) == set(checkpoint.weights)
    assert all(torch.equal(stored[name], tensor) for name, tensor in checkpoint.weights.items())


@pytest.mark.thorough
def test_a_model_of_one_position_is_exported(tmp_path: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    """PyTorch's exporter takes a size of 1 for a constant; batches and caches must stay free all the same."""
    limits = {"max_source_length": 1, "max_target_length": 1}
    export(load_checkpoint(tiny_checkpoint.path, {**HINTS, **limits}), tmp_path / "bundle")
    results = [
        search(load_runtime(name, open_bundle(tmp_path / "bundle")), [[5], [6], [30]], SearchOptions(beam=2))
        for name in ("ort-cpu", "torch")
    ]
    for ours, reference in zip(*results, strict=True):
        assert ours[0].ids == reference[0].ids
        assert len(ours[0].ids) == 1


# --- classifiers


def test_classifier_computes_what_the_naive_model_computes(classifier_bundle: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    model = tiny_classifier()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(classifier_bundle / "encoder_classifier.onnx", options)
    for lengths in ([1], [5, 2, 20, 3], [20] * 3, [2, 3]):
        rows = [torch.randint(PAD + 1, SRC_VOCAB, (length,), generator=generator) for length in lengths]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        with torch.no_grad():
            wanted = model(padded).numpy()
        for filler in (PAD, BOS, SRC_VOCAB - 1):  # what follows a row counts for nothing
            hidden = torch.arange(padded.shape[1]) >= torch.tensor(lengths)[:, None]
            inputs = {"src_ids": padded.masked_fill(hidden, filler).numpy(), "src_len": np.array(lengths)}
            (found,) = session.run(None, inputs)
            assert found.shape == (len(lengths), 5)
            assert np.abs(found - wanted).max() < 1e-5


def test_classifier_bundle_has_one_graph_and_no_target(classifier_bundle: Path) -> None:
    manifest = json.loads((classifier_bundle / "manifest.json").read_text())
    found = [(graph["role"], graph["dialect"]) for graph in manifest["graphs"]]
    assert found == [("encoder_classifier", "onnx24")]
    assert manifest["source"]["family"] == "tutorial-classifier"
    assert manifest["tokenizers"] == {}
    config = open_bundle(classifier_bundle).config
    assert (config.n_classes, config.n_heads, config.eos_id) == (5, HEADS, EOS)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_classifier_bundle_is_not_decoded(classifier_bundle: Path, runtime: str) -> None:
    with pytest.raises(BundleError, match="is an encoder classifier, which has nothing to decode"):
        load_runtime(runtime, open_bundle(classifier_bundle))
    with pytest.raises(BundleError, match="is an encoder classifier, which has nothing to decode"):
        check(classifier_bundle, None, [runtime], say=lambda _: None)


def test_weights_file_is_plain_safetensors(tiny_bundle: Path) -> None:
    """Read as the format's description says it, without the library that wrote it."""
    raw = (tiny_bundle / "weights.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert {entry["dtype"] for entry in header.values()} == {"F32"}
    begins = sorted(entry["data_offsets"] for entry in header.values())
    assert begins[0][0] == 0
    assert begins[-1][1] == len(raw) - 8 - length
    assert all(one[1] == other[0] for one, other in itertools.pairwise(begins))
