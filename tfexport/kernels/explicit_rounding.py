"""Half-precision graphs on a CPU, with the rounding that the graph defines.

ONNX Runtime's CPU provider has few half-precision kernels. It computes in float32 and omits the rounding between nodes, even
with all optimisations off: a value beyond 65504 passes, but is infinite on a GPU. It only keeps the casts of the graph. So
this module adds casts:

    half ── MatMul ── half ── Add ── half

    half ── Cast to float32 ── MatMul ── Cast to half ── Cast to float32 ── Add ── Cast to half

A GPU's fused kernels may round less often, and sum in another order. None rounds more often.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_UNMOVED = ("Cast", "Shape", "Gather", "Reshape", "Transpose", "Slice", "Expand")
"""Operators that only move values, so their results need no rounding."""


def with_explicit_rounding(graph: Path) -> onnx.ModelProto:
    """Load a half-precision graph, without copying its weights, and make every rounding a node of its own.

    Values keep their names, types and places. The cast that rounds a value is named `cast/` and the value's name.
    """
    model = onnx.load(graph, load_external_data=False)
    known = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*known.value_info, *known.input, *known.output)}
    types |= {tensor.name: tensor.data_type for tensor in known.initializer}
    nodes: list[onnx.NodeProto] = []
    exact: dict[str, str] = {}

    def cast(value: str, result: str, to: int) -> str:
        nodes.append(helper.make_node("Cast", [value], [result], name=f"cast/{result}", to=to))
        return result

    for node in model.graph.node:
        if node.op_type in _UNMOVED or not any(types.get(name) in _HALVES for name in (*node.input, *node.output)):
            nodes.append(node)
            continue
        for index, name in enumerate(node.input):
            if types.get(name) in _HALVES:
                if name not in exact:
                    exact[name] = cast(name, f"{name}.exact", TensorProto.FLOAT)
                node.input[index] = exact[name]
        nodes.append(node)
        for index, name in enumerate(node.output):
            if types.get(name) in _HALVES:
                node.output[index] = f"{name}.unrounded"
                cast(node.output[index], name, types[name])
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(nodes)
    return model
