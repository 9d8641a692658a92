"""The graphs: what they are made of, that they hold no weights, and that a wrong one is not exported."""

from __future__ import annotations

import itertools
import json
import math
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from safetensors.numpy import load_file, save_file
from tiny import BOS, EOS, HEADS, HINTS, PAD, SRC_VOCAB, TinyCheckpoint, tiny_classifier, tiny_transformer

from tfexport import __version__, contract
from tfexport.bundle import open_bundle
from tfexport.contract import GraphSpec
from tfexport.errors import BundleError, TfexportError
from tfexport.export import export, self_check
from tfexport.models.checkpoint import load_checkpoint
from tfexport.parity import check
from tfexport.runtimes import RUNTIMES, load_runtime
from tfexport.search import SearchOptions, search

ROLES = ("encoder", "decoder_step", "encoder_classifier")
DTYPES = {TensorProto.INT64: "int64", TensorProto.FLOAT: "float32"}
LARGEST_EMBEDDED = 64
"""Numbers of the largest tensor that may lie in a graph itself."""


@pytest.fixture(params=ROLES)
def path(request: pytest.FixtureRequest) -> Path:
    """A graph of each kind."""
    bundle = "classifier_bundle" if request.param == "encoder_classifier" else "tiny_bundle"
    return request.getfixturevalue(bundle) / f"{request.param}.onnx"


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


def test_graph_is_valid(path: Path) -> None:
    onnx.checker.check_model(path, full_check=True)


def test_inputs_and_outputs_are_the_contract_s(path: Path, graph: onnx.GraphProto) -> None:
    config = open_bundle(path.parent).config
    (spec,) = [spec for spec in contract.graphs_of(config) if spec.role == path.stem]
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
    assert graph.name == path.stem


def test_only_standard_operators_are_used(path: Path, graph: onnx.GraphProto) -> None:
    model = onnx.load(path, load_external_data=False)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)]
    assert not model.functions
    assert {node.domain for node in graph.node} == {""}
    assert (model.producer_name, model.producer_version) == ("tfexport", __version__)


def test_attention_is_one_operator_and_the_cache_is_written_in_place(path: Path, graph: onnx.GraphProto) -> None:
    count = {"encoder": 2, "encoder_classifier": 2, "decoder_step": 2}[path.stem]  # 2 encoder layers; self and cross
    assert [node.op_type for node in graph.node].count("Attention") == count
    scatters = [node for node in graph.node if node.op_type == "TensorScatter"]
    written = (
        {f"past.0.{part}": f"present.0.{part}" for part in ("key", "value")} if path.stem == "decoder_step" else {}
    )
    assert {node.input[0]: node.output[0] for node in scatters} == written
    assert not [node.name for node in graph.node if node.op_type in ("Softmax", "Where", "ScatterND")]


def test_masks_are_not_numbers(graph: onnx.GraphProto) -> None:
    """No infinity and no -1e9 that would stand for it: what is hidden is hidden by a bool."""
    for name, values in constants(graph):
        if values.dtype.kind == "f":
            assert np.isfinite(values).all(), name
            assert (np.abs(values) < 1000).all(), name


def test_graph_holds_no_weights(path: Path, graph: onnx.GraphProto) -> None:
    for name, values in constants(graph):
        assert values.size <= LARGEST_EMBEDDED, name
    assert path.stat().st_size < 40_000
    assert {path.suffix for path in path.parent.iterdir()} == {".onnx", ".safetensors", ".json"}


def test_weights_are_those_of_the_file(path: Path, graph: onnx.GraphProto) -> None:
    raw = (path.parent / "weights.safetensors").read_bytes()
    weights = load_file(path.parent / "weights.safetensors")
    places = external(graph)
    assert places
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for name, place in places.items():
        begin, length = int(place["offset"]), int(place["length"])
        assert place["location"] == "weights.safetensors"
        assert raw[begin : begin + length] == weights[name].tobytes()
        assert shapes[name] == weights[name].shape


@pytest.mark.parametrize("bundle", ["tiny_bundle", "classifier_bundle"])
def test_every_weight_is_used(bundle: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(bundle)
    used = {
        name for path in folder.glob("*.onnx") for name in external(onnx.load(path, load_external_data=False).graph)
    }
    assert used == set(load_file(folder / "weights.safetensors"))


def test_nodes_are_named_by_their_modules(path: Path, graph: onnx.GraphProto) -> None:
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)
    model = open_bundle(path.parent).config
    side = "decoder" if path.stem == "decoder_step" else "encoder"
    modules = {name.rpartition("/")[0] for name in names}
    layers = model.n_decoder_layers if side == "decoder" else model.n_encoder_layers
    parts = ["self_attention.query", "self_attention.output", "feed_forward.hidden", "norms.0", "norms.1"]
    parts += ["cross_attention.query", "norms.2"] * (side == "decoder")
    assert {f"{side}.layers.{layer}.{part}" for layer in range(layers) for part in parts} <= modules
    for node in graph.node:  # the exporter's own notes name files of the machine that exported
        assert not node.metadata_props
        assert not node.doc_string


def test_export_is_the_same_in_another_process(
    tiny_bundle: Path, command_export: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    folder, done = command_export
    assert done.returncode == 0, done.stderr
    for path in tiny_bundle.iterdir():
        assert path.read_bytes() == (folder / "tiny" / path.name).read_bytes(), path.name


# --- the self-check


@pytest.fixture
def altered_export(tiny_checkpoint: TinyCheckpoint, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Run `export` with a change to one of its graphs, as a fault of the exporter would make it."""

    def run(change: Callable[[onnx.GraphProto], None], role: str, directory: Path) -> None:
        def write_altered(_: object, spec: GraphSpec, folder: Path) -> None:
            model = onnx.load(tiny_bundle / spec.file, load_external_data=False)
            if spec.role == role:
                change(model.graph)
            onnx.save(model, folder / spec.file)

        monkeypatch.setattr("tfexport.export.write_graph", write_altered)
        export(tiny_checkpoint.load(), directory)

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
    next(node for node in graph.node if node.op_type == "Relu").op_type = "Tanh"


def other_epsilon(graph: onnx.GraphProto) -> None:
    norm = next(node for node in graph.node if node.op_type == "LayerNormalization")
    next(attribute for attribute in norm.attribute if attribute.name == "epsilon").f = 0.01


def swapped_operands(graph: onnx.GraphProto) -> None:
    attention = next(node for node in graph.node if node.op_type == "Attention")
    attention.input[1], attention.input[2] = attention.input[2], attention.input[1]


def no_number(graph: onnx.GraphProto) -> None:
    """The last output becomes NaN: a comparison that only looks for large errors would let it pass."""
    output = graph.output[-1].name
    node = next(node for node in graph.node if output in node.output)
    node.output[list(node.output).index(output)] = "before"
    graph.initializer.append(numpy_helper.from_array(np.array(math.nan, dtype=np.float32), "nan"))
    graph.node.append(onnx.helper.make_node("Add", ["before", "nan"], [output], name="poison"))


@pytest.mark.parametrize("role", ["encoder", "decoder_step"])
@pytest.mark.parametrize("change", [other_weight, other_operator, other_epsilon, swapped_operands, no_number])
def test_a_graph_that_computes_something_else_is_not_exported(
    altered_export: Callable, tmp_path: Path, change: Callable[[onnx.GraphProto], None], role: str
) -> None:
    with pytest.raises(TfexportError, match=rf"{role}\.onnx computes .* against PyTorch .* so nothing was exported"):
        altered_export(change, role, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_the_unaltered_graphs_pass(altered_export: Callable, tmp_path: Path) -> None:
    altered_export(lambda graph: None, "encoder", tmp_path / "bundle")
    open_bundle(tmp_path / "bundle")


def test_weights_that_differ_by_a_hundredth_are_found(own_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    model = tiny_checkpoint.load().build_model()
    assert self_check(model, own_bundle) < 1e-5
    weights = load_file(own_bundle / "weights.safetensors")
    weights["decoder.layers.0.feed_forward.hidden.weight"] *= 1.01
    save_file(weights, own_bundle / "weights.safetensors", {"format": "pt"})
    with pytest.raises(TfexportError, match=r"decoder_step\.onnx computes logits"):
        self_check(model, own_bundle)


# --- models at the edge


@pytest.mark.usefixtures("quick_export")
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
    export(checkpoint, tmp_path / "bundle")
    assert set(load_file(tmp_path / "bundle" / "weights.safetensors")) == set(checkpoint.weights)


def test_a_model_of_one_position_is_exported(tmp_path: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    """PyTorch's exporter takes a size of 1 for a constant; batches and caches must stay free all the same."""
    limits = {"max_source_length": 1, "max_target_length": 1}
    export(load_checkpoint(tiny_checkpoint.path, {**HINTS, **limits}), tmp_path / "bundle")
    results = [
        search(load_runtime(name, open_bundle(tmp_path / "bundle")), [[5], [6], [30]], SearchOptions(beam=2))
        for name in RUNTIMES
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
    assert [graph["role"] for graph in manifest["graphs"]] == ["encoder_classifier"]
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
