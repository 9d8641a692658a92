"""Quantized projections: how their weights are stored, and how the dialect `ort` computes with them.

What is rounded is rounded for each row of activations and each column of weights by itself, so that the result of a row
depends on no other row. (ONNX Runtime's DynamicQuantizeMatMul, which is a little faster, has one scale for all rows.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.emitter import CONTRIB, Emitter
from tfexport.errors import TfexportError
from tfexport.projections import Projection

Matrix = NDArray[np.float32]

INT4_BLOCK = 32
"""Weights of a column that share a scale in 4 bits."""


MARGIN = 1.25
"""How much wider a fixed scale is than what was seen. What is larger still is cut there."""


def has_fixed_scale(projection: Projection, config: ModelConfig) -> bool:
    """Whether the 8-bit states that go into a projection have one scale for all rows, which saves half the nodes.

    So it is in decoder layers where the model itself bounds these states: they come from a LayerNorm, or from attention,
    which averages. The hidden states of a feed-forward have no such bound, nor have embeddings. The output projection is
    left out because tokens depend on it most, the encoder because it runs once: of 1,000 sentences of a tutorial checkpoint
    934 had float32's tokens with all scales by row, 913 as it is, 882 with fixed scales in all but the output projection.
    """
    if not projection.name.startswith("decoder.") or projection.name.endswith("feed_forward.output"):
        return False
    reads_embeddings = projection.name == "decoder.layers.0.self_attention.query_key_value" and not config.norm_first
    return not reads_embeddings


def quantized(
    weights: Mapping[str, Matrix],
    projections: Iterable[Projection],
    precision: Precision,
    input_ranges: Mapping[str, float],
) -> dict[str, NDArray[np.generic]]:
    """The stored tensors of `projections`, whose float32 matrices [out, in] are in `weights`.

    Args:
        input_ranges: the largest magnitude that goes into a projection, for those that have a fixed scale in 8 bits.

    Raises:
        TfexportError: a weight is not a finite number.
    """
    store = {"int8": stored_int8, "int4": _stored_int4}[precision]
    tensors: dict[str, NDArray[np.generic]] = {}
    for projection in projections:
        matrix = np.concatenate([weights[name].reshape(len(weights[name]), -1) for name in projection.weights])
        if not np.isfinite(matrix).all():
            raise TfexportError(f"{projection.weights[0]} has weights that are not finite numbers. Check the training.")
        tensors |= {f"{projection.name}.{kind}": tensor for kind, tensor in store(matrix).items()}
        if projection.name in input_ranges:
            largest = max(input_ranges[projection.name], 1e-6)
            tensors[f"{projection.name}.input_scale"] = np.asarray(largest * MARGIN / 127, np.float32)
    return tensors


def restored(
    tensors: Mapping[str, NDArray[np.generic]], weights: Mapping[str, Matrix], projections: Iterable[Projection]
) -> dict[str, Matrix]:
    """The float32 matrices that quantized `tensors` stand for, by their names and in their shapes in `weights`.

    Projections of which there are no such tensors are left out.
    """
    matrices: dict[str, Matrix] = {}
    for projection in projections:
        if f"{projection.name}.scale" not in tensors:
            continue
        scale = np.asarray(tensors[f"{projection.name}.scale"], np.float32)
        if f"{projection.name}.int8" in tensors:
            matrix = tensors[f"{projection.name}.int8"].T * scale[:, None]  # type: ignore[operator]
        else:
            packed = np.asarray(tensors[f"{projection.name}.int4"], np.uint8)
            numbers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1)
            matrix = ((numbers.astype(np.float32) - 8) * scale[..., None]).reshape(len(scale), -1)
        start = 0
        for name in projection.weights:
            shape = weights[name].shape
            rows = matrix[start : start + shape[0], : shape[1]]
            matrices[name] = np.ascontiguousarray(rows, np.float32).reshape(shape)
            start += shape[0]
    return matrices


def stored_int8(matrix: Matrix) -> dict[str, NDArray[np.generic]]:
    """[out, in] to int8 [in, out], and the scale of each column [out]."""
    scale = np.abs(matrix).max(axis=1) / 127
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    numbers = np.clip(np.rint(matrix / scale[:, None]), -127, 127)  # of the least floats even the scale is rounded
    return {"int8": np.ascontiguousarray(numbers.astype(np.int8).T), "scale": scale}


def _stored_int4(matrix: Matrix) -> dict[str, NDArray[np.generic]]:
    """[out, in] to pairs of 4-bit numbers uint8 [out, blocks, INT4_BLOCK / 2] and scales [out, blocks].

    A number n stands for (n - 8) * scale. The largest of a block is -8: the one number that has no opposite.
    """
    n_out, n_in = matrix.shape
    padded = np.pad(matrix, ((0, 0), (0, -n_in % INT4_BLOCK))).reshape(n_out, -1, INT4_BLOCK)
    largest = np.take_along_axis(padded, np.abs(padded).argmax(axis=2)[..., None], axis=2)
    scale = largest / -8
    scale = np.where(scale != 0, scale, 1).astype(np.float32)
    numbers = np.clip(np.rint(padded / scale) + 8, 0, 15).astype(np.uint8)
    return {"int4": numbers[..., ::2] | numbers[..., 1::2] << 4, "scale": scale[..., 0]}


def int8_linear(emitter: Emitter, projection: Projection, states: ir.Value) -> ir.Value:
    """8-bit activations times 8-bit weights, summed in 32 bits. With a fixed scale:

        states ── QuantizeLinear(scale), 128 for 0 ── MatMulIntegerToFloat(.., scale, columns' scales, .., bias)

    With one for each row (where states come from a ReLU with it, and 0 for 0, / 255, and no Abs):

        states ── Abs ── ReduceMax ── / 127 = scale [.., 1] ────────────────────┐
               ── / scale ── uint8, 128 for 0 ── MatMulIntegerToFloat ── * ── + bias

    In a row of zeros 0 / 0 is rounded to some number or other, which the scale of 0 makes 0 again.
    """
    constant = emitter.constant
    weight, columns = (emitter.weight(f"{projection.name}.{kind}") for kind in ("int8", "scale"))
    one = constant(1.0, np.float32)
    if emitter.has(f"{projection.name}.input_scale"):
        fixed = emitter.weight(f"{projection.name}.input_scale")
        middle = constant(128, np.uint8)
        rounded = emitter.node("QuantizeLinear", states, fixed, middle)
        bias = [None, emitter.joined(projection.biases)] if projection.biases else []
        return emitter.node("MatMulIntegerToFloat", rounded, weight, fixed, columns, middle, *bias, domain=CONTRIB)
    before = emitter.before_relu(states)
    rectified = before is not None
    rounded, scale = emitter.called(
        "RowQuantizeRectified" if rectified else "RowQuantize",
        before if before is not None else states,
        body=partial(_row_quantize, emitter, rectified),
        outputs=("", ""),
        dtypes=("uint8", "float32"),
    )
    zero = 0 if rectified else 128
    product = emitter.node(
        "MatMulIntegerToFloat", rounded, weight, one, columns, constant(zero, np.uint8), domain=CONTRIB
    )
    if not projection.biases:
        return emitter.node("Mul", product, scale)
    inputs = (product, scale, emitter.joined(projection.biases))
    return emitter.called("RowScale", *inputs, body=partial(_row_scale, emitter), outputs=("",))[0]


def _row_quantize(emitter: Emitter, rectified: bool, states: ir.Value) -> tuple[ir.Value, ir.Value]:
    """`states` in 8 bits, and the scale of each row; where they are to be `rectified`, all 255 steps are above 0."""
    if rectified:
        zero, most, states = 0, 255, emitter.node("Relu", states)
        magnitudes = states
    else:
        zero, most, magnitudes = 128, 127, emitter.node("Abs", states)
    largest = emitter.node("ReduceMax", magnitudes, emitter.constant([-1], np.int64), attributes={"keepdims": 1})
    scale = emitter.node("Mul", largest, emitter.constant(1 / most, np.float32))
    one, zero_point = emitter.constant(1.0, np.float32), emitter.constant(zero, np.uint8)
    return emitter.node("QuantizeLinear", emitter.node("Div", states, scale), one, zero_point), scale


def _row_scale(emitter: Emitter, product: ir.Value, scale: ir.Value, bias: ir.Value) -> tuple[ir.Value]:
    return (emitter.node("Add", emitter.node("Mul", product, scale), bias),)


def int4_linear(emitter: Emitter, projection: Projection, states: ir.Value) -> ir.Value:
    """4-bit weights; the operator rounds activations to 8 bits itself, block by block of a row."""
    n_in, n_out = emitter.projection_size(projection)
    weight, scale = (emitter.weight(f"{projection.name}.{kind}") for kind in ("int4", "scale"))
    sizes = {"K": n_in, "N": n_out, "bits": 4, "block_size": INT4_BLOCK, "accuracy_level": 4}
    product = emitter.node("MatMulNBits", states, weight, scale, attributes=sizes, domain=CONTRIB)
    return _plus_bias(emitter, projection, product)


def _plus_bias(emitter: Emitter, projection: Projection, product: ir.Value) -> ir.Value:
    return emitter.node("Add", product, emitter.joined(projection.biases)) if projection.biases else product
