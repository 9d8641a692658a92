"""Quantized projections: the storage of their weights, and their computation in the dialect `ort`.

Each row of activations and each column of weights has its own scale, so that the result of a row depends on no other row.
(ONNX Runtime's DynamicQuantizeMatMul, which is a little faster, has one scale for all rows.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tfexport.contract import GROUP, Precision
from tfexport.errors import TfexportError
from tfexport.graphs.emitter import CONTRIB, Emitter
from tfexport.graphs.linear_float32 import BLOCK, zeros
from tfexport.graphs.projections import Projection

Matrix = NDArray[np.float32]
Numbers = NDArray[np.int8]

Stored = Mapping[str, NDArray[np.generic]]
"""The tensors of a quantized weights file."""

INT4_BLOCK = 32
"""Number of 4-bit weights of a column that share a scale."""


def quantize(
    weights: Mapping[str, Matrix],
    projections: Iterable[Projection],
    precision: Precision,
) -> dict[str, NDArray[np.generic]]:
    """The quantized tensors of `projections`, by the names in the weights file.

    Args:
        weights: the float32 matrices [out, in].

    Raises:
        TfexportError: a weight is not a finite number.
    """
    store = {"int8": quantize_int8, "int4": _quantize_int4}[precision]
    tensors: dict[str, NDArray[np.generic]] = {}
    for projection in projections:
        matrix = np.concatenate([weights[name].reshape(len(weights[name]), -1) for name in projection.weights])
        if not np.isfinite(matrix).all():
            raise TfexportError(f"{projection.weights[0]} has weights that are not finite numbers. Check the training.")
        tensors |= {f"{projection.name}.{kind}": tensor for kind, tensor in store(matrix).items()}
    return tensors


def dequantize(
    tensors: Mapping[str, NDArray[np.generic]], weights: Mapping[str, Matrix], projections: Iterable[Projection]
) -> dict[str, Matrix]:
    """The float32 matrices that quantized `tensors` represent, with the names and shapes of `weights`.

    Projections without quantized tensors are left out.
    """
    matrices: dict[str, Matrix] = {}
    for projection in projections:
        if f"{projection.name}.scale" not in tensors:
            continue
        scale = np.asarray(tensors[f"{projection.name}.scale"], np.float32)
        if f"{projection.name}.int8" in tensors:
            n_in = weights[projection.weights[0]].shape[1]
            matrix = (
                from_blocks(np.asarray(tensors[f"{projection.name}.int8"], np.int8), len(scale), n_in) * scale[:, None]
            )
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


def quantize_int8(matrix: Matrix) -> dict[str, NDArray[np.generic]]:
    """[out, in] to int8 [ceil(out / BLOCK), ceil(in / GROUP), BLOCK, GROUP], and the scale of each output [out]."""
    scale = np.abs(matrix).max(axis=1) / 127
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    numbers = np.clip(np.rint(matrix / scale[:, None]), -127, 127)  # for the smallest floats, the scale is also rounded
    return {"int8": _to_blocks(numbers.astype(np.int8)), "scale": scale}


def _to_blocks(numbers: Numbers) -> Numbers:
    n_out, n_in = numbers.shape
    padded = np.pad(numbers, ((0, -n_out % BLOCK), (0, -n_in % GROUP)))
    grid = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // GROUP, GROUP)
    return np.ascontiguousarray(grid.transpose(0, 2, 1, 3))


def from_blocks(blocks: Numbers, n_out: int, n_in: int) -> Numbers:
    """The matrix [out, in] of blocks that `quantize_int8` made."""
    grid = blocks.transpose(0, 2, 1, 3)
    return grid.reshape(grid.shape[0] * BLOCK, -1)[:n_out, :n_in]


def _quantize_int4(matrix: Matrix) -> dict[str, NDArray[np.generic]]:
    """[out, in] to pairs of 4-bit numbers uint8 [out, blocks, INT4_BLOCK / 2] and scales [out, blocks].

    A number n represents (n - 8) * scale. The largest weight of a block becomes -8, the one number without an opposite.
    """
    n_out, n_in = matrix.shape
    padded = np.pad(matrix, ((0, 0), (0, -n_in % INT4_BLOCK))).reshape(n_out, -1, INT4_BLOCK)
    largest = np.take_along_axis(padded, np.abs(padded).argmax(axis=2)[..., None], axis=2)
    scale = (largest / -8).astype(np.float32)
    # A block of zeros has the scale 0. With another scale its output would not be 0: `MatMulNBits` multiplies by n, and
    # subtracts 8 times the sum of the states, which rounds.
    numbers = np.clip(np.rint(padded / np.where(scale != 0, scale, 1)) + 8, 0, 15).astype(np.uint8)
    return {"int4": numbers[..., ::2] | numbers[..., 1::2] << 4, "scale": scale[..., 0]}


def int8_linear(emitter: Emitter, projection: Projection, states: ir.Value) -> ir.Value:
    """8-bit activations times 8-bit weights, summed in 32 bits; there is one scale for each row of activations:

        states ── Abs ── ReduceMax ── / 127 = scale [.., 1] ────────────────────┐
               ── / scale ── uint8, 128 for 0 ── MatMulIntegerToFloat ── * ── + bias
        weights ── uint8, 128 for 0 ─────────────┘

    A ReLU before it is included, with 0 for 0, / 255 and no Abs. In a row of zeros 0 / 0 becomes any number, which the scale
    of 0 makes 0 again. The stored weights are signed; see `unsigned_columns`.
    """
    before = emitter.input_of_relu(states)
    relu = before is not None
    weight, columns = (emitter.weight(f"{projection.name}.{kind}") for kind in ("int8", "scale"))
    states = states if before is None else before
    if emitter.is_input_weight(f"{projection.name}.int8"):
        listed_bias = emitter.stacked(projection.biases) if projection.biases else None
        return _int8_linear(emitter, relu, states, weight, columns, listed_bias)

    n_in, n_out = emitter.projection_size(projection)
    bias = emitter.stacked(projection.biases) if projection.biases else zeros(emitter, n_out)
    if n_in % GROUP:  # the kernel takes whole groups
        return _int8_linear(emitter, relu, states, unsigned_columns(emitter, weight, columns, n_in), columns, bias)

    name = "Int8LinearRectified" if relu else "Int8Linear"
    body = partial(_int8_blocks, relu=relu)
    return emitter.call(name, states, weight, columns, bias, body=body, outputs=("",))[0]


def _int8_blocks(
    emitter: Emitter, states: ir.Value, blocks: ir.Value, columns: ir.Value, bias: ir.Value, *, relu: bool
) -> tuple[ir.Value]:
    return (_int8_linear(emitter, relu, states, unsigned_columns(emitter, blocks, columns), columns, bias),)


def columns_from_blocks(emitter: Emitter, blocks: ir.Value, scale: ir.Value, n_in: int = 0) -> ir.Value:
    """Blocks of weights to [in, out]. ONNX Runtime computes this once, when it loads the graph.

    Args:
        scale: [out].
        n_in: may be omitted if it is a multiple of `GROUP`.
    """
    columns = emitter.node("Transpose", blocks, attributes={"perm": (1, 3, 0, 2)})
    columns = emitter.node("Flatten", columns, attributes={"axis": 2})
    zero, one = emitter.sizes(0), emitter.sizes(1)
    columns = emitter.node("Slice", columns, zero, emitter.shape_of(scale), one)
    return emitter.node("Slice", columns, zero, emitter.sizes(n_in), zero) if n_in % GROUP else columns


def _int8_linear(
    emitter: Emitter, relu: bool, states: ir.Value, weight: ir.Value, columns: ir.Value, bias: ir.Value | None
) -> ir.Value:
    """The definition of `int8_linear`, with unsigned weights [in, out]."""
    constant = emitter.constant
    if relu:
        zero, most, states = 0, 255, emitter.node("Relu", states)
        magnitudes = states
    else:
        zero, most, magnitudes = 128, 127, emitter.node("Abs", states)
    largest = emitter.node("ReduceMax", magnitudes, constant([-1], np.int64), attributes={"keepdims": 1})
    scale = emitter.node("Mul", largest, constant(1 / most, np.float32))
    one, zero_point = constant(1.0, np.float32), constant(zero, np.uint8)
    rounded = emitter.node("QuantizeLinear", emitter.node("Div", states, scale), one, zero_point)
    inputs = (rounded, weight, one, columns, zero_point, constant(128, np.uint8))
    product = emitter.node("MatMulIntegerToFloat", *inputs, domain=CONTRIB)
    product = emitter.node("Mul", product, scale)
    return product if bias is None else emitter.node("Add", product, bias)


def unsigned_columns(emitter: Emitter, blocks: ir.Value, scale: ir.Value, n_in: int = 0) -> ir.Value:
    """`columns_from_blocks` in uint8 with 128 for 0, the format of ONNX Runtime's products.

    With signed weights, its kernels for CPUs with AVX2 and without VNNI add two products in 16 bits, which saturate. The
    kernels for two unsigned factors are exact on every CPU, and as fast on CPUs with VNNI.
    """
    columns = columns_from_blocks(emitter, blocks, scale, n_in)
    bits = emitter.node("Cast", columns, attributes={"to": int(ir.DataType.UINT8)})
    return emitter.node("BitwiseXor", bits, emitter.constant(128, np.uint8))


def int4_linear(emitter: Emitter, projection: Projection, states: ir.Value) -> ir.Value:
    """4-bit weights. The operator itself rounds activations to 8 bits, each block of a row with its own scale."""
    n_in, n_out = emitter.projection_size(projection)
    weight, scale = (emitter.weight(f"{projection.name}.{kind}") for kind in ("int4", "scale"))
    sizes = {"K": n_in, "N": n_out, "bits": 4, "block_size": INT4_BLOCK, "accuracy_level": 4}
    product = emitter.node("MatMulNBits", states, weight, scale, attributes=sizes, domain=CONTRIB)
    return emitter.node("Add", product, emitter.stacked(projection.biases)) if projection.biases else product
