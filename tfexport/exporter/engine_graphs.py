"""Conversion of `onnx24` graphs to the form that TensorRT can build. The converted graphs compute the same values.

    caches     have a fixed length: TensorRT writes in place only into such a cache
    positions  the encoder's table has a row for every planned source id. Rows after the model's own are zeros, and only
               ids after `src_len` read them
    masks      are added to the scores as numbers, in half precision with heads that are not multiples of 8: TensorRT's
               compiler fails on boolean masks there (`MyelinCheckException`)
    attention  that stays in float32 in a half-precision graph is written as matrix products: TensorRT would compute it in
               half precision, and its compiler fails in self-attention of a step

The compiler pads such heads itself and uses its fused attention for them; see docs/decisions/dialects.md.
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
"""Head sizes with kernels for half-precision attention are multiples of it. Other heads are padded."""

_POSITIONS = "encoder.positions.table"
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def prepare(model: onnx.ModelProto, profile: Profile, cache: int) -> None:
    """Change `model` so that TensorRT builds it for `profile`, with caches of `cache` slots."""
    freeze_cache(model, cache)
    if "src_ids" in profile:
        longer_positions(model, source=profile["src_ids"][2][1])
    buildable_attention(model)


def freeze_cache(model: onnx.ModelProto, cache: int) -> None:
    """Set the axis `cache` of all inputs and outputs to `cache`: TensorRT writes in place only into a fixed length."""
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "cache":
                dim.dim_value = cache


def longer_positions(model: onnx.ModelProto, source: int) -> None:
    """Append rows of zeros to the encoder's position table, so that it has `source` rows.

    TensorRT joins the table and the zeros during the build. Other positions have no such table.
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
    """Convert the attention of a half-precision graph to a form that TensorRT can build; float32 graphs stay unchanged.

    Half-precision attention with heads that are not multiples of `HEAD_MULTIPLE`: the boolean mask becomes numbers. They are
    0 where the mask is true, and else half of the type's least number. The softmax of such a score is 0, and its sum with
    another score is finite.

    Attention that a budget keeps in float32 becomes MatMul, Softmax and MatMul.
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
    """The nodes of a graph with converted attention; `types` are the types of its values."""

    def __init__(self, types: Mapping[str, Any]):
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._types = types
        self._numbers: dict[tuple[str, int], str] = {}

    def numbers(self, mask: str, dtype: int) -> str:
        """Convert `mask` to numbers that are added to scores."""
        if self._types[mask].elem_type != TensorProto.BOOL:  # with relative positions: it already includes their bias
            return mask
        if (mask, dtype) not in self._numbers:
            least = float(ml_dtypes.finfo(helper.tensor_dtype_to_np_dtype(dtype)).min)
            shown, hidden = self._constant(0.0, dtype), self._constant(least / 2, dtype)
            self._numbers[mask, dtype] = self._add("Where", [mask, shown, hidden], f"additive/{len(self._numbers)}")
        return self._numbers[mask, dtype]

    def write_out(self, node: onnx.NodeProto) -> None:
        """Write softmax(query * key * scale + mask) * value as single nodes."""
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
