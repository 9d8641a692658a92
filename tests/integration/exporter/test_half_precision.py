"""Half precision: what is halved and what stays float32, in the model, in the graphs, and in what they decode."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from safetensors.torch import load_file

from makers.tiny import (
    BOS,
    HINTS,
    SRC_VOCAB,
    TGT_VOCAB,
    TinyCheckpoint,
    overflowing,
    randomised,
    tiny_classifier,
)
from tests.support.checkpoints import NATIVE
from tests.support.graph_checks import self_check
from tfexport import contract, graph_contract
from tfexport.bundle.reader import open_bundle
from tfexport.contract import Precision
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.exporter.graphs import emit, write_graphs
from tfexport.exporter.pipeline import export
from tfexport.exporter.weights import with_stacked, write_weights
from tfexport.graphs.stored_weights import StoredWeights
from tfexport.models.checkpoints.load import Checkpoint, load_checkpoint
from tfexport.models.precision import in_precision, to_tf32
from tfexport.models.transformer import Transformer
from tfexport.runtimes import load_runtime
from tfexport.runtimes.ort import ort_cpu_portable
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, pad, search
from tfexport.verification.parity import random_sources

LARGEST = 65504.0
"""The largest number of float16."""

RANDOM = np.random.default_rng(0)
SOURCES = [RANDOM.integers(4, SRC_VOCAB, length).tolist() for length in (7, 1, 20, 3, 12, 5, 9, 2)]

half = pytest.mark.parametrize("precision", ["float16", "bfloat16"])


def native_model(**changes: Any) -> Transformer:
    model = randomised(Transformer(NATIVE.replace(**changes)))
    assert isinstance(model, Transformer)
    return model


# --- the model


@half
def test_all_weights_of_a_classifier_are_halved_but_its_head(load: Callable[..., Checkpoint], precision: Any) -> None:
    model = load(tiny_classifier().state_dict(), HINTS).build_model()
    variant = in_precision(model, precision)
    kept = {name for name, tensor in variant.state_dict().items() if tensor.dtype == torch.float32}
    assert kept == {"head.weight", "head.bias"}
    ids, lengths = torch.tensor([[5, 6, 7], [9, 4, 4]]), torch.tensor([3, 1])
    with torch.no_grad():
        found, wanted = variant(ids, lengths), model(ids, lengths)
    assert found.dtype == torch.float32
    assert 0 < (found - wanted).abs().max() < 0.1


def test_a_tied_output_is_exported_right(tmp_path: Path) -> None:
    model = native_model(tie_output=True)
    variant = in_precision(model, "float16")
    (spec,) = [spec for spec in graph_contract.graphs_of(model.config, "float16") if spec.role == "decoder_step"]
    write_weights(model, "float32", tmp_path)
    write_weights(variant, "float16", tmp_path)
    exported = emit(spec, model.config, StoredWeights(tmp_path / "weights.fp16.safetensors"))
    stored = {name: value.dtype for name, value in exported.graph.initializers.items() if value.dtype}
    assert stored["output_weight"] == ir.DataType.FLOAT
    assert stored["encoder.tokens.weight"] == ir.DataType.FLOAT16  # which the decoder shares
    ir.save(exported, tmp_path / spec.file)
    assert 0 < self_check(model, [spec], tmp_path) < 1


@pytest.mark.thorough
def test_nothing_is_exported_of_a_model_that_cannot_be_halved(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    weights = torch.load(tiny_checkpoint.path, weights_only=True)
    weights["encoder.tok_embedding.weight"][5, 0] = 70000.0
    torch.save(weights, tmp_path / "large.pt")
    checkpoint = load_checkpoint(tmp_path / "large.pt", HINTS)
    with pytest.raises(TfexportError, match=r"encoder\.tokens\.weight cannot be stored in float16"):
        export(checkpoint, tmp_path / "bundle", precisions=("float16",))
    assert [path.name for path in tmp_path.iterdir()] == ["large.pt"]


# --- the graphs


@pytest.fixture(params=["encoder", "decoder_step", "select_rows"])
def role(request: pytest.FixtureRequest) -> str:
    return request.param


def floats(folder: Path, file: str) -> dict[str, NDArray[np.float32]]:
    """Every number of floating point that is stored in a graph or for it."""
    model = onnx.load(folder / file)
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                found[node.name] = numpy_helper.to_array(attribute.t)
            elif attribute.type in (onnx.AttributeProto.FLOAT, onnx.AttributeProto.FLOATS):
                found[f"{node.name}.{attribute.name}"] = np.array([attribute.f, *attribute.floats], dtype=np.float32)
    return {name: values.astype(np.float32) for name, values in found.items() if values.dtype.kind not in "biu"}


@pytest.mark.parametrize("side", ["encoder", "decoder_step"])
def test_no_number_in_a_float16_graph_is_out_of_its_range(half_bundle: Path, side: str) -> None:
    found = floats(half_bundle, f"{side}.fp16.onnx")
    assert len(found) > 20
    for name, values in found.items():
        assert np.isfinite(values).all(), name
        assert np.abs(values).max() <= LARGEST, name


@half
def test_logits_are_float32_and_caches_are_not(half_bundle: Path, precision: Any) -> None:
    file = f"decoder_step.{contract.short_name(precision)}.onnx"
    graph = onnx.load(half_bundle / file, load_external_data=False).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert types.pop("logits") == types.pop("best.log_probs") == TensorProto.FLOAT
    integers = {name for name, type_ in types.items() if type_ == TensorProto.INT64}
    assert integers == {"tokens", "position", "src_len", "best.ids"}
    halves = {name for name, type_ in types.items() if type_ == getattr(TensorProto, precision.upper())}
    assert halves == set(types) - integers
    assert {"past.0.key", "present.0.value", "cross.0.key"} <= halves


@half
def test_nothing_is_float32_before_the_output_projection(half_bundle: Path, precision: Any) -> None:
    file = half_bundle / f"decoder_step.{contract.short_name(precision)}.onnx"
    graph = onnx.shape_inference.infer_shapes(onnx.load(file)).graph
    stored = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    assert {name for name in stored if "output" in name} == {"output_weight", "output_bias"}
    float32 = {value.name for value in graph.value_info if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    makers = [node for node in graph.node if set(node.output) & float32]
    assert makers[0].op_type == "Cast"
    assert not [node.name for node in makers if node.name.startswith("decoder.")]
    casts = [node for node in graph.node if node.op_type == "Cast"]
    assert len(casts) == 1
    (projection,) = [node for node in graph.node if casts[0].output[0] in node.input]
    assert (projection.op_type, projection.name.split("/")[0]) == ("MatMul", "output")


def without_types(graph: onnx.GraphProto) -> dict[str, Any]:
    """What a graph consists of, but for the types of its floats and how they round its constants."""
    nodes = [
        (
            node.name,
            node.op_type,
            list(node.input),
            list(node.output),
            {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if node.op_type != "Cast"},
        )
        for node in graph.node
    ]
    values = [(v.name, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]) for v in graph.input]
    results = [(v.name, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]) for v in graph.output]
    tensors = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    return {"nodes": nodes, "inputs": values, "outputs": results, "initializers": tensors}


def test_bfloat16_graphs_are_the_float16_graphs_in_another_type(half_bundle: Path, role: str) -> None:
    graphs = {
        short: onnx.load(half_bundle / f"{role}.{short}.onnx", load_external_data=False).graph
        for short in ("fp16", "bf16")
    }
    assert without_types(graphs["fp16"]) == without_types(graphs["bf16"])
    types = {
        short: [tensor.data_type for tensor in graph.initializer] + [v.type.tensor_type.elem_type for v in graph.output]
        for short, graph in graphs.items()
    }
    swap = {TensorProto.FLOAT16: TensorProto.BFLOAT16}
    assert [swap.get(type_, type_) for type_ in types["fp16"]] == types["bf16"]


def test_half_precision_changes_no_operator_but_adds_a_cast(half_bundle: Path, role: str) -> None:
    operators = [
        Counter(node.op_type for node in onnx.load(half_bundle / file, load_external_data=False).graph.node)
        for file in (f"{role}.onnx", f"{role}.fp16.onnx")
    ]
    assert operators[1] - operators[0] == (Counter(Cast=1) if role == "decoder_step" else Counter())
    assert operators[0] - operators[1] == Counter()


@half
def test_stored_weights_are_those_of_float32_rounded(half_bundle: Path, precision: Any) -> None:
    exact = load_file(half_bundle / "weights.safetensors")
    rounded = load_file(half_bundle / contract.weights_file(precision))
    wanted = with_stacked(exact, open_bundle(half_bundle).config, precision)
    assert rounded.keys() == wanted.keys() != exact.keys()
    for name, tensor in wanted.items():
        dtype = torch.float32 if name.startswith("output_") else getattr(torch, precision)
        exact_here = to_tf32(tensor) if name == "output_weight" else tensor
        assert torch.equal(rounded[name], exact_here.to(dtype)), name


# --- decoding


def random_targets(rows: int, length: int) -> np.ndarray:
    targets = np.random.default_rng(1).integers(4, TGT_VOCAB, (rows, length))
    targets[:, 0] = BOS
    return targets


def test_steps_in_float16_are_near_the_float32_forward_without_a_cache(half_bundle: Path) -> None:
    """20 steps: the cache starts at 16 slots, so this crosses its growth; beams and sentences move on the way."""
    bundle = open_bundle(half_bundle)
    runtime, reference = ort_cpu_portable(bundle, precision="float16", threads=1), TorchRuntime.from_bundle(bundle)
    assert (runtime.name, runtime.precision, reference.precision) == ("ort-cpu", "float16", "float32")
    src_ids, src_len = pad(SOURCES, 1)
    beam = 2
    targets = random_targets(len(SOURCES) * beam, 20)
    state = runtime.encode(src_ids, src_len, beam=beam)
    wanted_cross = reference.encode(src_ids, src_len).cross
    for found, wanted in zip(state.cross, wanted_cross, strict=True):
        assert found.dtype == np.float32
        real = np.arange(src_ids.shape[1]) < src_len[:, None]
        assert 0 < np.abs(found - wanted).swapaxes(1, 2)[real].max() < 0.02
    sentence, history, errors = np.repeat(np.arange(len(SOURCES)), beam), np.zeros((len(targets), 0), np.int64), []
    for position in range(20):
        tokens = targets[: state.rows, position]
        logits, state = runtime.step(state, tokens)
        assert logits.dtype == np.float32
        history = np.concatenate([history, tokens[:, None]], axis=1)
        wanted = reference.teacher_forced(src_ids[sentence], src_len[sentence], history)[:, -1]
        errors.append(np.abs(logits - wanted).max())
        if position in (3, 9):
            rows = np.arange(state.rows).reshape(-1, beam)[: 8 if position == 3 else 3, ::-1].ravel()
            state, history, sentence = state.select(rows), history[rows], sentence[rows]
    assert 0 < max(errors) < 0.05


@pytest.mark.parametrize("beam", [1, 3])
def test_float16_finds_the_translations_of_float32_on_this_model(half_bundle: Path, beam: int) -> None:
    bundle = open_bundle(half_bundle)
    exact, rounded = (
        search(load_runtime("ort-cpu", bundle, precision=precision, threads=1), SOURCES, SearchOptions(beam=beam))
        for precision in ("float32", "float16")
    )
    same = sum(one[0].ids == other[0].ids for one, other in zip(exact, rounded, strict=True))
    assert same >= len(SOURCES) - 1  # a near tie may fall otherwise
    for hypotheses in rounded:
        assert np.isfinite(hypotheses[0].score)


def test_best_tokens_in_float16_are_those_of_the_logits(half_bundle: Path) -> None:
    bundle = open_bundle(half_bundle)
    src_ids, src_len = pad(SOURCES, 1)
    tokens = np.full(len(SOURCES), BOS)
    runtimes = [ort_cpu_portable(bundle, precision="float16", threads=1) for _ in range(2)]
    logits, _ = runtimes[0].step(runtimes[0].encode(src_ids, src_len), tokens)
    best, _ = runtimes[1].best(runtimes[1].encode(src_ids, src_len), tokens, 5)
    exact = logits.astype(np.float64)
    log_probs = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert np.array_equal(best.ids, np.argsort(-logits, axis=1, kind="stable")[:, :5])
    np.testing.assert_allclose(best.log_probs, np.take_along_axis(log_probs, best.ids, axis=1), atol=1e-5)


def test_half_precision_on_the_cpu_without_onnx_is_refused_in_one_line(
    half_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "tfexport.kernels.explicit_rounding", raising=False)
    message = (
        "half precision on the CPU, which is for checks, needs onnx, which is not installed: pip install "
        "'tfexport[export]'. Decode with --precision fp32."
    )
    with pytest.raises(RuntimeUnavailable, match=f"^{re.escape(message)}$"):
        load_runtime("ort-cpu", open_bundle(half_bundle), precision="bfloat16")


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_the_cpu_rounds_after_every_node_as_pytorch_does(half_bundle: Path, precision: Precision) -> None:
    """PyTorch's CPU kernels round each result. What is left are other orders of summation."""
    bundle = open_bundle(half_bundle)
    sources = random_sources(bundle.config, 16)
    exact, rounding, ort = (
        TorchRuntime.from_bundle(bundle),
        TorchRuntime.from_bundle(bundle, precision=precision),
        load_runtime("ort-cpu", bundle, precision=precision),
    )
    src_ids, src_len = pad(sources, bundle.config.pad_id)
    real = np.arange(src_ids.shape[1]) < src_len[:, None]
    wanted, rounded, found = (
        np.concatenate([t.swapaxes(1, 2)[real].ravel() for t in runtime.encode(src_ids, src_len).cross])
        for runtime in (exact, rounding, ort)
    )
    expected, error = (np.sqrt(np.mean((wanted - other) ** 2)) for other in (rounded, found))
    assert 0.7 * expected < error < 1.3 * expected


def test_values_beyond_half_precision_are_infinite_on_the_cpu_too(tmp_path: Path) -> None:
    model = native_model()
    overflowing(model, "encoder.layers.0.feed_forward")
    write_weights(model, "float32", tmp_path)
    write_weights(in_precision(model, "float16"), "float16", tmp_path)
    graphs = write_graphs(model.config, "float16", tmp_path, dialects=["onnx24"])
    with pytest.raises(TfexportError, match=r"encoder\.fp16\.onnx departs .* activations may not fit this precision"):
        self_check(model, graphs, tmp_path)
