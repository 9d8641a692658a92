"""Graphs of the dialect `onnx24` in the form that TensorRT builds. It computes the same values.

    caches     have a fixed length: TensorRT writes in place only into such a cache
    positions  the encoder's table has a row for every source id that is planned; those behind the model's own are zeros,
               and only ids behind `src_len` read them
    masks      are numbers that are added to the scores, in half precision where heads are not multiples of 8: with
               boolean masks TensorRT's compiler fails there (`MyelinCheckException`)

The compiler pads such heads itself. With padding in the graph, each step would copy the cross keys and values.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tfexport.exporter.engine_plan import Profile

HEAD_MULTIPLE = 8
"""Half-precision attention has kernels for heads of such sizes; the others are padded."""

_POSITIONS = "encoder.positions.table"
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def prepare(model: onnx.ModelProto, profile: Profile, cache: int) -> None:
    """Change `model` so that TensorRT builds it for `profile`, with caches of `cache` slots."""
    freeze_cache(model, cache)
    if "src_ids" in profile:
        longer_positions(model, source=profile["src_ids"][2][1])
    additive_masks(model)


def freeze_cache(model: onnx.ModelProto, cache: int) -> None:
    """Write `cache` for the axis `cache` of all inputs and outputs: TensorRT writes in place only into a fixed length."""
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "cache":
                dim.dim_value = cache


def longer_positions(model: onnx.ModelProto, source: int) -> None:
    """Give the encoder's position table rows of zeros, so that it has enough of them for `source` ids.

    TensorRT joins table and zeros when it builds. Relative positions have no such table.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    joins: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "Slice" or not node.input[0].startswith(_POSITIONS):
            continue
        table = constants[node.input[0]]
        (first,) = numpy_helper.to_array(constants[node.input[1]])
        rows, width = table.dims
        missing = int(first) + source - rows
        if missing > 0:
            zeros, joined = f"{table.name}.zeros", f"{table.name}.longer"
            raw = bytes(missing * width * helper.tensor_dtype_to_np_dtype(table.data_type).itemsize)
            model.graph.initializer.append(helper.make_tensor(zeros, table.data_type, [missing, width], raw, raw=True))
            joins.append(helper.make_node("Concat", [table.name, zeros], [joined], name=joined, axis=0))
            node.input[0] = joined
    _replace_nodes(model, [*joins, *model.graph.node])


def additive_masks(model: onnx.ModelProto) -> None:
    """Make the boolean masks of attention in half precision numbers, where a head is not a multiple of `HEAD_MULTIPLE`.

    0 where the mask is true, and elsewhere half of the least number of the type: the softmax of such a score is 0, and its
    sum with a score is finite.
    """
    known = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type.tensor_type for value in (*known.value_info, *known.input, *known.output)}
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, onnx.TensorProto] = {}
    added: dict[tuple[str, int], str] = {}

    def constant(value: float, dtype: int) -> str:
        array = np.array(value, helper.tensor_dtype_to_np_dtype(dtype))
        name = f"additive/{array.dtype}/{value}"
        constants[name] = numpy_helper.from_array(array, name)
        return name

    def with_numbers(mask: str, dtype: int) -> str:
        if (mask, dtype) not in added:
            added[mask, dtype] = name = f"additive/{len(added)}"
            least = float(ml_dtypes.finfo(helper.tensor_dtype_to_np_dtype(dtype)).min)
            numbers = constant(0.0, dtype), constant(least / 2, dtype)
            nodes.append(helper.make_node("Where", [mask, *numbers], [name], name=name))
        return added[mask, dtype]

    for node in model.graph.node:
        if node.op_type == "Attention" and len(node.input) > 3 and node.input[3]:
            key, mask = types[node.input[1]], node.input[3]
            is_odd = key.shape.dim[-1].dim_value % HEAD_MULTIPLE != 0
            if is_odd and key.elem_type in _HALVES and types[mask].elem_type == TensorProto.BOOL:
                node.input[3] = with_numbers(mask, key.elem_type)
        nodes.append(node)
    model.graph.initializer.extend(constants.values())
    _replace_nodes(model, nodes)


def _replace_nodes(model: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> None:
    del model.graph.node[:]
    model.graph.node.extend(nodes)
