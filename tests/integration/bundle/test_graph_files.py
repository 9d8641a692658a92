"""Graphs that ask for more than a bundle's graphs do are refused before ONNX Runtime reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from makers.ort_bundles import CONFIG, random_model, write_bundle
from makers.tiny import randomised
from tfexport.bundle.graph_files import ATTRIBUTES, CONTRIB, FUNCTIONS, ONNX, OPERATORS, check_graph_file
from tfexport.bundle.reader import open_bundle
from tfexport.bundle.writer import write_manifest
from tfexport.contract import PRECISIONS
from tfexport.errors import BundleError
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.weights import write_variant, write_weights
from tfexport.models.model import EncoderClassifier

WEIGHTS = {"weights.safetensors": 1000}
FLOAT = TensorProto.FLOAT


def constant(name: str, *numbers: int) -> TensorProto:
    return numpy_helper.from_array(np.array(numbers, np.int64), name)


def stored(name: str, dims: Sequence[int], **place: str) -> TensorProto:
    """A float32 tensor in a file of weights."""
    tensor = TensorProto(name=name, dims=dims, data_type=FLOAT, data_location=TensorProto.EXTERNAL)
    size = 4 * int(np.prod([float(size) for size in dims]))
    told = {"location": "weights.safetensors", "offset": "100", "length": str(size), **place}
    for key, value in told.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def model(
    *nodes: onnx.NodeProto, weights: Sequence[TensorProto] = (), functions: Sequence[onnx.FunctionProto] = ()
) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", FLOAT, ["rows", 4])]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", FLOAT, None)], weights)
    return helper.make_model(graph, functions=functions, doc_string="x" * 200)


def function(name: str, *nodes: onnx.NodeProto, domain: str = "tfexport") -> onnx.FunctionProto:
    return helper.make_function(domain, name, ["a"], ["b"], nodes, [helper.make_opsetid("", 24)])


def subgraph() -> onnx.GraphProto:
    true = helper.make_node("Identity", ["go"], ["on"])
    boolean = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("go", "on")]
    count = helper.make_tensor_value_info("i", TensorProto.INT64, [])
    return helper.make_graph([true], "body", [count, boolean[0]], [boolean[1]])


def expand(*numbers: int, value: str = "one") -> onnx.ModelProto:
    one = numpy_helper.from_array(np.array(1, np.float32), "one")
    return model(helper.make_node("Expand", [value, "shape"], ["y"]), weights=[one, constant("shape", *numbers)])


def expand_to_computed_size() -> onnx.ModelProto:
    square = helper.make_node("Mul", ["n", "n"], ["shape"])
    return model(square, helper.make_node("Expand", ["x", "shape"], ["y"]), weights=[constant("n", 2**16)])


def range_to_constant() -> onnx.ModelProto:
    nodes = [helper.make_node("Range", ["zero", "many", "one"], ["y"])]
    return model(*nodes, weights=[constant("zero", 0), constant("one", 1), constant("many", 2**31)])


def range_from_constant(*, start: int = 0, delta: int = 1) -> onnx.ModelProto:
    """To a size of the input."""
    nodes = [
        helper.make_node("Shape", ["x"], ["size"], start=0, end=1),
        helper.make_node("Squeeze", ["size"], ["end"]),
        helper.make_node("Range", ["begin", "end", "by"], ["y"]),
    ]
    return model(*nodes, weights=[constant("begin", start), constant("by", delta)])


def range_from_computed() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Mul", ["many", "many"], ["begin"]),
        helper.make_node("Range", ["begin", "one", "one"], ["y"]),
    ]
    return model(*nodes, weights=[constant("many", 2**16), constant("one", 1)])


def expand_to_a_power(nested: bool) -> onnx.ModelProto:
    """Of the size of a weight of 144 numbers: 8 axes of 12."""
    parts = ["size"] * (2 if nested else 4)
    nodes = [helper.make_node("Shape", ["w"], ["size"]), helper.make_node("Concat", parts, ["square"], axis=0)]
    if nested:
        nodes.append(helper.make_node("Concat", ["square", "square"], ["sizes"], axis=0))
    nodes.append(helper.make_node("Expand", ["x", "sizes" if nested else "square"], ["y"]))
    return model(*nodes, weights=[numpy_helper.from_array(np.zeros((12, 12), np.float32), "w")])


LEAST = -(2**63)


def divided(by: str, *, n: int = LEAST) -> onnx.ModelProto:
    """`y` = `n` / `by`, of whole numbers."""
    nodes = [
        helper.make_node("Shape", ["x"], ["rows"], end=1),
        helper.make_node("Shape", ["none"], ["zero"]),  # of a weight without numbers
        helper.make_node("Shape", ["src_len"], ["batch"]),
        helper.make_node("Mul", ["rows", "minus"], ["product"]),
        helper.make_node("Max", ["minus", "minus"], ["largest"]),
        helper.make_node("Div", ["n" if n else "rows", by], ["y"]),
    ]
    none = numpy_helper.from_array(np.zeros((0,), np.float32), "none")
    return model(*nodes, weights=[none, constant("n", n), constant("minus", -1)])


def divided_by_a_size_made_later() -> onnx.ModelProto:
    nodes = [
        *(helper.make_node("Shape", [name], [f"size of {name}"]) for name in ("x", "src_len")),
        helper.make_node("Div", ["size of x", "size of src_len"], ["y"]),
        helper.make_node("Compress", ["x", "no"], ["src_len"], axis=0),
    ]
    return model(*nodes)


def divided_by_found(*, made: bool) -> onnx.ModelProto:
    """By what has the name of an input."""
    nodes = [helper.make_node("Shape", ["none"], ["found"])] if made else []
    none = numpy_helper.from_array(np.zeros((0,), np.float32), "none")
    nodes.append(helper.make_node("Div", ["x", "found"], ["y"]))
    return model(*nodes, weights=[none] if made else [constant("found", -1)])


def divided_in_a_function(size: str = "src_len") -> onnx.ModelProto:
    nodes = [helper.make_node("Shape", ["src_len"], [name]) for name in "cd"] if size == "src_len" else []
    divided = ["c", "d"] if nodes else ["found", "found"]
    body = function("Linear", *nodes, helper.make_node("Div", divided, ["b"]))
    body.input[0] = size
    return model(helper.make_node("Linear", ["x"], ["y"], domain="tfexport"), functions=[body])


def divided_by_a_constant_in_a_function() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Constant", [], ["zero"], value=constant("zero", 0)),
        helper.make_node("Div", ["a", "zero"], ["b"]),
    ]
    return model(helper.make_node("Linear", ["x"], ["y"], domain="tfexport"), functions=[function("Linear", *nodes)])


def range_in_a_function(*attributes: onnx.AttributeProto, default: int | None = None) -> onnx.ModelProto:
    """To a constant with these attributes."""
    ends = helper.make_node("Constant", [], ["end"])
    ends.attribute.extend(attributes)
    nodes = [
        *(helper.make_node("Constant", [], [name], value=constant("", n)) for name, n in (("zero", 0), ("one", 1))),
        *(ends, helper.make_node("Range", ["zero", "end", "one"], ["b"])),
    ]
    ranges = function("Linear", *nodes)
    if default is not None:
        ranges.attribute_proto.append(value_of(default))
    return model(helper.make_node("Linear", ["x"], ["y"], domain="tfexport"), functions=[ranges])


def range_to_a_constant_made_again() -> onnx.ModelProto:
    ends = [helper.make_node("Constant", [], ["end"], value=constant("", n)) for n in (1, 2**31)]
    range_to_it = helper.make_node("Range", ["zero", "end", "one"], ["y"])
    return model(ends[0], range_to_it, ends[1], weights=[constant("zero", 0), constant("one", 1)])


def value_of(number: int, name: str = "value", **fields: Any) -> onnx.AttributeProto:
    """A tensor as an attribute."""
    attribute = helper.make_attribute(name, constant("", number))
    for field, value in fields.items():
        setattr(attribute, field, value)
    return attribute


def padded(*numbers: int, value: str = "w", times: int = 1) -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.zeros((1, 4), np.float32), "w")
    nodes = [helper.make_node("Pad", [value, "pads"], [f"y{index}"]) for index in range(times)]
    return model(*nodes, weights=[weight, constant("pads", *numbers)])


def loop() -> onnx.ModelProto:
    return model(helper.make_node("Loop", ["", "go"], ["y"], body=subgraph()))


def smuggled_subgraph() -> onnx.ModelProto:
    return model(helper.make_node("Identity", ["x"], ["y"], body=subgraph()))


def doubling() -> onnx.ModelProto:
    """Functions of which each calls the one before it twice."""
    functions = [function("f0", helper.make_node("Identity", ["a"], ["b"]))]
    for index in range(25):
        calls = [helper.make_node(f"f{index}", [one], [other], domain="tfexport") for one, other in ("ac", "cb")]
        functions.append(function(f"f{index + 1}", *calls))
    return model(helper.make_node("f25", ["x"], ["y"], domain="tfexport"), functions=functions)


def doubling_under_our_names() -> onnx.ModelProto:
    calls = [helper.make_node("Linear", [one], [other], domain="tfexport") for one, other in ("ac", "cb")]
    functions = [function("Linear", helper.make_node("Identity", ["a"], ["b"])), function("BestTokens", *calls)]
    return model(helper.make_node("BestTokens", ["x"], ["y"], domain="tfexport"), functions=functions)


def many_calls_of_a_long_function() -> onnx.ModelProto:
    body = [helper.make_node("Identity", ["a"], [f"v{index}"]) for index in range(200)]
    calls = [helper.make_node("Linear", ["x"], [f"y{index}"], domain="tfexport") for index in range(200)]
    return model(*calls, functions=[function("Linear", *body)])


def tensor_of_two_gigabytes() -> onnx.ModelProto:
    tensor = TensorProto(name="w", dims=[2**29], data_type=FLOAT, raw_data=b"abcd")
    return model(helper.make_node("Add", ["x", "w"], ["y"]), weights=[tensor])


def constant_node() -> onnx.ModelProto:
    tensor = TensorProto(name="w", dims=[2**29], data_type=FLOAT, raw_data=b"abcd")
    return model(helper.make_node("Constant", [], ["y"], value=tensor))


def adding(tensor: TensorProto, times: int = 1) -> Callable[[], onnx.ModelProto]:
    return lambda: model(helper.make_node("Add", ["x", "w"], ["y"]), weights=[tensor] * times)


REFUSED: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "ConstantOfShape": (
        lambda: model(helper.make_node("ConstantOfShape", ["n"], ["y"]), weights=[constant("n", 2**31)]),
        "the operator ConstantOfShape",
    ),
    "Expand": (lambda: expand(2**31), "a size that no weights have"),
    "Expand to two axes": (lambda: expand(2**16, 2**16), "a shape that is a constant"),
    "Expand an input": (lambda: expand(2**31, value="x"), "a shape that is a constant"),
    "Expand to what is computed": (expand_to_computed_size, "a size that is computed"),
    "Range": (range_to_constant, "a size that is a constant"),
    "Range from far below": (lambda: range_from_constant(start=-(2**31)), "a size that is a constant"),
    "Range in small steps": (lambda: range_from_constant(delta=-(2**40)), "a size that is a constant"),
    "Range from what is computed": (range_from_computed, "has a start or step that is computed"),
    "Expand to a power": (lambda: expand_to_a_power(nested=False), "a size of too many parts"),
    "Expand to a power of a power": (lambda: expand_to_a_power(nested=True), "a size of too many parts"),
    "Pad": (lambda: padded(0, 0, 2**31, 0), "pads by"),
    "Pad by less": (lambda: padded(0, 0, -1, 0), "pads by"),
    "Pad all axes": (lambda: padded(0, 0, 15, 15), "pads more than the rows"),
    "Pad more axes": (lambda: padded(0, 0, 0, 0, 9, 9, 9, 9), "pads more than the rows"),
    "Pad an input": (lambda: padded(0, 0, 9, 0, value="x"), "pads more than the rows of a weight"),
    "Pad again": (lambda: padded(0, 0, 9, 0, times=2), "pads more than the rows of a weight"),
    **{
        f"Div by {by}": (lambda by=by: divided(by), "divides by a number that may be 0 or -1")
        for by in ("minus", "product", "largest", "zero", "batch", "x", "nothing")
    },
    "Div of sizes by none": (lambda: divided("zero", n=0), "divides by a number that may be 0 or -1"),
    "Div by a size made later": (divided_by_a_size_made_later, "divides by a number that may be 0 or -1"),
    "Div by a constant found": (lambda: divided_by_found(made=False), "divides by a number that may be 0 or -1"),
    "Div by a size found": (lambda: divided_by_found(made=True), "divides by a number that may be 0 or -1"),
    "Div in a function": (divided_in_a_function, "divides by a number that may be 0 or -1"),
    "Div by found in a function": (lambda: divided_in_a_function("found"), "divides by a number that may be 0 or -1"),
    "Div by a constant in a function": (divided_by_a_constant_in_a_function, "divides by a number that may be 0 or -1"),
    "Loop": (loop, "the operator Loop"),
    "a graph in another operator": (smuggled_subgraph, "the attribute 'body'"),
    "an operator of another domain": (
        lambda: model(helper.make_node("MatMul", ["x", "x"], ["y"], domain="ai.onnx.ml")),
        "the operator ai.onnx.ml.MatMul",
    ),
    "functions that double": (doubling, "the function tfexport.f0"),
    "functions that call functions": (doubling_under_our_names, "the operator tfexport.Linear"),
    "a function of another domain": (
        lambda: model(functions=[function("Linear", domain="other")]),
        "the function other.Linear",
    ),
    "many calls": (many_calls_of_a_long_function, "nodes when its functions are expanded"),
    "a tensor larger than its bytes": (tensor_of_two_gigabytes, "another size than it declares"),
    "a constant larger than its bytes": (constant_node, "another size than it declares"),
    "a constant that a call replaces": (
        lambda: range_in_a_function(value_of(1, ref_attr_name="value")),
        "a tensor that is not its value",
    ),
    "a constant that a default replaces": (
        lambda: range_in_a_function(value_of(1, ref_attr_name="value"), default=2**31),
        "its function Linear has a tensor as a default",
    ),
    "two constants in one": (
        lambda: range_in_a_function(value_of(2**31), value_of(1, ref_attr_name="alpha")),
        "a tensor that is not its value",
    ),
    "a constant under another name": (
        lambda: range_in_a_function(value_of(1, "axis")),
        "a tensor that is not its value",
    ),
    "a constant of another type": (
        lambda: range_in_a_function(value_of(1, type=onnx.AttributeProto.INT, i=2**31)),
        "a tensor that is not its value",
    ),
    "a constant made again": (range_to_a_constant_made_again, "makes the value 'end' twice"),
    "a sparse tensor": (lambda: sparse(), "parts other than nodes and weights"),
    "a file that is not listed": (adding(stored("w", [4], location="other.safetensors")), "does not list"),
    "a file elsewhere": (adding(stored("w", [4], location="../weights.safetensors")), "does not list"),
    "beyond the end of the file": (adding(stored("w", [4], offset="990")), "another size than its part"),
    "a length that is not that of the shape": (adding(stored("w", [4], length="999")), "another size than its part"),
    "a shape larger than the file": (adding(stored("w", [2**31, 2**20])), "another size than its part"),
    "a size below 0": (adding(stored("w", [-4], length="16")), "a type or shape that no weight has"),
    "an offset below 0": (adding(stored("w", [4], offset="-16")), "cannot be read"),
    "the same bytes many times": (adding(stored("w", [200]), 4), "larger than the files"),
    "text": (lambda: b"hello", "cannot be parsed"),  # type: ignore[dict-item, return-value]
}


def sparse() -> onnx.ModelProto:
    found = model()
    found.graph.sparse_initializer.add(dims=[2**31])
    return found


def test_a_pipe_in_the_place_of_a_graph_is_refused(tmp_path: Path) -> None:
    """It may come there after the checksums were compared."""
    os.mkfifo(tmp_path / "encoder.onnx")
    with pytest.raises(BundleError, match="not a regular file"):
        check_graph_file(tmp_path / "encoder.onnx", WEIGHTS)


def checked(folder: Path, content: onnx.ModelProto | bytes) -> None:
    path = folder / "encoder.onnx"
    path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
    check_graph_file(path, WEIGHTS)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_exporter_does_not_write_is_refused(tmp_path: Path, name: str) -> None:
    make, problem = REFUSED[name]
    with pytest.raises(BundleError, match=r"encoder\.onnx is not a graph that tfexport writes") as caught:
        checked(tmp_path, make())
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_exporter_writes_is_taken(tmp_path: Path) -> None:
    ones = constant("ones", 1, 1)
    scalar = numpy_helper.from_array(np.array(0, np.float32), "zero")
    weight = stored("w", [5, 4])
    nodes = [
        helper.make_node("Shape", ["x"], ["size"]),
        helper.make_node("Concat", ["ones", "size"], ["sizes"], axis=0),
        helper.make_node("Expand", ["x", "sizes"], ["large"]),
        helper.make_node("Expand", ["zero", "five"], ["zeros"]),
        helper.make_node("Pad", ["w", "rows"], ["padded"]),
        helper.make_node("Squeeze", ["size"], ["end"]),
        helper.make_node("Range", ["nought", "end", "one"], ["places"]),
        helper.make_node("Linear", ["large"], ["y"], domain="tfexport"),
        helper.make_node("Shape", ["src_len"], ["batch"]),
        helper.make_node("Div", ["size", "batch"], ["beam"]),
        helper.make_node("Div", ["places", "found"], ["parents"]),
        helper.make_node("Mul", ["x", "zero"], ["scale"]),
        helper.make_node("Div", ["x", "scale"], ["rounded"]),
    ]
    body = [
        helper.make_node("Constant", [], ["c"], value=constant("c", 2)),
        helper.make_node("Constant", [], ["half"], value=numpy_helper.from_array(np.array(0.5, np.float32), "half")),
        helper.make_node("Div", ["a", "half"], ["b"]),
    ]
    checked(
        tmp_path,
        model(
            *nodes,
            weights=[
                *(ones, scalar, weight, constant("five", 5), constant("rows", 0, 0, 11, 0)),
                *(constant("nought", 0), constant("one", 1)),
            ],
            functions=[function("Linear", *body)],
        ),
    )


MODELS: tuple[dict[str, Any], ...] = (
    {"d_model": 64, "n_heads": 4, "d_ff": 128, "tgt_vocab_size": 2600},  # with kernels for attention, and screened
    {
        "d_model": 64,
        "n_heads": 4,
        "positions": "relative",
        "max_distance": 4,
        "norm": "rms",
        "gated": True,
        "activation": "gelu",
    },
    {"n_heads": 6, "position_offset": 3, "activation": "silu", "attention_bias": False, "embedding_norm": True},
    {"norm_first": True, "final_norm": True, "activation": "gelu_tanh", "output_bias": True, "feed_forward": "conv1d"},
)
"""That have all operators together."""


def written_names(folder: Path) -> set[tuple[str, str]]:
    """The operators, functions and attributes in the graphs of a bundle, each of which is taken."""
    found = set[tuple[str, str]]()
    bundle = open_bundle(folder)
    for graph in bundle.graphs:
        path = bundle.graph(graph.role, graph.precision, graph.dialect)
        proto = onnx.load(path, load_external_data=False)
        for node in (*proto.graph.node, *(node for function in proto.functions for node in function.node)):
            found.add((node.domain, node.op_type))
            found |= {("attribute", attribute.name) for attribute in node.attribute}
    return found


@pytest.mark.thorough
def test_what_is_taken_is_what_the_exporter_writes(tmp_path: Path) -> None:
    """In all dialects and precisions; nothing is taken that no graph has."""
    found = set[tuple[str, str]]()
    for index, changes in enumerate(MODELS):
        folder = tmp_path / str(index)
        write_bundle(
            random_model(CONFIG.replace(**changes)), folder, tuple(PRECISIONS.values()), alignments=True, shortlist=True
        )
        found |= written_names(folder)
    kept = random_model(CONFIG)
    folder, paths = tmp_path / "kept", [path for path, _ in kept.named_modules() if "attention" in path]
    folder.mkdir()
    write_weights(kept, "float32", folder)
    graphs = []
    for precision in ("float16", "int8", "int4"):
        write_variant(kept, precision, folder, paths)
        graphs += write_graphs(kept.config, precision, folder, paths, alignments=True)
    write_manifest(folder, kept.config, graphs, {"source": {"sha256": "", "family": "native", "given": {}}})
    found |= written_names(folder)
    config = CONFIG.replace(n_classes=5, n_decoder_layers=0, tgt_vocab_size=0)
    classifier, folder = randomised(EncoderClassifier(config)), tmp_path / "classifier"
    folder.mkdir()
    write_weights(classifier, "float32", folder)
    graphs = write_graphs(config, "float32", folder)
    write_manifest(folder, config, graphs, {"source": {"sha256": "", "family": "native", "given": {}}})
    found |= written_names(folder)
    assert {name for domain, name in found if domain == ONNX} == OPERATORS[ONNX]
    assert {name for domain, name in found if domain == CONTRIB} == OPERATORS[CONTRIB]
    assert {name for domain, name in found if domain == "tfexport"} == FUNCTIONS
    assert {name for domain, name in found if domain == "attribute"} == ATTRIBUTES
