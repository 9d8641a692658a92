"""The best next token of float32, proven, without a float32 product with the whole vocabulary.

No matrix of a decoder step is larger than the output projection, but greedy search only needs the best word of its product.
Here 8-bit logits of all words choose a few candidates, and float32 decides among them:

    states ── 7 bits, a scale a row ── x 8-bit projection, + bounds ──> at most so large is each logit ── TopK ──> candidates
           ── x the candidates' rows of the float32 projection ──> their logits ── TopK ──> best.logits, best.ids
           ── Compress: rows whose best are not proven ── Gemm with all of the projection ── TopK ── ScatterND ──> the same

The proof: let x be the states, w the row of a word, and x' and w' the rounded ones. By Cauchy and Schwarz

    x w = x' w' + (x - x') w + x' (w - w') <= x' w' + |x - x'| |w| + |x'| |w - w'|

|w| and |w - w'| of each word are stored; of |x - x'| and |x'| the largest of all rows is used. The candidates are the words
with the largest bounds. So if the best logit among them is above the least of their bounds, no other word has a better one.
This is a proof up to the rounding of float32 itself, for which |w - w'| is stored with a margin.

Rows that are not proven, such as those with a NaN, are multiplied with the whole projection in float32. Vocabularies below
`contract.FEWEST_WORDS` are not screened: the whole product takes no longer there.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tfexport.errors import TfexportError
from tfexport.graphs.emitter import CONTRIB, Emitter
from tfexport.graphs.linear_float32 import zeros
from tfexport.graphs.linear_quantized import columns_from_blocks, from_blocks, quantize_int8
from tfexport.graphs.projections import Projection

CANDIDATES = 16
"""Number of candidates for float32. With 16, all rows of trained and random models were proven; with 8, 95 % of the rows of
random models. From about 32 on, ONNX Runtime's TopK takes twice the time."""

LEVELS = 63
"""States are rounded to -63 .. 63 and not to 127. So no kernel overflows the 16 bits in which some kernels (without VNNI)
add two products of 8-bit numbers. The proof requires exact sums."""

CHUNK = 4096
"""Number of rows that are in memory in float64 at the same time."""

LARGEST = 1e30
"""The largest weight: with a larger one, a bound may leave the range of float32."""


def screening_tensors(weight: NDArray[np.float32]) -> dict[str, NDArray[np.generic]]:
    """The additional tensors of screening for the output projection `weight` [vocab, d_model], by their names in
    `contract.SCREENING_FILE`.

    Raises:
        TfexportError: a weight is not a finite number, or so large that bounds may leave the range of float32.
    """
    if not np.isfinite(weight).all():
        raise TfexportError("the output projection has weights that are not finite numbers. Check the training.")
    if np.abs(weight).max() > LARGEST:
        raise TfexportError(f"the output projection has weights above {LARGEST:g}. Check the training.")
    stored = quantize_int8(weight)
    numbers = from_blocks(np.asarray(stored["int8"], np.int8), *weight.shape)
    norms, errors = np.empty(len(weight)), np.empty(len(weight))
    for start in range(0, len(weight), CHUNK):
        rows = slice(start, start + CHUNK)
        exact = weight[rows].astype(np.float64)  # squares may leave the range of float32
        norms[rows] = np.linalg.norm(exact, axis=1)
        exact -= numbers[rows].astype(np.float64) * np.asarray(stored["scale"][rows, None], np.float64)
        errors[rows] = np.linalg.norm(exact, axis=1)
    # The rounding error of a dot product in float32 is relative to |x| |w| (Higham 2002, section 3.1), and there are two dot
    # products; `tiny` covers underflow.
    float32 = np.finfo(np.float32)
    errors += 2 * (weight.shape[1] + 8) * float(float32.eps) * norms + float(float32.tiny)
    bounds = {"norm": norms, "error": errors}
    up = {name: np.nextafter(values.astype(np.float32), np.float32(np.inf)) for name, values in bounds.items()}
    return {f"screening.{name}": array for name, array in {**stored, **up}.items()}


def screen(emitter: Emitter, output: Projection, states: ir.Value, banned: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The largest logit of `states` [rows, d_model], without the words `banned` [n], and its word, each [rows, 1]."""
    with emitter.module("screening"):
        bias = emitter.stacked(output.biases) if output.biases else zeros(emitter, emitter.config.tgt_vocab_size)
        numbers, scale, room = emitter.call(
            "ScreenStates",
            *(states, emitter.weight("screening.norm"), emitter.weight("screening.error")),
            body=_screen_states,
            outputs=("", "", ""),
            dtypes=("uint8", "float32", "float32"),
        )
        (bounds,) = emitter.call(
            "ScreenProduct",
            *(numbers, emitter.weight("screening.int8"), emitter.weight("screening.scale"), room),
            body=_screen_product,
            outputs=("",),
        )
        best, ids = emitter.call(
            "ScreenBest",
            *(bounds, scale, states, emitter.stacked(output.weights), bias, banned),
            body=_screen_best,
            outputs=("", ""),
            dtypes=("float32", "int64"),
        )
    return best, ids


def _screen_states(
    emitter: Emitter, states: ir.Value, norm: ir.Value, error: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """States rounded to 7 bits, uint8 [rows, d_model]; their scales [rows, 1]; and by how much the logit of each word may
    exceed that of the rounded states, [vocab], in multiples of the scales."""
    constant, axis = emitter.constant, emitter.constant([1], np.int64)
    one, zero = constant(1.0, np.float32), constant(LEVELS + 1, np.uint8)
    largest = emitter.node("ReduceMax", emitter.node("Abs", states), axis, attributes={"keepdims": 1})
    scale = emitter.node("Mul", largest, constant(1 / LEVELS, np.float32))  # [rows, 1]
    # Not 0: in a row of zeros 0 / 0 would be NaN, and then ONNX Runtime's ReduceMax misses the largest of other rows.
    scale = emitter.node("Max", scale, constant(np.finfo(np.float32).tiny, np.float32))
    exact = emitter.node("Div", states, scale)
    numbers = emitter.node("QuantizeLinear", exact, one, zero)
    rounded = emitter.node("DequantizeLinear", numbers, one, zero)
    parts = []
    for part, words in ((emitter.node("Sub", exact, rounded), norm), (rounded, error)):
        length = emitter.node("ReduceMax", emitter.node("ReduceL2", part, axis), attributes={"keepdims": 0})
        parts.append(emitter.node("Mul", words, length))  # [vocab]
    return numbers, scale, emitter.node("Add", *parts)


def _screen_product(
    emitter: Emitter, numbers: ir.Value, blocks: ir.Value, columns: ir.Value, room: ir.Value
) -> tuple[ir.Value]:
    """Upper bounds of the logits, [rows, vocab], in multiples of the rows' scales."""
    one, zero = emitter.constant(1.0, np.float32), emitter.constant(LEVELS + 1, np.uint8)
    inputs = (numbers, columns_from_blocks(emitter, blocks, columns), one, columns, zero, None, room)
    return (emitter.node("MatMulIntegerToFloat", *inputs, domain=CONTRIB),)


def _screen_best(
    emitter: Emitter,
    bounds: ir.Value,
    scale: ir.Value,
    states: ir.Value,
    weight: ir.Value,
    bias: ir.Value,
    banned: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """The best candidate in float32; in rows without a proof, the best of all words."""
    hidden = emitter.node("Expand", emitter.constant(-np.inf, np.float32), emitter.shape_of(banned))
    allowed = emitter.node("ScatterElements", bias, banned, hidden, attributes={"axis": 0})  # added to logits
    bounds = emitter.node("Add", emitter.node("Mul", bounds, scale), allowed)
    size = emitter.sizes(min(CANDIDATES, emitter.config.tgt_vocab_size))
    values, indices = emitter.nodes("TopK", bounds, size, outputs=2)
    least = emitter.node("ReduceMin", values, emitter.constant([1], np.int64), attributes={"keepdims": 1})
    # Candidates are in the order of their ids, so that of equal logits the lowest id wins.
    words, _ = emitter.nodes("TopK", indices, size, outputs=2, attributes={"largest": 0})
    rows = emitter.node("Gather", weight, words)  # [rows, CANDIDATES, d_model]
    logits = emitter.node("MatMul", rows, emitter.node("Unsqueeze", states, emitter.sizes(-1)))
    logits = emitter.node(
        "Add", emitter.node("Squeeze", logits, emitter.sizes(-1)), emitter.node("Gather", allowed, words)
    )
    best, places = emitter.nodes("TopK", logits, emitter.sizes(1), outputs=2)
    ids = emitter.node("GatherElements", words, places, attributes={"axis": 1})

    # Written so that a row with NaN is not proven.
    unproven = emitter.node("Not", emitter.node("Squeeze", emitter.node("Greater", best, least), emitter.sizes(1)))
    rest = emitter.node("Compress", states, unproven, attributes={"axis": 0})  # almost always no rows
    whole = emitter.node("Gemm", rest, weight, allowed, attributes={"transB": 1})
    where = emitter.node("Transpose", emitter.node("NonZero", unproven), attributes={"perm": (1, 0)})
    best, ids = (
        emitter.node("ScatterND", old, where, new)
        for old, new in zip((best, ids), emitter.nodes("TopK", whole, emitter.sizes(1), outputs=2), strict=True)
    )
    return best, ids
