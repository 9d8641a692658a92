"""Faults planted in the graphs of a bundle are found by parity and named by bisecting; the clean graphs have none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from onnx import helper, numpy_helper
from ort_bundles import CONFIG, ONE_CHANGE, configs, random_model, write_bundle
from safetensors.torch import load_file, save_file
from tfexport.bisect import Bisection, bisect, bisect_bundle

from tfexport import contract
from tfexport.bundle import Bundle, file_sha256, open_bundle
from tfexport.config import ModelConfig
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.export import write_graphs, write_weights
from tfexport.models.precision import in_precision
from tfexport.parity import check
from tfexport.runtimes.pytorch import TorchRuntime

Graph = onnx.GraphProto
MODEL = CONFIG.replace(norm_first=True, final_norm=True, embedding_scale=24**0.5, output_bias=True)
DIALECTS = ("onnx24", "onnx24-lengths", "ort")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle in float32 with every dialect. Not to be changed."""
    return write_bundle(random_model(MODEL, seed=3), tmp_path_factory.mktemp("clean") / "bundle")


# --- the clean graphs


def bisections(model: Any, folder: Path, precision: Any = "float32") -> Iterator[Bisection]:
    write_weights(in_precision(model, precision), precision, folder)
    yield from bisect(model, write_graphs(model.config, precision, folder), folder)


@given(config=configs())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_clean_graphs_of_any_model_have_no_fault(tmp_path_factory: pytest.TempPathFactory, config: ModelConfig) -> None:
    for found in bisections(random_model(config, seed=config.d_ff), tmp_path_factory.mktemp("clean")):
        assert found.first is None, found.first


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("changes", ONE_CHANGE, ids=str)
def test_clean_graphs_of_each_kind_of_model(tmp_path: Path, changes: dict[str, Any], precision: Any) -> None:
    """And every linear layer and norm of the model is compared."""
    model = random_model(CONFIG.replace(**changes))
    compared: dict[str, str] = {}
    for found in bisections(model, tmp_path, precision):
        assert found.first is None, (found.file, found.first)
        dialect = found.file.split(".", 1)[1]
        compared[dialect] = compared.get(dialect, "") + " ".join(value.about for value in found.values)
    modules = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | torch.nn.LayerNorm)]
    for text in compared.values():
        assert not [name for name in modules if name not in text]


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_clean_quantized_graphs_have_no_fault(quantized_bundle: Path, precision: Any) -> None:
    bundle = open_bundle(quantized_bundle)
    model = TorchRuntime.from_bundle(bundle).model
    found = bisect_bundle(bundle, model, "ort-cpu", precision)
    assert {b.file.split(".")[0] for b in found} == {"weights", "encoder", "decoder_step", "greedy_step", "beam_step"}
    for bisection in found:
        assert bisection.first is None
        assert max(value.error for value in bisection.values) > 1e-3  # it is not float32 that was compared


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("change", ["scale", "number"])
def test_quantized_weights_that_are_not_the_model_s_are_named(
    quantized_bundle: Path, tmp_path: Path, precision: Any, change: str
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(quantized_bundle, folder)
    path = folder / f"weights.{precision}.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    name = "decoder.layers.0.feed_forward.output"
    if change == "scale":
        tensors[f"{name}.scale"] *= 1.3
    else:
        tensors[f"{name}.{precision}"][0] ^= 64
    save_file(tensors, path, {"format": "pt"})
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][path.name]["sha256"] = file_sha256(path)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    bundle = open_bundle(folder)
    weights, *graphs = bisect_bundle(bundle, TorchRuntime.from_bundle(bundle).model, "ort-cpu", precision)
    assert weights.first is not None
    assert weights.first.node == name
    assert [value.node for value in weights.values if value.error > weights.tolerance] == [name]
    assert all(graph.first is None for graph in graphs)  # which compute with these weights as they should


def test_what_cannot_be_run_here_is_refused(half_bundle: Path) -> None:
    bundle = open_bundle(half_bundle)
    model = TorchRuntime.from_bundle(bundle).model
    with pytest.raises(RuntimeUnavailable, match=r"encoder\.bf16\.lengths\.onnx cannot be bisected"):
        bisect_bundle(bundle, model, "ort-cuda", "bfloat16")
    with pytest.raises(TfexportError, match="tensorrt runs no graphs that can be bisected"):
        bisect_bundle(bundle, model, "tensorrt", "float16")


# --- planted faults


def own_copy(graph: Graph, bundle: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """A weight as a constant of the graph itself, changed: the file that the reference reads stays as it is."""
    (tensor,) = [tensor for tensor in graph.initializer if tensor.name == name]
    array = numpy_helper.to_array(tensor, base_dir=str(bundle))
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(change(array)), name))


def scaled(name: str, factor: float = 1.01) -> Callable[[Graph, Path], None]:
    return lambda graph, bundle: own_copy(graph, bundle, name, lambda array: array * np.float32(factor))


def moved(name: str) -> Callable[[Graph, Path], None]:
    """A table shifted by one row."""
    return lambda graph, bundle: own_copy(graph, bundle, name, lambda array: np.roll(array, -1, axis=0))


def swapped(one: str, other: str) -> Callable[[Graph, Path], None]:
    """All weights of two modules, or of two layers, change places."""

    def change(graph: Graph, bundle: Path) -> None:
        renamed = {}
        for tensor in graph.initializer:
            for here, there in ((one, other), (other, one)):
                if tensor.name.startswith(f"{here}."):
                    renamed[tensor.name] = there + tensor.name.removeprefix(here)
        assert renamed
        for node in graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = renamed.get(name, name)

    return change


def attribute_of(node: onnx.NodeProto, name: str, value: Any) -> None:
    for index, attribute in enumerate(node.attribute):
        if attribute.name == name:
            del node.attribute[index]
            break
    node.attribute.append(helper.make_attribute(name, value))


def node_of(graph: Graph, module: str, op_type: str) -> onnx.NodeProto:
    return next(n for n in graph.node if n.op_type == op_type and n.name.rpartition("/")[0] == module)


def other_eps(module: str) -> Callable[[Graph, Path], None]:
    return lambda graph, bundle: attribute_of(node_of(graph, module, "LayerNormalization"), "epsilon", 1e-2)


def other_eps_of_sum(module: str) -> Callable[[Graph, Path], None]:
    return lambda graph, bundle: attribute_of(node_of(graph, module, "ResidualNorm"), "epsilon", 1e-2)


def no_residual_of_sum(module: str) -> Callable[[Graph, Path], None]:
    """A sum adds the branch to itself."""

    def change(graph: Graph, bundle: Path) -> None:
        node = node_of(graph, module, "ResidualNorm")
        node.input[0] = node.input[1]

    return change


def other_activation(module: str) -> Callable[[Graph, Path], None]:
    def change(graph: Graph, bundle: Path) -> None:
        node_of(graph, module, "Relu").op_type = "Softplus"

    return change


def no_activation(module: str) -> Callable[[Graph, Path], None]:
    def change(graph: Graph, bundle: Path) -> None:
        node_of(graph, module, "LinearRectified").op_type = "Linear"

    return change


def no_bias(module: str) -> Callable[[Graph, Path], None]:
    return lambda graph, bundle: own_copy(graph, bundle, f"{module}.bias", np.zeros_like)


def no_residual(module: str) -> Callable[[Graph, Path], None]:
    """The second sum of a layer adds the branch to itself."""

    def change(graph: Graph, bundle: Path) -> None:
        node = [n for n in graph.node if n.op_type == "Add" and n.name.rpartition("/")[0] == module][1]
        node.input[0] = node.input[1]

    return change


def no_scale(module: str) -> Callable[[Graph, Path], None]:
    """Embeddings are not multiplied by the root of d_model."""

    def change(graph: Graph, bundle: Path) -> None:
        node_of(graph, module, "Mul").op_type = "Max"

    return change


def other_scale(module: str) -> Callable[[Graph, Path], None]:
    """As with another number of heads: scores are divided by another root."""
    return lambda graph, bundle: attribute_of(attention(graph, module), "scale", 0.5)


def attention(graph: Graph, module: str) -> onnx.NodeProto:
    kinds = ("Attention", "MultiHeadAttention", "GroupQueryAttention")
    return next(n for n in graph.node if n.op_type in kinds and n.name.rpartition("/")[0] == module)


def other_heads(module: str) -> Callable[[Graph, Path], None]:
    """The heads are cut out of the states in another size: 24 = 3 heads of 8 = 8 of 3, or 1 of 24."""

    def change(graph: Graph, bundle: Path) -> None:
        node = attention(graph, module)
        attribute_of(node, "num_heads", 1 if node.op_type == "MultiHeadAttention" else 8)

    return change


def no_mask(module: str) -> Callable[[Graph, Path], None]:
    """Attention sees the padding."""

    def change(graph: Graph, bundle: Path) -> None:
        node = attention(graph, module)
        for index in range(3, len(node.input)):
            node.input[index] = ""

    return change


def key_for_value(module: str) -> Callable[[Graph, Path], None]:
    def change(graph: Graph, bundle: Path) -> None:
        node = attention(graph, module)
        node.input[2] = node.input[1]

    return change


def stale_cache(module: str) -> Callable[[Graph, Path], None]:
    """Attention reads the cache as it was before this step."""

    def change(graph: Graph, bundle: Path) -> None:
        node = attention(graph, module)
        for index in (1, 2):
            node.input[index] = node.input[index].replace("present", "past")

    return change


def other_slot(graph: Graph, bundle: Path) -> None:
    """New keys and values are written to the first slot."""
    graph.node.insert(0, helper.make_node("Sub", ["position", "position"], ["first"], name="first"))
    for node in graph.node:
        if node.op_type == "TensorScatter":
            node.input[2] = "first"


def beam_not_followed(graph: Graph, bundle: Path) -> None:
    """Every hypothesis reads the past of the first: as if beams were not reordered."""
    graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.int64), "first"))
    graph.node.insert(0, helper.make_node("Gather", ["mask", "first"], ["own"], name="own", axis=2))
    for node in graph.node:
        if node.op_type == "Where":
            node.input[0] = "own"
    # The same for all queries: the operator takes a bias for each.
    where = next(node for node in graph.node if node.op_type == "Where")
    graph.node.insert(1, helper.make_node("Shape", ["mask"], ["all"], name="all"))
    index = list(graph.node).index(where)
    graph.node.insert(index, helper.make_node("Expand", ["own", "all"], ["theirs"], name="theirs"))
    where.input[0] = "theirs"


E0, E1, D0, D1 = "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"
OWN = f"{D1}.self_attention"
MUTANTS: list[tuple[str, str, Callable[[Graph, Path], None], str]] = [
    # what, graph, change, the node that is to be named
    ("weight scaled", "encoder", scaled(f"{E1}.feed_forward.hidden.weight"), f"{E1}.feed_forward.hidden/"),
    ("weight scaled", "encoder.ort", scaled(f"{E0}.self_attention.value.weight"), f"{E0}.self_attention.value/"),
    ("weight scaled", "decoder_step", scaled(f"{D1}.cross_attention.query.weight"), f"{D1}.cross_attention.query/"),
    ("weight scaled", "decoder_step.ort", scaled(f"{D1}.self_attention.key.weight"), f"{D1}.self_attention.query_key"),
    ("weight scaled", "beam_step.ort", scaled("output_weight"), "output/"),
    ("embeddings scaled", "encoder", scaled("encoder.tokens.weight"), "encoder.tokens/"),
    ("norm scaled", "decoder_step.lengths", scaled(f"{D1}.norms.1.weight"), f"{D1}.norms.1/"),
    ("layers swapped", "encoder", swapped(E0, E1), f"{E0}.norms.0/"),
    ("layers swapped", "decoder_step.ort", swapped(D0, D1), f"{D0}.norms.0/"),
    ("modules swapped", "decoder_step", swapped(f"{OWN}.key", f"{OWN}.value"), f"{OWN}.key/"),
    ("modules swapped", "encoder.ort", swapped(f"{D0}.cross_attention.key", f"{D1}.cross_attention.key"), "cross/"),
    ("positions shifted", "encoder", moved("encoder.positions.table"), "encoder.positions/"),
    ("positions shifted", "decoder_step.ort", moved("decoder.positions.table"), "decoder.positions/"),
    ("positions shifted", "beam_step.ort", moved("decoder.positions.table"), "decoder.positions/"),
    ("eps", "encoder.lengths", other_eps(f"{E0}.norms.1"), f"{E0}.norms.1/"),
    ("eps", "beam_step.ort", other_eps_of_sum("decoder.norm"), "decoder.norm/"),
    ("activation", "decoder_step", other_activation(f"{D1}.feed_forward"), f"{D1}.feed_forward/"),
    ("activation", "encoder.ort", no_activation(f"{E1}.feed_forward.output"), f"{E1}.feed_forward.output/"),
    ("bias lost", "decoder_step.ort", no_bias(f"{D1}.feed_forward.output"), f"{D1}.feed_forward.output/"),
    ("residual lost", "encoder", no_residual(E0), f"{E0}/Add_2"),
    ("residual lost", "decoder_step.ort", no_residual_of_sum(f"{D1}.norms.2"), f"{D1}.norms.2/"),
    ("embedding scale", "decoder_step", no_scale("decoder.tokens"), "decoder.tokens/"),
    ("attention scale", "encoder", other_scale(f"{E1}.self_attention"), f"{E1}.self_attention/"),
    ("attention scale", "decoder_step.ort", other_scale(f"{D1}.self_attention"), f"{D1}.self_attention/"),
    ("heads", "encoder.ort", other_heads(f"{E0}.self_attention"), f"{E0}.self_attention/"),
    ("mask dropped", "encoder", no_mask(f"{E0}.self_attention"), f"{E0}.self_attention/"),
    ("mask dropped", "encoder.ort", no_mask(f"{E1}.self_attention"), f"{E1}.self_attention/"),
    ("mask dropped", "decoder_step", no_mask(f"{D1}.self_attention"), f"{D1}.self_attention/"),
    ("mask dropped", "decoder_step.lengths", no_mask(f"{D1}.cross_attention"), f"{D1}.cross_attention/"),
    ("mask dropped", "beam_step.ort", no_mask(f"{D0}.cross_attention"), f"{D0}.cross_attention/"),
    ("key for value", "decoder_step", key_for_value(f"{D1}.cross_attention"), f"{D1}.cross_attention/"),
    ("stale cache", "decoder_step", stale_cache(f"{D0}.self_attention"), f"{D0}.self_attention/"),
    ("stale cache", "beam_step.ort", stale_cache(f"{D1}.self_attention"), f"{D1}.self_attention/"),
    ("wrong slot", "decoder_step", other_slot, f"{D0}.self_attention/"),
    ("beams not followed", "beam_step.ort", beam_not_followed, f"{D0}.self_attention/"),
]  # fmt: skip


@pytest.fixture
def mutant(clean: Bundle, tmp_path: Path) -> Callable[[str, Callable[[Graph, Path], None]], Bundle]:
    """A copy of the clean bundle with a change to one graph, whose manifest knows nothing of it but the checksum."""

    def make(name: str, change: Callable[[Graph, Path], None]) -> Bundle:
        folder = Path(shutil.copytree(clean.directory, tmp_path / "mutant"))
        path = folder / f"{name}.onnx"
        proto = onnx.load(path, load_external_data=False)
        change(proto.graph, folder)
        onnx.save(proto, path)
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        manifest["files"][path.name] = {"sha256": file_sha256(path), "bytes": path.stat().st_size}
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        return open_bundle(folder)

    return make


@pytest.mark.parametrize(("what", "name", "change", "named"), MUTANTS, ids=[f"{m[0]}-{m[1]}-{m[3]}" for m in MUTANTS])
def test_a_planted_fault_is_named(
    mutant: Callable[..., Bundle], what: str, name: str, change: Callable[[Graph, Path], None], named: str
) -> None:
    bundle = mutant(name, change)
    model = TorchRuntime.from_bundle(bundle).model
    for dialect in DIALECTS:
        graphs = contract.graphs_of(bundle.config, "float32", dialect)  # type: ignore[arg-type]
        for found in bisect(model, graphs, bundle.directory):
            if found.file != f"{name}.onnx":
                assert found.first is None
                continue
            assert found.first is not None
            assert found.first.node.startswith(named), found.first


@pytest.mark.parametrize(
    ("name", "change"),
    [(m[1], m[2]) for m in MUTANTS if m[1].endswith("ort")],
    ids=[f"{m[0]}-{m[1]}-{m[3]}" for m in MUTANTS if m[1].endswith("ort")],
)
def test_a_planted_fault_in_what_decodes_here_fails_parity(
    mutant: Callable[..., Bundle], name: str, change: Callable[[Graph, Path], None]
) -> None:
    bundle = mutant(name, change)
    comparison = check(bundle.directory, None, ["ort-cpu"], beams=(1, 3), max_length=24, say=lambda _: None)
    failed = {report.beam for report in comparison.reports if not report.passed}
    assert failed == {"encoder.ort": {1, 3}, "decoder_step.ort": {1}, "beam_step.ort": {3}}[name]


def test_the_clean_bundle_passes_parity(clean: Bundle) -> None:
    comparison = check(clean.directory, None, ["ort-cpu"], beams=(1, 3), max_length=24, say=lambda _: None)
    assert all(report.passed for report in comparison.reports)


def test_a_number_that_is_none_is_a_fault(mutant: Callable[..., Bundle]) -> None:
    bundle = mutant("encoder", scaled("encoder.layers.0.norms.0.weight", float("nan")))
    found, *_ = bisect(TorchRuntime.from_bundle(bundle).model, contract.graphs_of(bundle.config), bundle.directory)
    assert found.first is not None
    assert found.first.node == "encoder.layers.0.norms.0/LayerNormalization_1"
    assert json.dumps(found.to_dict(), allow_nan=False)
