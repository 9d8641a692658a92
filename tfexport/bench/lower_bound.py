"""A lower bound of the time of decoding with all weights: bytes and operations, divided by the machine's peaks.

A step of the decoder computes one row for each live hypothesis. With d = d_model, a = heads * head_dim, f = d_ff (twice in a
feed-forward layer, three times with a gate: m), L decoder layers and vocabulary V:

    products with weights   rows * 2 * (L * (6 * d * a + m * d * f) + V * d) operations
                            (self-attention has four d x a matrices, cross-attention two: its keys and values are the
                            encoder's part; a multiply-add is two operations)
    attention               L * 4 * a operations for each key that a row attends to (a score, and a weighted sum of values)
    weights read            (L * (6 * d * a + m * d * f) + V * d) * bytes of a weight, once for all rows of a batch
    keys and values read    2 * L * a * bytes of an activation, for each source id and each filled cache slot

    seconds of a step >= max(bytes / bandwidth of so many bytes, operations / peak)

The hypotheses of a sentence may share their past. Then a cache has one slot for each token of the past, and one for the
last token of each hypothesis. All hypotheses begin with the same token, so the first step of a sentence has one row.

Weights that provably do not change the result need not be read: `ort-cpu` may be below this bound if it screens the
vocabulary, or skips inputs that a ReLU set to 0.

The encoder is counted in the same way: E layers of 4 * d * a + m * d * f, and 2 * d * a for each decoder layer's cross keys
and values. Left out, which makes the bound lower: biases, norms, relative positions, embedding rows, softmax, the search,
padding, and all writes.

The bandwidth is that of repeated reads of an array with the size of a step's data (`Peaks.bandwidth`). So the bound of
weights that fit into a cache is the speed of that cache, not of memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tfexport.bench.machine import Peaks
from tfexport.config import ModelConfig
from tfexport.models.sizes import cross_matrices, decoder_step_matrices, encoder_matrices, output_matrix

WEIGHT_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of each weight, without the scales of quantized weights."""
PROJECTION_BYTES = {**WEIGHT_BYTES, "float16": 4.0, "bfloat16": 4.0}
"""Bytes of each weight of the output projection, which is float32 in half-precision graphs."""
ACTIVATION_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 4.0, "int4": 4.0}
"""Bytes of each number of keys and values; int8 and int4 apply only to weights."""
MULTIPLIED_IN = {"float32": "float32", "int8": "int8", "int4": "int8"}
"""The peak that bounds products with weights of a precision. The peak of half precision is not measured."""


class Work(NamedTuple):
    """The minimum of reads and operations."""

    bytes: float
    products: float
    """Operations of products with weights."""
    attention: float
    """Operations between activations."""


@dataclass(frozen=True)
class LowerBound:
    """The minimum time of a stream of sentences."""

    seconds: float
    encoder_seconds: float
    step_seconds: float
    """The seconds of a mean step."""
    steps: int
    bound: Literal["memory", "compute"]
    """The resource that limits the mean step."""


class StepSize(NamedTuple):
    """The size of a decoder step, or the mean size of several: work is linear in each number."""

    rows: float
    """The number of computed hypotheses."""
    attended: float
    """The number of keys in self- and cross-attention, summed over the rows."""
    stored: float
    """The number of tokens whose keys and values are read: source ids and filled slots, summed over the sentences."""

    @classmethod
    def mean(cls, sources: Sequence[int], outputs: Sequence[int], *, beam: int, steps: int) -> StepSize:
        """The mean size of `steps` that decode sentences of `sources` ids to `outputs` tokens."""
        rows, attended, stored = 0, 0, 0
        for source, length in zip(sources, outputs, strict=True):
            if length:
                later = length - 1  # steps after the first, which has one row and one slot
                slots = length * (length + 1) // 2 - 1  # tokens of a hypothesis in these steps: 2, 3, .. length
                rows += 1 + beam * later
                attended += (1 + source) + beam * (slots + source * later)
                stored += (1 + source) + slots + (beam - 1 + source) * later
        return cls(rows / steps, attended / steps, stored / steps)


def step_work(config: ModelConfig, precision: str, size: StepSize) -> Work:
    """The work of a decoder step of this size."""
    layers, attention = config.n_decoder_layers, config.d_attention
    matrices, projection = decoder_step_matrices(config), output_matrix(config)
    return Work(
        matrices * WEIGHT_BYTES[precision]
        + projection * PROJECTION_BYTES[precision]
        + 2 * layers * attention * size.stored * ACTIVATION_BYTES[precision],
        size.rows * 2 * (matrices + projection),
        layers * 4 * attention * size.attended,
    )


def encoder_work(config: ModelConfig, precision: str, sources: Sequence[int]) -> Work:
    """The work of the encoder for a batch of sentences of `sources` ids, with all decoder layers' cross keys and values."""
    matrices = encoder_matrices(config) + cross_matrices(config)
    squares = sum(length * length for length in sources)
    return Work(
        matrices * WEIGHT_BYTES[precision],
        sum(sources) * 2 * matrices,
        config.n_encoder_layers * 4 * config.d_attention * squares,
    )


def least_seconds(work: Work, precision: str, peaks: Peaks) -> tuple[float, Literal["memory", "compute"]]:
    """The minimum time of `work`, and the resource that limits it.

    Half precision has only the bound of memory, because its multiplication speed is not measured.
    """
    memory = work.bytes / peaks.bandwidth(work.bytes)
    compute = 0.0
    peak = peaks.operations.get(MULTIPLIED_IN.get(precision, ""))
    if peak:
        compute = work.products / peak + work.attention / peaks.operations["float32"]
    return (memory, "memory") if memory >= compute else (compute, "compute")


def lower_bound(
    config: ModelConfig,
    precision: str,
    peaks: Peaks,
    *,
    sources: Sequence[int],
    outputs: Sequence[int],
    batch: int,
    beam: int,
) -> LowerBound:
    """The minimum time to decode sentences of `sources` ids to `outputs` tokens, with at most `batch` sentences per step.

    However sentences share steps, the number of steps is at least the length of the longest output, and at least all
    output tokens divided by `batch`. Threads are assumed to share the work without loss.
    """
    steps = max(math.ceil(sum(outputs) / batch), max(outputs))
    # The work of a step is linear in its size, so the mean step has the mean size.
    size = StepSize.mean(sources, outputs, beam=beam, steps=steps)
    step, bound = least_seconds(step_work(config, precision, size), precision, peaks)
    ordered = sorted(sources)
    parts = [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
    encoder = sum(least_seconds(encoder_work(config, precision, part), precision, peaks)[0] for part in parts)
    return LowerBound(encoder + steps * step, encoder, step, steps, bound)
