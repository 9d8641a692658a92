"""Half precision on a CPU, as the graph says it.

ONNX Runtime's CPU provider has hardly a kernel in half precision. It computes in float32, and leaves out the rounding
between nodes even with all optimisations off: what is beyond 65504 passes, and is infinite on a GPU. Only casts that a graph
has itself are kept. So here they are written out:

    half ── MatMul ── half ── Add ── half

    half ── Cast to float32 ── MatMul ── Cast to half ── Cast to float32 ── Add ── Cast to half

A GPU's fused kernels may round less often than that, and sum in another order; none rounds more often.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_UNMOVED = ("Cast", "Shape", "Gather", "Reshape", "Transpose", "Slice", "Expand")
"""Operators that compute nothing, so that there is nothing to round."""


def with_explicit_rounding(graph: Path) -> onnx.ModelProto:
    """The model of a graph in half precision, its weights where they were, with every rounding as a node of its own.

    Values keep their names, types and places; the cast that rounds a value is `cast/` and its name.
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
