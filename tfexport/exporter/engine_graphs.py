"""Graphs of the dialect `onnx24` in the form that TensorRT builds. It computes the same values.

    caches     have a fixed length: TensorRT writes in place only into such a cache
    positions  the encoder's table has a row for every source id that is planned; those behind the model's own are zeros,
               and only ids behind `src_len` read them
    masks      are numbers that are added to the scores, in half precision where heads are not multiples of 8: with
               boolean masks TensorRT's compiler fails there (`MyelinCheckException`)
    attention  that stays in float32 within a graph in half precision is written out as matrix products: TensorRT would
               compute it in half precision, and its compiler fails in self-attention of a step

The compiler pads such heads itself, and takes its fused attention for them: see docs/decisions/dialects.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    buildable_attention(model)


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


def buildable_attention(model: onnx.ModelProto) -> None:
    """Give the attention of a graph in half precision the form that TensorRT's compiler takes; float32 graphs stay.

    Attention in half precision, with heads that are not multiples of `HEAD_MULTIPLE`: a boolean mask becomes numbers, 0
    where it is true, and elsewhere half of the least number of the type. The softmax of such a score is 0, and its sum with
    another score is finite.

    Attention in float32, which a budget may keep there: it becomes MatMul, Softmax and MatMul.
    """
    known = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type.tensor_type for value in (*known.value_info, *known.input, *known.output)}
    if not any(types[value.name].elem_type in _HALVES for value in (*known.input, *known.output)):
        return
    form = _Form(types)
    for node in model.graph.node:
        if node.op_type == "Attention" and len(node.input) > 3 and node.input[3]:
            key = types[node.input[1]]
            if key.elem_type == TensorProto.FLOAT:
                form.write_out(node)
                continue
            if key.shape.dim[-1].dim_value % HEAD_MULTIPLE:
                node.input[3] = form.numbers(node.input[3], key.elem_type)
        form.nodes.append(node)
    model.graph.initializer.extend(form.constants.values())
    _replace_nodes(model, form.nodes)


class _Form:
    """The nodes of a graph whose attention is given another form; `types` are those of its values."""

    def __init__(self, types: Mapping[str, Any]):
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._types = types
        self._numbers: dict[tuple[str, int], str] = {}

    def numbers(self, mask: str, dtype: int) -> str:
        """`mask` as numbers that are added to scores."""
        if self._types[mask].elem_type != TensorProto.BOOL:  # of relative positions: it has their bias already
            return mask
        if (mask, dtype) not in self._numbers:
            least = float(ml_dtypes.finfo(helper.tensor_dtype_to_np_dtype(dtype)).min)
            shown, hidden = self._constant(0.0, dtype), self._constant(least / 2, dtype)
            self._numbers[mask, dtype] = self._add("Where", [mask, shown, hidden], f"additive/{len(self._numbers)}")
        return self._numbers[mask, dtype]

    def write_out(self, node: onnx.NodeProto) -> None:
        """softmax(query * key * scale + mask) * value, node by node."""
        query, key, value, mask = node.input[:4]
        (scale,) = (attribute.f for attribute in node.attribute if attribute.name == "scale")
        turned = self._add("Transpose", [key], f"{node.name}/turned", perm=(0, 1, 3, 2))
        products = self._add("MatMul", [query, turned], f"{node.name}/products")
        scores = self._add("Mul", [products, self._constant(scale, TensorProto.FLOAT)], f"{node.name}/scores")
        masked = self._add("Add", [scores, self.numbers(mask, TensorProto.FLOAT)], f"{node.name}/masked")
        weights = self._add("Softmax", [masked], f"{node.name}/weights", axis=-1)
        self.nodes.append(helper.make_node("MatMul", [weights, value], node.output, name=node.name))

    def _add(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    def _constant(self, value: float, dtype: int) -> str:
        array = np.array(value, helper.tensor_dtype_to_np_dtype(dtype))
        name = f"constant/{array.dtype}/{value}"
        self.constants[name] = numpy_helper.from_array(array, name)
        return name


def _replace_nodes(model: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> None:
    del model.graph.node[:]
    model.graph.node.extend(nodes)
