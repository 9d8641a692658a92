"""Graphs beside their definition: clean ones have no fault in any precision, and a planted one is named by its node."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from makers.ort_bundles import CONFIG, ONE_CHANGE, configs, random_model, write_bundle
from tests.support.graph_checks import definition_of
from tfexport import contract
from tfexport.bundle.reader import Bundle, file_sha256, open_bundle
from tfexport.bundle.writer import write_manifest
from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.weights import write_variant, write_weights
from tfexport.graph_checks.check import Compared, GraphCheck, case_of, check_graph, sizes_of
from tfexport.graph_checks.definition import Definition
from tfexport.graph_checks.values import COMPARED
from tfexport.models.transformer import Transformer
from tfexport.runtimes import load_runtime
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions
from tfexport.verification.files import graph_specs
from tfexport.verification.parity import check, check_graphs, compare_all, random_sources

Graph = onnx.GraphProto
Change = Callable[[Graph], None]
MODEL = CONFIG.replace(norm_first=True, final_norm=True, embedding_scale=24**0.5, output_bias=True, norm_eps=1e-6)
PRECISIONS: tuple[Precision, ...] = tuple(contract.PRECISIONS.values())
HALVES = ("float16", "bfloat16")


def written(
    model: Transformer,
    folder: Path,
    precisions: Collection[Precision] = PRECISIONS,
    *,
    keep: Collection[str] = (),
    more: bool = True,
) -> dict[Precision, list[contract.GraphSpec]]:
    """All graphs of these precisions, with `more` those of attention and shortlists too."""
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(model, "float32", folder)
    graphs = {}
    for precision in precisions:
        write_variant(model, precision, folder, keep)
        graphs[precision] = write_graphs(model.config, precision, folder, keep, alignments=more, shortlist=more)
    return graphs


# --- the clean graphs


@pytest.mark.thorough
@given(config=configs(), precision=st.sampled_from(PRECISIONS))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_clean_graphs_of_any_model_have_no_fault(
    tmp_path_factory: pytest.TempPathFactory, config: ModelConfig, precision: Precision
) -> None:
    model, folder = random_model(config, seed=config.d_ff), tmp_path_factory.mktemp("clean")
    graphs = written(model, folder, [precision])[precision]
    definition = definition_of(model, precision, folder)
    for graph in graphs:
        found = check_graph(definition, graph, folder)
        assert found.first is None, (found.file, found.first)


KINDS = [
    *ONE_CHANGE,
    {"positions": "relative", "max_distance": 6, "norm": "rms"},
    {"positions": "relative", "max_distance": 6, "n_encoder_heads": 4},
    {"gated": True, "d_head": 5},
]


@pytest.mark.sampled(every=99)
@pytest.mark.parametrize(("index", "changes"), list(enumerate(KINDS)), ids=str)
def test_clean_graphs_of_each_kind_of_model(tmp_path: Path, index: int, changes: dict[str, Any]) -> None:
    """In float32 and one other precision, in turn. What comes out of every linear layer and norm is compared."""
    model = random_model(CONFIG.replace(**changes))
    other = PRECISIONS[1 + index % (len(PRECISIONS) - 1)]
    for precision, graphs in written(model, tmp_path, ["float32", other], more=False).items():
        definition = definition_of(model, precision, tmp_path)
        compared: dict[str, str] = {}
        for graph in graphs:
            found = check_graph(definition, graph, tmp_path)
            assert found.first is None, (found.file, found.first)
            compared[graph.dialect] = compared.get(graph.dialect, "") + " ".join(v.about for v in found.values)
        modules = [path for path, module in model.named_modules() if isinstance(module, COMPARED)]
        for text in compared.values():
            assert not [path for path in modules if path not in text]


@pytest.mark.parametrize("path", ["decoder.layers.1.cross_attention.query", "decoder.layers.0.feed_forward.hidden"])
def test_clean_int4_graphs_of_a_model_with_a_matrix_of_zeros(tmp_path: Path, path: str) -> None:
    """As after pruning. Blocks of zeros have the scale 0, so that their output is exactly 0."""
    model = random_model(MODEL)
    with torch.no_grad():
        model.get_submodule(path).weight.zero_()  # type: ignore[operator, union-attr]
    graphs = written(model, tmp_path, ["int4"], more=False)["int4"]
    definition = definition_of(model, "int4", tmp_path)
    for graph in graphs:
        found = check_graph(definition, graph, tmp_path)
        assert found.first is None, (found.file, found.first)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_clean_graphs_with_modules_in_float32(tmp_path: Path, precision: Precision) -> None:
    model = random_model(MODEL)
    keep = (
        ["decoder.layers.0.feed_forward.hidden", "decoder.layers.0.feed_forward", "encoder.layers.1.norms.0"]
        if precision == "float16"
        else ["decoder.layers.0.feed_forward.hidden", "encoder.layers.1.self_attention.query_key_value", "output"]
    )
    graphs = written(model, tmp_path, [precision], keep=keep)[precision]
    definition = definition_of(model, precision, tmp_path, keep)
    for graph in graphs:
        assert check_graph(definition, graph, tmp_path).first is None


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with all graphs in every precision. Not to be changed."""
    model, folder = random_model(MODEL, seed=3), tmp_path_factory.mktemp("clean") / "bundle"
    graphs = written(model, folder)
    facts = {"source": {"sha256": "", "family": "native", "given": {}}}
    write_manifest(folder, model.config, [graph for of in graphs.values() for graph in of], facts)
    return open_bundle(folder)


@pytest.fixture(scope="module")
def model() -> Transformer:
    """What `clean` is of."""
    return random_model(MODEL, seed=3)


@pytest.fixture(scope="module")
def definitions(clean: Bundle, model: Transformer) -> dict[Precision, Definition]:
    return {precision: definition_of(model, precision, clean.directory) for precision in PRECISIONS}


@pytest.mark.thorough
@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_graphs_of_a_bundle_are_checked_by_definitions_and_by_kernels(
    clean: Bundle, model: Transformer, precision: Precision
) -> None:
    found = check_graphs(clean, model, precision)
    ways = {(graph.file, way) for graph in clean.graphs if graph.precision == precision for way in (False, True)}
    wanted = {(file, way) for file, way in ways if not way or ".ort." in file}
    assert {(one.file, one.with_kernels) for one in found} == wanted
    for one in found:
        assert one.first is None, (one.file, one.first)
    # It is the arithmetic of this precision that was compared.
    compared = [value for one in found for value in one.values if value.about == "output of decoder.norm"]
    assert compared
    assert all((value.error > 1e-5) == (precision in HALVES) for value in compared)


def test_quantized_weights_are_not_those_of_float32(clean: Bundle, model: Transformer, definitions: Any) -> None:
    """Else the definition would say nothing of 8 and 4 bits: float32's departs from these graphs."""
    graph = spec_of(clean, "encoder.ort", "int8")
    of_float32 = Definition("int8", model, model)
    assert check_graph(definitions["int8"], graph, clean.directory).first is None
    assert check_graph(of_float32, graph, clean.directory).first is not None
    of_weights = Definition("int8", definitions["int8"].model, definitions["int8"].model)  # activations are not rounded
    assert check_graph(of_weights, graph, clean.directory).first is not None


# --- planted faults


def spec_of(bundle: Bundle, name: str, precision: Precision) -> contract.GraphSpec:
    """`encoder`, `beam_step.ort` or `beam_step.ort-cuda` in a precision."""
    role, _, dialect = name.partition(".")
    return graph_specs(bundle)[role, precision, dialect or "onnx24"]


def planted(graph: Graph, name: str, operator: str, *operands: Any, **attributes: Any) -> None:
    """Whatever reads `name` reads the result of an operator on it."""
    taken = []
    for operand in operands:
        taken.append(f"{name}.planted.{len(taken)}")
        graph.initializer.append(numpy_helper.from_array(np.asarray(operand), taken[-1]))
    # Within the module that reads it, so that it is not taken for what goes into that; norms have one node each.
    reader = next(node.name for node in graph.node if name in node.input).rpartition("/")[0]
    where = "planted" if "norm" in reader else reader
    for node in graph.node:
        for index, read in enumerate(node.input):
            if read == name:
                node.input[index] = f"{name}.planted"
    places = [index for index, node in enumerate(graph.node) if name in node.output]
    node = helper.make_node(operator, [name, *taken], [f"{name}.planted"], name=f"{where}/{name}", **attributes)
    graph.node.insert(places[0] + 1 if places else 0, node)


def changed_output(graph: Graph, name: str, operator: str, *operands: Any) -> None:
    """An output of the graph is the result of an operator on what it should be."""
    maker = next(node for node in graph.node if name in node.output)
    maker.output[list(maker.output).index(name)] = f"{name}.right"
    operand = numpy_helper.from_array(np.asarray(operands[0]), f"{name}.operand")
    graph.initializer.append(operand)
    for node in graph.node:
        for index, read in enumerate(node.input):
            if read == name:
                node.input[index] = f"{name}.right"
    graph.node.append(helper.make_node(operator, [f"{name}.right", operand.name], [name], name=f"planted/{name}"))


def type_of(graph: Graph, name: str) -> Any:
    (found,) = [tensor.data_type for tensor in graph.initializer if tensor.name == name]
    return helper.tensor_dtype_to_np_dtype(found)


def scaled(name: str, factor: float | None = None) -> Change:
    """A weight, by a hundredth in float32, and by so much more in half precision that it is not rounding."""

    def change(graph: Graph) -> None:
        dtype = type_of(graph, name)
        more = factor or (1.01 if dtype == np.float32 else 1.5)
        planted(graph, name, "Mul", np.asarray(more, dtype))

    return change


def moved(name: str) -> Change:
    """A table shifted by one row."""

    def change(graph: Graph) -> None:
        planted(graph, name, "Slice", np.array([1]), np.array([99999]), np.array([0]))
        planted(graph, f"{name}.planted", "Pad", np.array([0, 0, 1, 0]))

    return change


def no_bias(name: str) -> Change:
    return lambda graph: planted(graph, name, "Mul", np.asarray(0, type_of(graph, name)))


def swapped(one: str, other: str) -> Change:
    """All weights of two modules, or of two layers, change places."""

    def change(graph: Graph) -> None:
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


def of_half(graph: Graph) -> bool:
    return any(
        tensor.data_type in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16) for tensor in graph.initializer
    )


def attribute_of(node: onnx.NodeProto, name: str, value: Any) -> None:
    for index, attribute in enumerate(node.attribute):
        if attribute.name == name:
            del node.attribute[index]
            break
    node.attribute.append(helper.make_attribute(name, value))


def node_of(graph: Graph, module: str, op_type: str) -> onnx.NodeProto:
    return next(n for n in graph.node if n.op_type == op_type and n.name.rpartition("/")[0] == module)


def other_eps(module: str, operator: str = "LayerNormalization", eps: float = 1e-2) -> Change:
    def change(graph: Graph) -> None:
        attribute_of(node_of(graph, module, operator), "epsilon", 1.0 if of_half(graph) else eps)

    return change


def no_residual_of_sum(module: str) -> Change:
    """A sum adds the branch to itself."""

    def change(graph: Graph) -> None:
        node = node_of(graph, module, "ResidualNorm")
        node.input[0] = node.input[1]

    return change


def other_activation(module: str) -> Change:
    def change(graph: Graph) -> None:
        node_of(graph, module, "Relu").op_type = "Softplus"

    return change


def no_activation(module: str) -> Change:
    def change(graph: Graph) -> None:
        (node,) = [n for n in graph.node if n.op_type.endswith("Rectified") and n.name.rpartition("/")[0] == module]
        node.op_type = node.op_type.removesuffix("Rectified")

    return change


def no_residual(module: str) -> Change:
    """The second sum of a layer adds the branch to itself."""

    def change(graph: Graph) -> None:
        node = [n for n in graph.node if n.op_type == "Add" and n.name.rpartition("/")[0] == module][1]
        node.input[0] = node.input[1]

    return change


def no_residual_of_skip(module: str) -> Change:
    """A norm that adds takes the branch twice."""

    def change(graph: Graph) -> None:
        node = node_of(graph, module, "SkipLayerNormalization")
        node.input[1] = node.input[0]

    return change


def other_bias(module: str, name: str) -> Change:
    """A norm that adds a bias adds that of another projection."""

    def change(graph: Graph) -> None:
        node_of(graph, module, "SkipLayerNormalization").input[4] = name

    return change


def scaled_together(path: str, kind: str, factor: float | None = None) -> Change:
    """A weight or bias of query, key and value: one tensor in half precision, and that of the key alone in float32."""

    def change(graph: Graph) -> None:
        found = {tensor.name for tensor in graph.initializer}
        name = f"{path}.query_key_value.{kind}"
        name = name if name in found else f"{path}.key.{kind}"
        if factor == 0:
            planted(graph, name, "Mul", np.asarray(0, type_of(graph, name)))
        else:
            scaled(name, factor)(graph)

    return change


def first_slot(name: str) -> Change:
    """New keys and values are written to the first slot, or GroupQueryAttention takes a row for empty."""

    def change(graph: Graph) -> None:
        for node in graph.node:
            if node.op_type in ("TensorScatter", "GroupQueryAttention"):
                places = [place for place, read in enumerate(node.input) if read == name]
                if not places and node.op_type == "TensorScatter":
                    places = [2]  # the position in another type
                for place in places:
                    node.input[place] = f"{node.input[place]}.first"
        read = {value for node in graph.node for value in node.input if value.endswith(".first")}
        for value in read:
            given = value.removesuffix(".first")
            places = [index for index, node in enumerate(graph.node) if given in node.output]
            node = helper.make_node("Sub", [given, given], [value], name=value)
            graph.node.insert(places[0] + 1 if places else 0, node)

    return change


def other_flat_heads(module: str) -> Change:
    """Heads that lie side by side are cut in another size: 24 = 3 heads of 8 = 8 of 3."""

    def change(graph: Graph) -> None:
        for name in ("q_num_heads", "kv_num_heads"):
            attribute_of(attention(graph, module), name, 8)

    return change


def no_scale(module: str) -> Change:
    """Embeddings are not multiplied by the root of d_model."""

    def change(graph: Graph) -> None:
        node_of(graph, module, "Mul").op_type = "Max"

    return change


def other_scale(module: str) -> Change:
    """As with another number of heads: scores are divided by another root."""
    return lambda graph: attribute_of(attention(graph, module), "scale", 3.0 if of_half(graph) else 0.5)


def attention(graph: Graph, module: str) -> onnx.NodeProto:
    kinds = ("Attention", "MultiHeadAttention", "GroupQueryAttention")
    return next(n for n in graph.node if n.op_type in kinds and n.name.rpartition("/")[0] == module)


def other_heads(module: str) -> Change:
    """The heads are cut out of the states in another size: 24 = 3 heads of 8 = 8 of 3, or 1 of 24."""

    def change(graph: Graph) -> None:
        node = attention(graph, module)
        attribute_of(node, "num_heads", 1 if node.op_type == "MultiHeadAttention" else 8)

    return change


def no_mask(module: str) -> Change:
    """Attention sees the padding."""

    def change(graph: Graph) -> None:
        node = attention(graph, module)
        for index in range(3, len(node.input)):
            node.input[index] = ""

    return change


def key_for_value(module: str) -> Change:
    def change(graph: Graph) -> None:
        node = attention(graph, module)
        node.input[2] = node.input[1]

    return change


def stale_cache(module: str) -> Change:
    """Attention reads the cache as it was before this step."""

    def change(graph: Graph) -> None:
        node = attention(graph, module)
        for index in (1, 2):
            node.input[index] = node.input[index].replace("present", "past")

    return change


def other_slot(graph: Graph) -> None:
    """New keys and values are written to the first slot."""
    graph.node.insert(0, helper.make_node("Sub", ["position", "position"], ["first"], name="first"))
    for node in graph.node:
        if node.op_type == "TensorScatter":
            node.input[2] = "first"


def beam_not_followed(graph: Graph) -> None:
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


def other_ids(graph: Graph) -> None:
    """Each best token is the one beside it."""
    changed_output(graph, "best.ids", "Add", np.asarray(1, np.int64))


def other_rows(graph: Graph) -> None:
    planted(graph, "index", "Sub", np.asarray(1, np.int64))


def input_changed(name: str, op_type: str, operand: np.generic) -> Change:
    """A graph that computes with another input."""
    return lambda graph: planted(graph, name, op_type, np.asarray(operand))


def nothing_banned(graph: Graph) -> None:
    """But the first token."""
    planted(graph, "banned", "Mul", np.asarray(0, np.int64))


def attention_without(kind: str) -> Change:
    """Told attention that leaves out an operator of its own: the mask (`Where`), or the scale (`Mul`)."""

    def change(graph: Graph) -> None:
        node = next(n for n in graph.node if n.op_type == kind and "/attention" in n.name)
        index = 1 if kind == "Where" else 0
        for other in graph.node:
            for place, name in enumerate(other.input):
                if name == node.output[0]:
                    other.input[place] = node.input[index]

    return change


def nothing_left_out(graph: Graph) -> None:
    planted(graph, "left_out", "Mul", np.asarray(0, np.float32))


def other_candidates(graph: Graph) -> None:
    planted(graph, "candidates", "Max", np.asarray(3, np.int64))


E0, E1, D0, D1 = "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"
OWN = f"{D1}.self_attention"
SUM, SKIP = "ResidualNorm", "SkipLayerNormalization"
FAULTS: list[tuple[str, str, Change, str]] = [
    # what, graph, change, the node that is to be named
    ("weight scaled", "encoder", scaled(f"{E1}.feed_forward.hidden.weight"), f"{E1}.feed_forward.hidden/"),
    # A bias, since a weight that is computed may not be padded: such a graph is refused when it is loaded.
    ("bias scaled", "encoder.ort", scaled(f"{E0}.feed_forward.hidden.bias", 1.5), f"{E0}.feed_forward.hidden/"),
    ("weight scaled", "decoder_step", scaled(f"{D1}.cross_attention.query.weight"), f"{D1}.cross_attention.query/"),
    ("weight scaled", "decoder_step.ort", scaled(f"{D1}.self_attention.key.weight"), f"{D1}.self_attention.query_key"),
    ("weight scaled", "beam_step.ort", scaled("output_weight"), "output/"),
    ("embeddings scaled", "encoder", scaled("encoder.tokens.weight"), "encoder.tokens/"),
    ("norm scaled", "decoder_step", scaled(f"{D1}.norms.1.weight"), f"{D1}.norms.1/"),
    ("layers swapped", "encoder", swapped(E0, E1), f"{E0}.norms.0/"),
    ("layers swapped", "decoder_step.ort", swapped(D0, D1), f"{D0}.norms.0/"),
    ("modules swapped", "decoder_step", swapped(f"{OWN}.key", f"{OWN}.value"), f"{OWN}.key/"),
    ("modules swapped", "encoder.ort", swapped(f"{D0}.cross_attention.key", f"{D1}.cross_attention.key"), "cross/"),
    ("positions shifted", "encoder", moved("encoder.positions.table"), "encoder.positions/"),
    ("positions shifted", "decoder_step.ort", moved("decoder.positions.table"), "decoder.positions/"),
    ("positions shifted", "beam_step.ort", moved("decoder.positions.table"), "decoder.positions/"),
    ("eps", "encoder", other_eps(f"{E0}.norms.1"), f"{E0}.norms.1/"),
    ("eps", "beam_step.ort", other_eps("decoder.norm", SUM), "decoder.norm/"),
    ("activation", "decoder_step", other_activation(f"{D1}.feed_forward"), f"{D1}.feed_forward/"),
    ("activation", "encoder.ort", no_activation(f"{E1}.feed_forward.output"), f"{E1}.feed_forward.output/"),
    ("bias lost", "encoder", no_bias(f"{E0}.self_attention.output.bias"), f"{E0}.self_attention.output/"),
    ("bias lost", "decoder_step.ort", no_bias(f"{D1}.feed_forward.output.bias"), f"{D1}.feed_forward.output/"),
    ("residual lost", "encoder", no_residual(E0), f"{E0}/Add_2"),
    ("residual lost", "decoder_step.ort", no_residual_of_sum(f"{D1}.norms.2"), f"{D1}.norms.2/"),
    ("embedding scale", "decoder_step", no_scale("decoder.tokens"), "decoder.tokens/"),
    ("attention scale", "encoder", other_scale(f"{E1}.self_attention"), f"{E1}.self_attention/"),
    ("attention scale", "decoder_step.ort", other_scale(f"{D1}.self_attention"), f"{D1}.self_attention/"),
    ("heads", "encoder.ort", other_heads(f"{E0}.self_attention"), f"{E0}.self_attention/"),
    ("mask dropped", "encoder", no_mask(f"{E0}.self_attention"), f"{E0}.self_attention/"),
    ("mask dropped", "encoder.ort", no_mask(f"{E1}.self_attention"), f"{E1}.self_attention/"),
    ("mask dropped", "decoder_step", no_mask(f"{D1}.self_attention"), f"{D1}.self_attention/"),
    ("mask dropped", "decoder_step", no_mask(f"{D1}.cross_attention"), f"{D1}.cross_attention/"),
    ("mask dropped", "beam_step.ort", no_mask(f"{D0}.cross_attention"), f"{D0}.cross_attention/"),
    ("key for value", "decoder_step", key_for_value(f"{D1}.cross_attention"), f"{D1}.cross_attention/"),
    ("stale cache", "decoder_step", stale_cache(f"{D0}.self_attention"), f"{D0}.self_attention/"),
    ("stale cache", "beam_step.ort", stale_cache(f"{D1}.self_attention"), f"{D1}.self_attention/"),
    ("wrong slot", "decoder_step", other_slot, f"{D0}.self_attention/"),
    ("beams not followed", "beam_step.ort", beam_not_followed, f"{D0}.self_attention/"),
]  # fmt: skip
"""Of graphs in float32; those of the standard graphs are planted in half precision, too."""

QUANTIZED: list[tuple[str, str, Change, str]] = [
    ("weight scaled", "decoder_step.ort", scaled(f"{D1}.cross_attention.query.scale"), f"{D1}.cross_attention.query/"),
    ("weight scaled", "beam_step.ort", scaled("output.scale"), "output/"),
    ("layers swapped", "decoder_step.ort", swapped(D0, D1), f"{D0}.norms.0/"),
    ("modules swapped", "encoder.ort", swapped(f"{E0}.self_attention.output", f"{E1}.self_attention.output"), f"{E0}.self"),
    ("positions shifted", "decoder_step.ort", moved("decoder.positions.table"), "decoder.positions/"),
    ("eps", "beam_step.ort", other_eps("decoder.norm", SUM), "decoder.norm/"),
    ("bias lost", "encoder.ort", no_bias("decoder.layers.0.cross_attention.key.bias"), "cross/"),
    ("bias lost", "decoder_step.ort", no_bias(f"{D1}.feed_forward.output.bias"), f"{D1}.feed_forward.output/"),
    ("bias lost", "beam_step.ort", no_bias(f"{D0}.self_attention.query.bias"), f"{D0}.self_attention.query"),
    ("bias lost", "greedy_step.ort", no_bias("output_bias"), "BestToken_1"),
    ("residual lost", "decoder_step.ort", no_residual_of_sum(f"{D1}.norms.2"), f"{D1}.norms.2/"),
    ("attention scale", "decoder_step.ort", other_scale(f"{D1}.self_attention"), f"{D1}.self_attention/"),
    ("heads", "encoder.ort", other_heads(f"{E0}.self_attention"), f"{E0}.self_attention/"),
    ("mask dropped", "encoder.ort", no_mask(f"{E1}.self_attention"), f"{E1}.self_attention/"),
    ("mask dropped", "beam_step.ort", no_mask(f"{D0}.cross_attention"), f"{D0}.cross_attention/"),
    ("stale cache", "beam_step.ort", stale_cache(f"{D1}.self_attention"), f"{D1}.self_attention/"),
    ("beams not followed", "beam_step.ort", beam_not_followed, f"{D0}.self_attention/"),
]  # fmt: skip

STEPS: list[tuple[str, str, Change, str]] = [
    ("other tokens", "decoder_step.ort", other_ids, "planted/best.ids"),
    ("other tokens", "beam_step.ort", other_ids, "planted/best.ids"),
    ("other tokens", "greedy_step.ort", other_ids, "planted/best.ids"),
    ("other tokens", "decoder_step_attention.ort", other_ids, "planted/best.ids"),
    ("other tokens", "beam_step_attention.ort", other_ids, "planted/best.ids"),
    ("other tokens", "shortlist_decoder_step.ort", other_ids, "planted/best.ids"),
    ("other tokens", "shortlist_beam_step.ort", other_ids, "planted/best.ids"),
    ("tokens not banned", "greedy_step.ort", nothing_banned, "BestToken_1"),
    ("mask dropped", "decoder_step_attention.ort", attention_without("Where"), "Concat_1"),
    ("mask dropped", "beam_step_attention.ort", attention_without("Where"), "Concat_1"),
    ("attention scale", "beam_step_attention.ort", attention_without("Mul"), "Concat_1"),
    ("nothing left out", "shortlist_decoder_step.ort", nothing_left_out, "Add_1"),
    ("other words", "shortlist.ort", other_candidates, "Gather_1"),
]  # fmt: skip
"""Of float32 and int8."""

STANDARD_STEPS: list[tuple[str, str, Change, str]] = [
    ("other tokens", "decoder_step", other_ids, "planted/best.ids"),
    ("other tokens", "decoder_step_attention", other_ids, "planted/best.ids"),
    ("mask dropped", "decoder_step_attention", attention_without("Where"), "Concat_1"),
    ("other rows", "select_rows", other_rows, "Gather_1"),
    ("tokens not banned", "greedy_search", input_changed("bias", "Max", np.float32(0)), "GatherElements_1"),
    ("tokens not banned", "beam_search", input_changed("bias", "Max", np.float32(0)), "TopK_1"),
    ("scores left out", "beam_search", input_changed("scores", "Mul", np.float64(0)), "TopK_1"),
    ("ends go on", "beam_search", input_changed("leaving", "Mul", np.float32(0)), "GatherElements_"),
    ("beams not followed", "beam_search", input_changed("first_row", "Mul", np.int64(0)), "Or_1"),
    ("wrong slot", "beam_search", input_changed("own", "Add", np.int64(1)), "Or_1"),
    ("other tokens", "best_tokens", other_ids, "planted/best.ids"),
]  # fmt: skip

CUDA: list[tuple[str, str, Change, str]] = [
    ("weight scaled", "encoder.ort-cuda", scaled(f"{E1}.feed_forward.hidden.weight"), f"{E1}.feed_forward.hidden/"),
    ("weight scaled", "decoder_step.ort-cuda", scaled_together(f"{OWN}", "weight"), f"{OWN}.query_key_value/"),
    ("weight scaled", "beam_step.ort-cuda", scaled("output_weight"), "output/"),
    ("norm scaled", "decoder_step.ort-cuda", scaled(f"{D1}.norms.1.weight"), f"{D1}.norms.1/"),
    ("layers swapped", "decoder_step.ort-cuda", swapped(f"{D0}.norms", f"{D1}.norms"), f"{D0}.norms.0/"),
    ("positions shifted", "decoder_step.ort-cuda", moved("decoder.positions.table"), "decoder.positions/"),
    ("positions shifted", "beam_step.ort-cuda", moved("decoder.positions.table"), "decoder.positions/"),
    ("eps", "encoder.ort-cuda", other_eps(f"{E0}.norms.1", SKIP), f"{E0}.norms.1/"),
    ("eps", "beam_step.ort-cuda", other_eps("decoder.norm", SKIP), "decoder.norm/"),
    ("activation", "decoder_step.ort-cuda", other_activation(f"{D1}.feed_forward"), f"{D1}.feed_forward/"),
    # The bias of a projection is added where its sum is taken, which is before the next norm.
    ("bias lost", "decoder_step.ort-cuda", no_bias(f"{OWN}.output.bias"), f"{D1}.norms.1/"),
    ("bias lost", "beam_step.ort-cuda", scaled_together(f"{OWN}", "bias", 0), f"{OWN}.query_key_value/"),
    ("bias of another", "beam_step.ort-cuda", other_bias(f"{D1}.norms.1", f"{D0}.norms.0.bias"), f"{D1}.norms.1/"),
    ("residual lost", "decoder_step.ort-cuda", no_residual_of_skip(f"{D1}.norms.2"), f"{D1}.norms.2/"),
    ("embedding scale", "decoder_step.ort-cuda", no_scale("decoder.tokens"), "decoder.tokens/"),
    ("attention scale", "decoder_step.ort-cuda", other_scale(f"{D1}.cross_attention"), f"{D1}.cross_attention/"),
    ("attention scale", "decoder_step.ort-cuda", other_scale(OWN), f"{OWN}/"),
    ("heads", "beam_step.ort-cuda", other_flat_heads(f"{D1}.cross_attention"), f"{D1}.cross_attention/"),
    ("mask dropped", "encoder.ort-cuda", no_mask(f"{E0}.self_attention"), f"{E0}.self_attention/"),
    ("mask dropped", "decoder_step.ort-cuda", no_mask(f"{D1}.cross_attention"), f"{D1}.cross_attention/"),
    ("mask dropped", "beam_step.ort-cuda", no_mask(f"{D0}.self_attention"), f"{D0}.self_attention/"),
    ("key for value", "beam_step.ort-cuda", key_for_value(f"{D1}.cross_attention"), f"{D1}.cross_attention/"),
    ("stale cache", "beam_step.ort-cuda", stale_cache(OWN), f"{OWN}/"),
    ("wrong slot", "beam_step.ort-cuda", first_slot("slot"), f"{D0}.self_attention/"),
    ("wrong slot", "decoder_step.ort-cuda", first_slot("position"), f"{D0}.self_attention/"),
    ("beams not followed", "beam_step.ort-cuda", beam_not_followed, f"{D0}.self_attention/"),
    ("other tokens", "decoder_step.ort-cuda", other_ids, "planted/best.ids"),
    ("other tokens", "beam_step.ort-cuda", other_ids, "planted/best.ids"),
]  # fmt: skip
"""Of float32 and half precision, in which the cache of greedy search is written by another operator."""

PLANTED = [
    *(("float32", *fault) for fault in (*FAULTS, *STEPS, *STANDARD_STEPS, *CUDA)),
    *((precision, *fault) for precision in ("int8", "int4") for fault in QUANTIZED),
    *(("int8", *fault) for fault in STEPS),
    ("int8", "activation", "encoder.ort", no_activation(f"{E1}.feed_forward.output"), f"{E1}.feed_forward.output/"),
    ("int4", "activation", "encoder.ort", other_activation(f"{E1}.feed_forward"), f"{E1}.feed_forward/"),
    *(
        (precision, *fault)
        for precision in HALVES
        for fault in (*FAULTS, *STANDARD_STEPS, *CUDA)
        if not fault[1].endswith("ort")
    ),
]


def names_of(faults: Any) -> list[str]:
    return ["-".join((*fault[:-2], fault[-1])) for fault in faults]


@pytest.fixture
def mutant(clean: Bundle, tmp_path: Path) -> Callable[[contract.GraphSpec, Change], Path]:
    """A folder with the files of the clean bundle and a change to one graph."""

    def make(graph: contract.GraphSpec, change: Change) -> Path:
        folder = Path(shutil.copytree(clean.directory, tmp_path / "mutant"))
        proto = onnx.load(folder / graph.file, load_external_data=False)
        change(proto.graph)
        onnx.save(proto, folder / graph.file)
        return folder

    return make


@pytest.mark.sampled(every=20)
@pytest.mark.parametrize(("precision", "what", "name", "change", "named"), PLANTED, ids=names_of(PLANTED))
def test_a_planted_fault_is_named(
    mutant: Callable[..., Path],
    clean: Bundle,
    definitions: dict[Precision, Definition],
    precision: Precision,
    what: str,
    name: str,
    change: Change,
    named: str,
) -> None:
    graph = spec_of(clean, name, precision)
    folder = mutant(graph, change)
    for with_kernels in (False, True) if graph.dialect == "ort" else (False,):
        found = check_graph(definitions[precision], graph, folder, with_kernels=with_kernels)
        assert found.first is not None
        assert found.first.node.startswith(named), found.first


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_another_eps_of_the_size_of_checkpoints_is_found(
    mutant: Callable[..., Path], clean: Bundle, definitions: dict[Precision, Definition], precision: Precision
) -> None:
    """1e-5 in the place of 1e-6 changes the sixth digit of states whose variance is about 1."""
    graph = spec_of(clean, "decoder_step.ort", precision)
    folder = mutant(graph, other_eps(f"{D0}.norms.0", eps=1e-5))
    found = check_graph(definitions[precision], graph, folder)
    assert found.first is not None
    assert found.first.node.startswith(f"{D0}.norms.0/")
    assert found.first.error < 1e-4


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_number_that_is_none_is_a_fault(
    mutant: Callable[..., Path], clean: Bundle, definitions: dict[Precision, Definition], precision: Precision
) -> None:
    graph = spec_of(clean, "encoder.ort" if precision in ("int8", "int4") else "encoder", precision)
    folder = mutant(graph, scaled("encoder.layers.0.norms.0.weight", math.nan))
    found = check_graph(definitions[precision], graph, folder)
    assert found.first is not None
    assert found.first.node == "encoder.layers.0.norms.0/LayerNormalization_1"
    assert found.largest.share == math.inf
    assert json.dumps(found.to_dict(), allow_nan=False)


# --- parity, of which the graphs are a part


@pytest.fixture(scope="module")
def plain(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle in float32 with the graphs that every bundle has. Not to be changed."""
    return write_bundle(model, tmp_path_factory.mktemp("plain") / "bundle")


def mutant_of(bundle: Bundle, folder: Path, name: str, change: Change) -> Bundle:
    """A copy of a bundle with a change to one graph, whose manifest knows nothing of it but the checksum."""
    shutil.copytree(bundle.directory, folder)
    path = folder / f"{name}.onnx"
    proto = onnx.load(path, load_external_data=False)
    change(proto.graph)
    onnx.save(proto, path)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"][path.name] = {"sha256": file_sha256(path), "bytes": path.stat().st_size}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return open_bundle(folder)


DECODING = [fault for fault in FAULTS if fault[1] in ("encoder.ort", "decoder_step.ort", "beam_step.ort")]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("what", "name", "change", "named"), DECODING, ids=names_of(DECODING))
def test_a_planted_fault_in_what_decodes_here_shows_in_its_outputs(
    plain: Bundle, tmp_path: Path, what: str, name: str, change: Change, named: str
) -> None:
    bundle = mutant_of(plain, tmp_path / "mutant", name, change)
    searches = [SearchOptions(beam=beam, max_length=24) for beam in (1, 3)]
    reference, runtime = TorchRuntime.from_bundle(bundle), load_runtime("ort-cpu", bundle, threads=1)
    reports = compare_all(reference, [runtime], random_sources(bundle.config, 16), searches, random=True)
    failed = {report.beam for report in reports if not report.passed}
    assert failed == {"encoder.ort": {1, 3}, "decoder_step.ort": {1}, "beam_step.ort": {3}}[name]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["greedy_step.ort", "decoder_step", "select_rows"])
def test_a_fault_in_a_graph_that_is_not_decoded_with_fails_parity(plain: Bundle, tmp_path: Path, name: str) -> None:
    """Standard graphs are for other runtimes, and `parity` decodes with scores, which greedy search does not tell."""
    change = other_rows if name == "select_rows" else other_ids
    bundle = mutant_of(plain, tmp_path / "mutant", name, change)
    comparison = check(bundle.directory, None, ["ort-cpu"], beams=(3,), max_length=4, say=lambda _: None)
    assert all(report.passed for report in comparison.reports)
    assert {found.file for found in comparison.graphs["float32"] if found.first is not None} == {f"{name}.onnx"}
    assert not comparison.holds("float32")
    assert not comparison.passed


@pytest.mark.thorough
def test_the_clean_bundle_passes_parity(plain: Bundle) -> None:
    comparison = check(plain.directory, None, ["ort-cpu"], beams=(1, 3), max_length=24, say=lambda _: None)
    for report in comparison.reports:
        assert report.passed, report.failures
    assert comparison.holds("float32")
    assert comparison.passed


# --- a word that is masked by its bias


@pytest.fixture(scope="module")
def masked() -> Transformer:
    """A model with an output bias of -1e9 for word 1."""
    model = random_model(MODEL, seed=3)
    assert model.output_bias is not None
    model.output_bias.data[1] = -1e9
    return model


@pytest.fixture(scope="module")
def masked_bundle(masked: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Not to be changed."""
    return write_bundle(masked, tmp_path_factory.mktemp("masked") / "bundle")


def other_output_bias(model: Transformer, word: int, bias: float) -> Change:
    """A bias of the graph's own, with another number for one word."""

    def change(graph: Graph) -> None:
        assert model.output_bias is not None
        array = model.output_bias.detach().numpy().copy()
        array[word] = bias
        (tensor,) = [tensor for tensor in graph.initializer if tensor.name == "output_bias"]
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    return change


def test_a_model_with_a_masked_word_passes(masked: Transformer, masked_bundle: Bundle) -> None:
    comparison = check(masked_bundle.directory, None, ["ort-cpu"], beams=(1, 3), max_length=12, say=lambda _: None)
    assert comparison.passed
    for report in comparison.reports:
        assert report.allowed(report.logits) < 1e-3  # that of a bias of -1e9 is 477


WRONG_BIASES = [
    *((name, 10, 20.0) for name in ("decoder_step", "decoder_step.ort", "beam_step.ort", "greedy_step.ort")),
    *((name, 1, 5.0) for name in ("decoder_step", "decoder_step.ort", "beam_step.ort", "greedy_step.ort")),
    # Only graphs that return logits show these.
    *(("decoder_step.ort", *other) for other in ((10, 0.3), (1, -1e8), (1, -math.inf))),
]


@pytest.mark.parametrize(("name", "word", "bias"), WRONG_BIASES)
def test_a_wrong_logit_beside_a_masked_word_is_found(
    masked: Transformer, masked_bundle: Bundle, tmp_path: Path, name: str, word: int, bias: float
) -> None:
    bundle = mutant_of(masked_bundle, tmp_path / "mutant", name, other_output_bias(masked, word, bias))
    found = check_graph(
        definition_of(masked, "float32", bundle.directory), spec_of(bundle, name, "float32"), bundle.directory
    )
    assert [value for value in found.values if not value.holds and value.about.startswith("the graph's ")]


# --- weights that are not those of the files


def own_copy(name: str) -> Change:
    """A weight as a constant of the graph itself: nobody would compare it with the model."""

    def change(graph: Graph) -> None:
        (tensor,) = [tensor for tensor in graph.initializer if tensor.name == name]
        array = np.zeros(tensor.dims, helper.tensor_dtype_to_np_dtype(tensor.data_type))
        tensor.CopyFrom(numpy_helper.from_array(array, name))

    return change


def elsewhere(name: str, key: str, value: str | None = None) -> Change:
    """A weight that points to another tensor of the same shape, or to another file."""

    def change(graph: Graph) -> None:
        (tensor,) = [tensor for tensor in graph.initializer if tensor.name == name]
        (entry,) = [entry for entry in tensor.external_data if entry.key == key]
        entry.value = str(int(entry.value) + 96) if value is None else value

    return change


def renamed(graph: Graph) -> None:
    """A weight under a name that the file has not."""
    for tensor in graph.initializer:
        if tensor.name == "encoder.layers.0.feed_forward.hidden.weight":
            tensor.name = "other"
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = "other" if name == "encoder.layers.0.feed_forward.hidden.weight" else name


HIDDEN = "encoder.layers.0.feed_forward.hidden"
MISPLACED: list[tuple[Precision, str, Change, str]] = [
    ("float32", "encoder.ort", own_copy(f"{HIDDEN}.weight"), "which is stored in the graph"),
    ("float32", "encoder.ort", elsewhere(f"{HIDDEN}.weight", "offset"), "which is elsewhere in the weights file"),
    ("float32", "encoder.ort", elsewhere("encoder.tokens.weight", "location", "other.safetensors"), "elsewhere"),
    ("float32", "encoder", renamed, "which is not in the weights file"),
    ("float16", "encoder", own_copy(f"{HIDDEN}.weight"), "which is stored in the graph"),
    ("bfloat16", "encoder", elsewhere(f"{HIDDEN}.weight", "offset"), "which is elsewhere in the weights file"),
    ("int8", "encoder.ort", own_copy(f"{HIDDEN}.int8"), "which is stored in the graph"),
    ("int8", "encoder.ort", elsewhere("encoder.tokens.weight", "offset"), "which is elsewhere in the weights file"),
    ("int4", "encoder.ort", elsewhere(f"{HIDDEN}.int4", "offset"), "which is elsewhere in the weights file"),
]


@pytest.mark.parametrize(
    ("precision", "name", "change", "about"), MISPLACED, ids=[f"{m[0]}-{i}" for i, m in enumerate(MISPLACED)]
)
def test_a_weight_that_is_not_where_it_belongs_is_named(
    mutant: Callable[..., Path],
    clean: Bundle,
    definitions: dict[Precision, Definition],
    precision: Precision,
    name: str,
    change: Change,
    about: str,
) -> None:
    graph = spec_of(clean, name, precision)
    folder = mutant(graph, change)
    shutil.copy(folder / "weights.safetensors", folder / "other.safetensors")
    found = check_graph(definitions[precision], graph, folder)
    assert found.first is not None
    assert about in found.first.about or "cannot be read or run" in found.first.about


def test_rows_that_no_case_reads_are_not_taken_from_elsewhere(
    mutant: Callable[..., Path], clean: Bundle, definitions: dict[Precision, Definition]
) -> None:
    """A table of the graph's own is found though its numbers are right."""

    def change(graph: Graph) -> None:
        (tensor,) = [tensor for tensor in graph.initializer if tensor.name == "decoder.tokens.weight"]
        array = numpy_helper.to_array(tensor, base_dir=str(clean.directory))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    graph = spec_of(clean, "beam_step.ort", "float32")
    found = check_graph(definitions["float32"], graph, mutant(graph, change))
    wrong = [value for value in found.values if not value.holds]
    assert [value.about for value in wrong] == ["weights decoder.tokens.weight, which is stored in the graph"]
    assert wrong[0].node == "decoder.tokens/Gather_1"


@pytest.mark.parametrize(
    "name",
    [
        *("encoder", "decoder_step", "decoder_step.ort", "beam_step.ort"),
        *("encoder.ort-cuda", "decoder_step.ort-cuda", "beam_step.ort-cuda"),
    ],
)
def test_the_long_case_has_a_whole_source_beside_another(clean: Bundle, definitions: Any, name: str) -> None:
    """So that a mask is seen that ends too early, or is that of another sentence."""
    model = definitions["float32"].own
    sizes = sizes_of(model.config)[-1]
    lengths = case_of(model, spec_of(clean, name, "float32"), sizes, np.random.default_rng(1)).inputs["src_len"]
    assert lengths[0] == min(64, model.config.max_source_length)
    assert len(lengths) == 2


def test_a_module_whose_nodes_have_another_name_is_told(
    mutant: Callable[..., Path], clean: Bundle, definitions: dict[Precision, Definition]
) -> None:
    """What has no value in the graph is compared with nothing, so a renamed node is no way around the check."""

    def change(graph: Graph) -> None:
        for node in graph.node:
            node.name = node.name.replace("encoder.layers.0.feed_forward.hidden/", "encoder.layers.0.other/")

    graph = spec_of(clean, "encoder.ort", "float32")
    found = check_graph(definitions["float32"], graph, mutant(graph, change))
    assert found.first is not None
    assert (found.first.node, found.first.about) == ("encoder.layers.0.feed_forward.hidden", "no node of its name")


def test_weights_in_an_attribute_of_a_function_are_found(clean: Bundle, tmp_path: Path, definitions: Any) -> None:
    graph = spec_of(clean, "encoder.ort", "float32")
    folder = Path(shutil.copytree(clean.directory, tmp_path / "mutant"))
    proto = onnx.load(folder / graph.file, load_external_data=False)
    (function,) = [function for function in proto.functions if function.name == "Linear"]
    table = numpy_helper.from_array(np.zeros((9, 9), np.float32))
    function.node.insert(0, helper.make_node("Constant", [], ["hidden"], name="hidden", value=table))
    onnx.save(proto, folder / graph.file)
    found = check_graph(definitions["float32"], graph, folder)
    assert [value.about for value in found.values if not value.holds] == ["weights in an attribute"]


# --- what is told


def test_a_graph_that_cannot_be_run_is_a_fault(clean: Bundle, tmp_path: Path, definitions: Any) -> None:
    graph = spec_of(clean, "encoder.ort", "float32")
    for content in (b"", b"no graph", (clean.directory / graph.file).read_bytes()[:-3000]):
        folder = tmp_path / str(len(content))
        folder.mkdir()
        shutil.copy(clean.directory / "weights.safetensors", folder)
        (folder / graph.file).write_bytes(content)
        found = check_graph(definitions["float32"], graph, folder)
        assert found.first is not None
        assert found.first.about.startswith("cannot be read or run: ")
        assert json.dumps(found.to_dict(), allow_nan=False)


def test_a_tolerance_takes_the_place_of_what_rounding_explains(clean: Bundle, definitions: Any) -> None:
    graph = spec_of(clean, "encoder.ort", "float32")
    loose, none = (
        check_graph(definitions["float32"], graph, clean.directory, tolerance=tolerance) for tolerance in (1.0, 0.0)
    )
    assert {value.allowed for value in loose.values} == {1.0}
    assert loose.first is None
    assert none.first is not None


def test_what_is_told_of_values() -> None:
    right, off = Compared("a/Add_1", "output of a", 0.5, 0.1, 1.0), Compared("b/Add_1", "output of b", 3.0, 0.1, 1.0)
    nothing = Compared("c/Add_1", "output of c", math.nan, 0.1, 1.0)
    assert (right.holds, off.holds, nothing.holds) == (True, False, False)
    assert (right.share, off.share, nothing.share) == (0.5, 3.0, math.inf)
    found = GraphCheck("encoder.onnx", (right, off, nothing))
    assert (found.first, found.largest) == (off, nothing)
    told = found.to_dict()
    assert told["first"]["node"] == "b/Add_1"
    assert [value["error"] for value in told["values"]] == [0.5, 3.0, None]
    assert found.to_dict(values=False).keys() == {"file", "with_kernels", "first"}
    assert GraphCheck("encoder.onnx", (right,)).first is None
