"""A lower bound of the time that decoding with all weights takes: bytes and operations, divided by the machine's peaks.

A step of the decoder computes one row for each live hypothesis. With d = d_model, a = heads * head_dim, f = d_ff (twice in a
feed-forward layer, three times with a gate: m), L decoder layers and vocabulary V:

    products with weights   rows * 2 * (L * (6 * d * a + m * d * f) + V * d) operations
                            (self-attention has four d x a matrices, cross-attention two: its keys and values are the
                            encoder's part; a multiply-add is two operations)
    attention               L * 4 * a operations for each key that a row attends to (a score, and a weighted sum of values)
    weights read            (L * (6 * d * a + m * d * f) + V * d) * bytes of a weight, once for all rows of a batch
    keys and values read    2 * L * a * bytes of an activation, for each source id and each filled cache slot

    seconds of a step >= max(bytes / bandwidth of so many bytes, operations / peak)

The hypotheses of a sentence may share their past: a cache then has one slot for each token of it, and one for the last token
of each hypothesis. They begin alike: the first step of a sentence has one row.

What is proven to make no difference need not be read: `ort-cpu` may be below this where it screens the vocabulary, or passes
over inputs that a ReLU made 0.

The encoder is counted likewise: E layers of 4 * d * a + m * d * f, and 2 * d * a for each decoder layer's cross keys and
values. Left out, as it makes the bound lower: biases, norms, relative positions, embedding rows, softmax, the search,
padding, and whatever is written.

Bandwidth is that of an array of the size of what a step reads, read over and over (`Peaks.bandwidth`). So weights that fit
into a cache are bound by that cache, not by memory.
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
"""Of each weight; the scales of quantized ones are left out."""
PROJECTION_BYTES = {**WEIGHT_BYTES, "float16": 4.0, "bfloat16": 4.0}
"""Of each weight of the output projection, which half-precision graphs have in float32."""
ACTIVATION_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 4.0, "int4": 4.0}
"""Of each number of keys and values; int8 and int4 are precisions of weights."""
MULTIPLIED_IN = {"float32": "float32", "int8": "int8", "int4": "int8"}
"""The peak that bounds products with weights of a precision; that of half precision is not measured."""


class Work(NamedTuple):
    """What must at least be read and computed."""

    bytes: float
    products: float
    """Operations of products with weights."""
    attention: float
    """Operations between activations."""


@dataclass(frozen=True)
class LowerBound:
    """The least time of a stream of sentences."""

    seconds: float
    encoder_seconds: float
    step_seconds: float
    """Of a mean step."""
    steps: int
    bound: Literal["memory", "compute"]
    """What the mean step waits for."""


class StepSize(NamedTuple):
    """The size of a decoder step, or of the mean of several: work is linear in each number."""

    rows: float
    """Hypotheses that are computed."""
    attended: float
    """Keys that they attend to, of self- and cross-attention, summed over the rows."""
    stored: float
    """Tokens whose keys and values are read: source ids and filled cache slots, summed over the sentences."""

    @classmethod
    def mean(cls, sources: Sequence[int], outputs: Sequence[int], *, beam: int, steps: int) -> StepSize:
        """Of the steps that decode sentences of `sources` ids to `outputs` tokens, all of it divided among `steps`."""
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
    """What a decoder step of this size reads and computes."""
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
    """The encoder on one batch, `sources` ids a sentence, with the cross keys and values of all decoder layers."""
    matrices = encoder_matrices(config) + cross_matrices(config)
    squares = sum(length * length for length in sources)
    return Work(
        matrices * WEIGHT_BYTES[precision],
        sum(sources) * 2 * matrices,
        config.n_encoder_layers * 4 * config.d_attention * squares,
    )


def least_seconds(work: Work, precision: str, peaks: Peaks) -> tuple[float, Literal["memory", "compute"]]:
    """The least time of `work`, and what it waits for.

    Only memory bounds half precision: how fast a CPU multiplies it is not measured.
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
    """The least time to decode sentences of `sources` ids to `outputs` tokens, at most `batch` of them in a step.

    However sentences share steps, there are at least as many as the longest output has tokens, and as all outputs have
    by `batch`. Threads share all of it without loss.
    """
    steps = max(math.ceil(sum(outputs) / batch), max(outputs))
    # A step is linear in its size, so that the mean step has the mean size.
    size = StepSize.mean(sources, outputs, beam=beam, steps=steps)
    step, bound = least_seconds(step_work(config, precision, size), precision, peaks)
    ordered = sorted(sources)
    parts = [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
    encoder = sum(least_seconds(encoder_work(config, precision, part), precision, peaks)[0] for part in parts)
    return LowerBound(encoder + steps * step, encoder, step, steps, bound)
