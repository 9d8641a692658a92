"""ONNX models of which one thing is another one: a node, a weight, an input, or a part that asks for memory without end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_SIZES = ("-1", "0", "4", "1099511627776", str(2**63 - 1), "x", "")
_PLACES = ("../../etc/passwd", "/etc/passwd", "manifest.json", "", "missing", "/dev/zero", "a/../../b", "encoder.onnx")
_HUGE = (2**31, 2**31 - 1, 2**40, 2**62, 10**6, -1)


def other_graph(chosen: random.Random, data: bytes) -> bytes:
    """A mutation of an ONNX model, still an ONNX model."""
    model = onnx.ModelProto.FromString(data)
    for _ in range(chosen.choice((1, 1, 1, 2))):
        chosen.choice(_CHANGES)(chosen, model)
    return model.SerializeToString()


def _place(chosen: random.Random, model: Any) -> None:
    weights = [tensor for tensor in model.graph.initializer if tensor.external_data]
    if weights:
        entry = chosen.choice(chosen.choice(weights).external_data)
        entry.value = chosen.choice(_PLACES if entry.key == "location" else _SIZES)


def _operator(chosen: random.Random, model: Any) -> None:
    node = chosen.choice(model.graph.node)
    node.op_type = chosen.choice(
        ("MatMul", "Loop", "If", "Identity", "RandomNormal", "Nothing", "Expand", "Range", "Tile")
    )


def _wire(chosen: random.Random, model: Any) -> None:
    nodes = model.graph.node
    node = chosen.choice(nodes)
    if node.input:
        other = chosen.choice(nodes).output
        node.input[chosen.randrange(len(node.input))] = chosen.choice(["", "nothing", *other])


def _dims(chosen: random.Random, model: Any) -> None:
    tensor = chosen.choice(model.graph.initializer)
    tensor.dims[:] = [chosen.choice((0, 1, 7, 2**31, 2**62, -1)) for _ in range(chosen.randint(0, 3))]


def _removed(chosen: random.Random, model: Any) -> None:
    if len(model.graph.node) > 1:
        del model.graph.node[chosen.randrange(len(model.graph.node))]


def _attribute(chosen: random.Random, model: Any) -> None:
    nodes = [node for node in model.graph.node if node.attribute]
    if nodes:
        attribute = chosen.choice(chosen.choice(nodes).attribute)
        attribute.i, attribute.f = chosen.choice((-1, 0, 2**40, 3)), chosen.choice((float("nan"), 0.0, -1.0))


def _name(chosen: random.Random, model: Any) -> None:
    value = chosen.choice([*model.graph.input, *model.graph.output])
    value.name = chosen.choice(("x", "", value.name + "x"))


def _constant(chosen: random.Random, model: Any) -> None:
    """Another number in a constant of whole numbers, such as a shape."""
    tensors = [t for t in model.graph.initializer if t.data_type == TensorProto.INT64 and t.raw_data]
    if tensors:
        tensor = chosen.choice(tensors)
        numbers = numpy_helper.to_array(tensor).copy()
        if numbers.size:
            numbers.flat[chosen.randrange(numbers.size)] = chosen.choice(_HUGE)
            tensor.raw_data = numbers.tobytes()


def _grown(chosen: random.Random, model: Any) -> None:
    """A node whose output has a size that the graph says itself."""
    size = chosen.choice(_HUGE)
    shape = [size] if chosen.random() < 0.5 else [2**16, 2**16]
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.array(shape, np.int64), "fuzz.shape"),
            numpy_helper.from_array(np.array(size, np.int64), "fuzz.size"),
            numpy_helper.from_array(np.array(0, np.int64), "fuzz.zero"),
            numpy_helper.from_array(np.array(1, np.int64), "fuzz.one"),
            numpy_helper.from_array(np.array(1, np.float32), "fuzz.float"),
            numpy_helper.from_array(np.array([0, size], np.int64), "fuzz.pads"),
            numpy_helper.from_array(np.ones(1, np.float32), "fuzz.vector"),
        ]
    )
    kinds: tuple[tuple[str, list[str]], ...] = (
        ("ConstantOfShape", ["fuzz.shape"]),
        ("Expand", ["fuzz.float", "fuzz.shape"]),
        ("Range", ["fuzz.zero", "fuzz.size", "fuzz.one"]),
        ("Pad", ["fuzz.vector", "fuzz.pads"]),
        ("Tile", ["fuzz.vector", "fuzz.shape"]),
        ("RandomNormalLike", ["fuzz.float"]),
    )
    operator, inputs = chosen.choice(kinds)
    _insert(chosen, model, helper.make_node(operator, inputs, ["fuzz.grown"]))


def _endless(chosen: random.Random, model: Any) -> None:
    """A loop that has no reason to end, or that ends after many rounds."""
    boolean = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("go", "on")]
    count = helper.make_tensor_value_info("i", TensorProto.INT64, [])
    body = helper.make_graph([helper.make_node("Identity", ["go"], ["on"])], "b", [count, boolean[0]], [boolean[1]])
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "fuzz.true"))
    node = helper.make_node("Loop", ["", "fuzz.true"], [], body=body)
    if chosen.random() < 0.5:
        node = helper.make_node("Identity", ["fuzz.true"], ["fuzz.same"], body=body)
    _insert(chosen, model, node)


def _doubling(chosen: random.Random, model: Any) -> None:
    """Functions of which each calls the one before it twice, under other names or under our own."""
    ours = [function.name for function in model.functions]
    names = ours if ours and chosen.random() < 0.5 else [f"F{index}" for index in range(25)]
    imports = [helper.make_opsetid("", 24), helper.make_opsetid("tfexport", 1)]
    del model.functions[:]
    before = helper.make_node("Identity", ["a"], ["b"])
    for name in names:
        after = helper.make_node(before.op_type, ["b"], ["c"], domain=before.domain)
        model.functions.append(helper.make_function("tfexport", name, ["a"], ["c"], [before, after], imports))
        before = helper.make_node(name, ["a"], ["b"], domain="tfexport")
    if not any(opset.domain == "tfexport" for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid("tfexport", 1))
    model.graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), "fuzz.float"))
    _insert(chosen, model, helper.make_node(names[-1], ["fuzz.float"], ["fuzz.doubled"], domain="tfexport"))


def _insert(chosen: random.Random, model: Any, node: Any) -> None:
    """Put a node first; perhaps another one reads what it computes."""
    model.graph.node.insert(0, node)
    if node.output and len(model.graph.node) > 1 and chosen.random() < 0.7:
        reader = model.graph.node[chosen.randrange(1, len(model.graph.node))]
        if reader.input:
            reader.input[chosen.randrange(len(reader.input))] = node.output[0]


def _nested(chosen: random.Random, model: Any) -> None:
    """A tensor as an attribute, in the file or elsewhere."""
    tensor = TensorProto(name="t", data_type=TensorProto.FLOAT, dims=[chosen.choice(_HUGE)], raw_data=b"abcd")
    if chosen.random() < 0.5:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=chosen.choice(_PLACES))
    _insert(chosen, model, helper.make_node("Constant", [], ["fuzz.constant"], value=tensor))


_CHANGES: tuple[Callable[[random.Random, Any], None], ...] = (
    *(_place, _operator, _wire, _dims, _removed, _attribute, _name),
    *(_constant, _grown, _grown, _endless, _doubling, _nested),
)
