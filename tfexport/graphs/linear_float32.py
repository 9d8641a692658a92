"""Projections of the dialect `ort` in float32. (`graphs/linear_quantized.py` has those in 8 and 4 bits.)"""

from __future__ import annotations

from functools import partial

import numpy as np

from tfexport.graphs.emitter import Emitter, Value
from tfexport.graphs.projections import Projection

BLOCK = 48
"""Number of outputs whose weights are adjacent in memory, for the kernels (see kernels/products.h)."""


def float32_linear(emitter: Emitter, projection: Projection, states: Value) -> Value:
    """States [n, in] to [n, out], including a ReLU before it. ONNX Runtime packs the weights once, when it loads the graph:

        weights [out, in] ── Reshape ── Transpose ──> blocks [ceil(out / 48), in, 48] ──┐
        states ─────────────────────────────────────────────────────────────────────────┴─ Linear ──> [n, out]

    Without a kernel, the definition of the function is computed:

        blocks ── Transpose ── Flatten ──> [in, out] ── Gemm(states, .., bias)
    """
    weight = emitter.stacked(projection.weights)
    if emitter.is_input_weight(projection.weights[0]):  # weights that are inputs are not packed
        bias = [emitter.stacked(projection.biases)] if projection.biases else []
        return emitter.node("Gemm", states, weight, *bias, attributes={"transB": 1})
    n_in, n_out = emitter.projection_size(projection)
    before = emitter.input_of_relu(states)
    relu = before is not None
    bias = emitter.stacked(projection.biases) if projection.biases else zeros(emitter, n_out)
    inputs = (states if before is None else before, _to_blocks(emitter, weight, n_out, n_in), bias)
    name = "LinearRectified" if relu else "Linear"
    return emitter.call(name, *inputs, body=partial(_linear, relu=relu), outputs=("",))[0]


def _to_blocks(emitter: Emitter, weight: Value, n_out: int, n_in: int) -> Value:
    if n_out % BLOCK:
        weight = emitter.node("Pad", weight, emitter.sizes(0, 0, -n_out % BLOCK, 0))
    return emitter.node("Transpose", emitter.reshape(weight, -1, BLOCK, n_in), attributes={"perm": (0, 2, 1)})


def _linear(emitter: Emitter, states: Value, blocks: Value, bias: Value, *, relu: bool) -> tuple[Value]:
    weight = emitter.node("Transpose", blocks, attributes={"perm": (1, 0, 2)})
    weight = emitter.node("Flatten", weight, attributes={"axis": 1})
    zero, one = emitter.sizes(0), emitter.sizes(1)
    weight = emitter.node("Slice", weight, zero, emitter.shape_of(bias), one)
    states = emitter.node("Relu", states) if relu else states
    return (emitter.node("Gemm", states, weight, bias),)


def matmul_linear(emitter: Emitter, projection: Projection, states: Value) -> Value:
    """States [.., in] to [.., out], for layers of a quantized graph that stay in float32."""
    weight = emitter.stacked(projection.weights)
    product = emitter.node("MatMul", states, emitter.node("Transpose", weight, attributes={"perm": (1, 0)}))
    return emitter.node("Add", product, emitter.stacked(projection.biases)) if projection.biases else product


def zeros(emitter: Emitter, size: int) -> Value:
    """A bias of zeros [size], for a projection without bias."""
    return emitter.node("Expand", emitter.constant(0.0, np.float32), emitter.sizes(size))
