"""Checks of a bundle's graphs before ONNX Runtime reads them. Only graphs that `tfexport export` writes are accepted.

A graph is a program. A few kilobytes of ONNX can request any amount of memory and time, with a shape of 2^31, an endless
loop, or functions that call each other. A bundle's graphs come from this package, so their operators are known.
`OPERATORS`, `FUNCTIONS` and `ATTRIBUTES` list them. A test compares the lists with the exporter's graphs.

protobuf, a dependency of ONNX Runtime, parses the file. The message classes contain only the fields that the checks need.
The package onnx is not needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from tfexport.errors import BundleError
from tfexport.system.regular_files import read_bytes

ONNX, CONTRIB, OWN = "", "com.microsoft", "tfexport"
"""Domains of the standard operators, of ONNX Runtime's operators, and of this package's functions."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


OPERATORS: Mapping[str, frozenset[str]] = {
    ONNX: _names(
        "Abs Add Attention BitwiseXor Cast Clip Compress Concat Constant CumSum DequantizeLinear Div Equal Exp Expand "
        "Flatten Gather GatherElements Gelu Gemm Greater Identity LayerNormalization Less Log LogSoftmax MatMul Max Mul "
        "NonZero Not Or Pad QuantizeLinear RMSNormalization Range ReduceL2 ReduceMax ReduceMin ReduceSum Relu Reshape "
        "ScatterElements ScatterND Shape Sigmoid Slice Softmax Split Squeeze Sub TensorScatter TopK Transpose "
        "Unsqueeze Where"
    ),
    CONTRIB: _names(
        "BiasGelu FastGelu GroupQueryAttention MatMulIntegerToFloat MatMulNBits MultiHeadAttention QuickGelu "
        "SkipLayerNormalization SkipSimplifiedLayerNormalization"
    ),
}
"""The operators that the exporter emits, by domain."""

FUNCTIONS = _names(
    "BeamAttention BestToken BestTokens CrossAttention GreedyAttention Int8Linear Int8LinearRectified Linear "
    "LinearRectified ResidualNorm ScreenBest ScreenProduct ScreenStates SourceAttention"
)
"""The functions that the exporter defines. Their nodes are operators; no function calls another one."""

ATTRIBUTES = _names(
    "accuracy_level alpha approximate axis bits block_size end epsilon keepdims kv_num_heads largest mask_filter_value mode "
    "num_heads num_outputs perm q_num_heads scale start to transB value K N"
)
"""The attributes of nodes. None of them is a graph."""

BYTES_OF_A_NODE = 8
"""Minimum file size per node, counted after functions are expanded. The exporter's graphs have 16 bytes and more."""
MOST_PADDING = 47
"""Maximum number of rows that Pad adds to a weight. The exporter pads to multiples of its row blocks."""
MOST_SHAPES = 2
"""Maximum number of values whose sizes make up one shape: the rows of one value, and those of another."""
_MOST_PARTS = 16
"""Maximum number of values that a shape is computed from."""
_ITEM_SIZES = {1: 4, 2: 1, 3: 1, 6: 4, 7: 8, 9: 1, 10: 2, 16: 2}
"""Item size in bytes by ONNX type number: float32, uint8, int8, int32, int64, bool, float16 and bfloat16."""
_FLOAT, _INT64, _EXTERNAL = 1, 7, 1
_TENSOR = 4
"""The type number of an attribute that is a tensor."""
_SENTENCES = "src_len"
"""The graph input whose size is the number of sentences, which is never 0."""
_FOUND = "found"
"""The input of the graph `beam_search` that holds a number of tokens. The search passes at least 1."""

_FIELDS: Mapping[str, str] = {
    "Model": "graph=7:Graph training_info=20:Other* functions=25:Function* configuration=26:Other*",
    "Graph": "node=1:Node* initializer=5:Tensor* sparse_initializer=15:Other*",
    "Node": "input=1:string* output=2:string* name=3:string op_type=4:string attribute=5:Attribute* domain=7:string "
    "overload=8:string",
    "Attribute": "name=1:string t=5:Tensor g=6:Other tensors=10:Other* graphs=11:Other* tp=14:Other "
    "type_protos=15:Other* type=20:int32 ref_attr_name=21:string sparse_tensor=22:Other sparse_tensors=23:Other*",
    "Tensor": "dims=1:int64* data_type=2:int32 segment=3:Other name=8:string raw_data=9:bytes external_data=13:Entry* "
    "data_location=14:int32",
    "Entry": "key=1:string value=2:string",
    "Function": "name=1:string input=4:string* node=7:Node* attribute_proto=11:Attribute* domain=10:string "
    "overload=13:string",
    "Other": "",
}
"""The fields of ONNX's messages that are read, as name=number:type; a star marks repeated fields."""
_REFUSED_FIELDS = ("g", "graphs", "tensors", "tp", "type_protos", "sparse_tensor", "sparse_tensors")


class _Refused(Exception):
    """The graph is refused. The message is part of a sentence about the graph."""


def check_graph_file(path: Path, weights: Mapping[str, int]) -> None:
    """Check that a graph contains only operators, functions and sizes that the exporter writes.

    Args:
        weights: size in bytes of each weights file that the manifest lists, by name.

    Raises:
        BundleError: the graph contains anything else.
    """
    try:
        _check(_read(path), weights)
    except _Refused as problem:
        raise BundleError(
            f"{path} is not a graph that tfexport writes: {problem}. Do not use this bundle; export the checkpoint again."
        ) from None


def _read(path: Path) -> Any:
    try:
        return _message("Model").FromString(read_bytes(path))
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}. Export the checkpoint again.") from error
    except Exception as error:  # each implementation of protobuf has its own error class
        raise _Refused(f"it cannot be parsed ({type(error).__name__})") from error


def _check(model: Any, weights: Mapping[str, int]) -> None:
    if model.training_info or model.configuration or model.graph.sparse_initializer:
        raise _Refused("it has parts other than nodes and weights")
    functions: dict[str, int] = {}
    for function in model.functions:
        if (function.domain, function.overload) != (OWN, "") or function.name not in FUNCTIONS:
            raise _Refused(f"it defines the function {_shown(function.domain, function.name)}")
        if function.name in functions:
            raise _Refused(f"it defines the function {function.name} twice")
        functions[function.name] = len(function.node)
        _check_attributes(function.attribute_proto)
        if any(attribute.HasField("t") for attribute in function.attribute_proto):
            raise _Refused(f"its function {function.name} has a tensor as a default")
        _check_nodes(function.node, {}, (), function.input)
    _check_nodes(model.graph.node, dict(_initializers(model.graph, weights)), functions)
    expanded = sum(functions.get(node.op_type, 1) if node.domain == OWN else 1 for node in model.graph.node)
    if expanded > model.ByteSize() / BYTES_OF_A_NODE:
        raise _Refused(f"it has {expanded} nodes when its functions are expanded")


def _check_nodes(
    nodes: Iterable[Any], constants: Mapping[str, Any], functions: Collection[str], inputs: Iterable[str] = ()
) -> None:
    """Check nodes. Each may read the values that earlier nodes compute.

    Args:
        constants: initializers, by name.
        functions: names of the functions that may be called.
        inputs: inputs of a function, which may have any value.
    """
    nodes, makers = list(nodes), dict[str, Any]()
    made = {*inputs, *(name for node in nodes for name in node.output)}
    callable_names = frozenset(functions)
    known = {**constants}
    padded: set[str] = set()
    taken = {*inputs, *constants}
    for node in nodes:
        allowed = callable_names if node.domain == OWN else OPERATORS.get(_domain(node.domain), frozenset())
        if node.op_type not in allowed or node.overload:
            raise _Refused(f"it has the operator {_shown(node.domain, node.op_type)}")
        _check_attributes(node.attribute)
        for name in filter(None, node.output):
            if name in taken:  # of two constants of one name, ONNX Runtime takes the last one for all nodes
                raise _Refused(f"it makes the value {name[:80]!r} twice")
            taken.add(name)
        for attribute in node.attribute:
            if attribute.HasField("t"):
                if node.op_type != "Constant" or attribute.t.data_location == _EXTERNAL:
                    raise _Refused(f"{node.name[:80]} has a tensor as an attribute")
                is_value = (attribute.name, attribute.type, attribute.ref_attr_name) == ("value", _TENSOR, "")
                if not is_value or len(node.attribute) > 1:  # ONNX Runtime would read another attribute
                    raise _Refused(f"{node.name[:80]} has a tensor that is not its value")
                _check_inline(attribute.t)
                known.update(dict.fromkeys(node.output, attribute.t))
        if node.op_type == "Pad":
            _check_padding(node, known, makers, padded)
        if node.op_type == "Div":
            _check_division(node, known, makers, made)
        _check_growth(node, known, makers)
        makers.update(dict.fromkeys(node.output, node))


def _check_attributes(attributes: Iterable[Any]) -> None:
    for attribute in attributes:
        is_refused = any(field.name in _REFUSED_FIELDS for field, _ in attribute.ListFields())
        if attribute.name not in ATTRIBUTES or is_refused:
            raise _Refused(f"it has the attribute {attribute.name[:40]!r}")


def _check_growth(node: Any, constants: Mapping[str, Any], makers: Mapping[str, Any]) -> None:
    """Check the operators whose output may be larger than their inputs: its size must be the size of other values."""
    shape = node.input[1] if len(node.input) > 1 else ""
    if node.op_type == "Expand":  # to the outputs of a projection, or to the shape of other values
        if shape in constants:
            is_vector = list(constants[shape].dims) == [1] and node.input[0] in constants
            if not is_vector or prod(constants[node.input[0]].dims) != 1:
                raise _Refused(f"{node.name[:80]} expands to a shape that is a constant")
            if _numbers(constants[shape])[0] > sum(max(tensor.dims, default=0) for tensor in constants.values()):
                raise _Refused(f"{node.name[:80]} expands to a size that no weights have")
        else:
            _check_shape(node, shape, constants, makers)
    elif node.op_type == "Range":  # from 0 or 1, in steps of 1
        if not all(name in constants for name in (node.input[0], *node.input[2:])):
            raise _Refused(f"{node.name[:80]} has a start or step that is computed")
        for name in node.input:
            _check_shape(node, name, constants, makers)


def _check_division(node: Any, constants: Mapping[str, Any], makers: Mapping[str, Any], made: Collection[str]) -> None:
    """Check that a division is one of floating-point numbers, of a size by the number of sentences, or by `_FOUND`.

    Other integer divisions may end the process: n / 0 and the least integer divided by -1 have no result.

    Args:
        made: names of all values that are not inputs of the graph.
    """
    by = makers.get(node.input[1]) if len(node.input) == 2 else None
    if by is not None and by.op_type == "Constant":
        if node.input[1] in constants and constants[node.input[1]].data_type == _FLOAT:
            return
    elif by is not None and by.op_type in ("Mul", "Max"):  # whose inputs and output have one type
        if any(name in constants and constants[name].data_type == _FLOAT for name in by.input):
            return
    elif by is not None and by.op_type == "Shape":
        divided = makers.get(node.input[0])
        is_size = divided is not None and divided.op_type == "Shape"
        if is_size and list(by.input) == [_SENTENCES] and _SENTENCES not in {*made, *constants}:
            return
    elif list(node.input[1:]) == [_FOUND] and _FOUND not in {*made, *constants}:
        return
    raise _Refused(f"{node.name[:80]} divides by a number that may be 0 or -1")


def _check_padding(node: Any, constants: Mapping[str, Any], makers: Mapping[str, Any], padded: set[str]) -> None:
    """Check that padding adds only a few rows to a weight, and pads each weight only once.

    Args:
        padded: names of the weights that other nodes pad; the name of this node's weight is added.
    """
    weight, sizes = node.input[0], node.input[1] if len(node.input) > 1 else ""
    numbers = _numbers(constants[sizes]) if sizes in constants else []
    maker = makers.get(weight)
    parts = maker.input if maker is not None and maker.op_type == "Concat" else [weight]  # the weights of projections
    is_weight = weight not in padded and all(part in constants for part in parts)
    if not is_weight or len(numbers) != 4 or any(numbers[index] for index in (0, 1, 3)):
        raise _Refused(f"{node.name[:80]} pads more than the rows of a weight")
    if not 0 <= numbers[2] <= MOST_PADDING:
        raise _Refused(f"{node.name[:80]} pads by {numbers[2]}")
    padded.add(weight)


def _check_shape(node: Any, name: str, constants: Mapping[str, Any], makers: Mapping[str, Any]) -> None:
    """Check that a shape consists of sizes of other values, and of ones."""
    waiting, n_steps, n_shapes = [name], 0, 0
    while waiting:
        name = waiting.pop()
        maker, n_steps = makers.get(name), n_steps + 1
        if name in constants:
            if any(number not in (0, 1) for number in _numbers(constants[name])):
                raise _Refused(f"{node.name[:80]} has a size that is a constant")
        elif maker is not None and maker.op_type in ("Concat", "Squeeze"):
            waiting += maker.input if maker.op_type == "Concat" else maker.input[:1]  # the second is an axis
        elif maker is not None and maker.op_type == "Div":  # number of rows by number of sentences
            waiting += maker.input
        elif maker is None or maker.op_type != "Shape":
            raise _Refused(f"{node.name[:80]} has a size that is computed")
        else:
            n_shapes += 1
        if n_shapes > MOST_SHAPES or n_steps > _MOST_PARTS:
            raise _Refused(f"{node.name[:80]} has a size of too many parts")


def _initializers(graph: Any, weights: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    """The initializers by name. The size of each is compared with the bytes that the file has for it."""
    n_bytes = 0
    for tensor in graph.initializer:
        if tensor.data_location == _EXTERNAL or tensor.external_data:
            n_bytes += _check_external(tensor, weights)
        else:
            _check_inline(tensor)
        yield tensor.name, tensor
    if n_bytes > 2 * sum(weights.values()):
        raise _Refused("its weights are larger than the files that they are in")


def _check_external(tensor: Any, weights: Mapping[str, int]) -> int:
    """The number of bytes of a tensor in a weights file."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    file = place.pop("location", "")
    if file not in weights:
        raise _Refused(f"it has weights in {file[:80]!r}, a file that the manifest does not list as weights")
    if set(place) - {"offset", "length", "checksum"} or tensor.raw_data:
        raise _Refused(f"the place of its weight {tensor.name[:80]!r} cannot be read")
    numbers = [place.get(key, "") for key in ("offset", "length")]
    if not all(number.isascii() and number.isdecimal() and len(number) < 19 for number in numbers):
        raise _Refused(f"the place of its weight {tensor.name[:80]!r} cannot be read")
    offset, length = map(int, numbers)
    if length != _size(tensor) or offset + length > weights[file]:
        raise _Refused(f"its weight {tensor.name[:80]!r} has another size than its part of {file}")
    return length


def _check_inline(tensor: Any) -> None:
    if tensor.HasField("segment") or len(tensor.raw_data) != _size(tensor):
        raise _Refused(f"its constant {tensor.name[:80]!r} has another size than it declares")


def _size(tensor: Any) -> int:
    """The bytes that the shape and type of a tensor declare."""
    if tensor.data_type not in _ITEM_SIZES or any(size < 0 for size in tensor.dims) or len(tensor.dims) > 8:
        raise _Refused(f"its tensor {tensor.name[:80]!r} has a type or shape that no weight has")
    return int(prod(tensor.dims)) * _ITEM_SIZES[tensor.data_type]


def _numbers(tensor: Any) -> list[int]:
    """The numbers of an integer constant; other constants are refused."""
    if tensor.data_type != _INT64 or tensor.data_location == _EXTERNAL or len(tensor.raw_data) > 8 * 64:
        raise _Refused(f"its constant {tensor.name[:80]!r} is not a shape")
    raw = tensor.raw_data
    return [int.from_bytes(raw[at : at + 8], "little", signed=True) for at in range(0, len(raw), 8)]


def _domain(name: str) -> str:
    return ONNX if name == "ai.onnx" else name


def _shown(domain: str, name: str) -> str:
    return f"{domain[:40]}.{name[:40]}".lstrip(".")


@cache
def _message(name: str) -> Any:
    """The protobuf class of one of `_FIELDS`. Its pool is separate from that of the package onnx."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "string": kinds.TYPE_STRING,
        "bytes": kinds.TYPE_BYTES,
        "int32": kinds.TYPE_INT32,
        "int64": kinds.TYPE_INT64,
    }
    file = descriptor_pb2.FileDescriptorProto(name="tfexport_graph.proto", package=OWN, syntax="proto2")
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for field in fields.split():
            label, _, rest = field.partition("=")
            number, _, kind = rest.partition(":")
            entry = described.field.add(name=label, number=int(number))
            entry.label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            kind = kind.removesuffix("*")
            if kind in scalars:
                entry.type = scalars[kind]
            else:
                entry.type, entry.type_name = kinds.TYPE_MESSAGE, f".{OWN}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{OWN}.{name}"))
