"""The time that decoding with all weights cannot be below: what is read and computed, by what the machine does at most.

A step of the decoder has one row for each live hypothesis. With d = d_model, f = d_ff, L decoder layers, vocabulary V,
R rows of B sentences (R = B * beam), S source ids and C filled cache slots:

    products with weights   R * 2 * (L * (6 * d * d + 2 * d * f) + V * d) operations
                            (self-attention has four d x d matrices, cross-attention two: its keys and values are the
                            encoder's part; a multiply-add is two operations)
    attention               R * L * 4 * d * (C + S) operations (scores, and weighted sums of values)
    weights read            (L * (6 * d * d + 2 * d * f) + V * d) * bytes of a weight, once for all rows of a batch
    keys and values read    2 * L * d * (R * C + B * S) * bytes of an activation

    seconds of a step >= max(bytes / bandwidth of so many bytes, operations / peak)

What is proven to make no difference need not be read: `ort-cpu` may be below this where it screens the vocabulary, or passes
over inputs that a ReLU made 0.

The encoder is counted likewise: E layers of 4 * d * d + 2 * d * f, and 2 * d * d for each decoder layer's cross keys and
values. Left out, as it makes the bound lower: biases, norms, embedding rows, softmax, the search, padding, whatever is
written, and that a beam has one row before its first step.

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
class Floor:
    """The least time of a stream of sentences."""

    seconds: float
    encoder_seconds: float
    step_seconds: float
    """Of a mean step."""
    steps: int
    bound: Literal["memory", "compute"]
    """What the mean step waits for."""


def step_work(config: ModelConfig, precision: str, *, batch: float, beam: int, source: float, cache: float) -> Work:
    """One step of `batch` sentences with `source` ids and `cache` filled slots; means may be given."""
    rows, d, layers = batch * beam, config.d_model, config.n_decoder_layers
    matrices = layers * (6 * d * d + 2 * d * config.d_ff)
    projection = config.tgt_vocab_size * d
    keys_and_values = 2 * layers * d * (rows * cache + batch * source)
    return Work(
        matrices * WEIGHT_BYTES[precision]
        + projection * PROJECTION_BYTES[precision]
        + keys_and_values * ACTIVATION_BYTES[precision],
        rows * 2 * (matrices + projection),
        rows * layers * 4 * d * (cache + source),
    )


def encoder_work(config: ModelConfig, precision: str, sources: Sequence[int]) -> Work:
    """The encoder on one batch, `sources` ids a sentence, with the cross keys and values of all decoder layers."""
    d = config.d_model
    matrices = config.n_encoder_layers * (4 * d * d + 2 * d * config.d_ff) + config.n_decoder_layers * 2 * d * d
    squares = sum(length * length for length in sources)
    return Work(
        matrices * WEIGHT_BYTES[precision],
        sum(sources) * 2 * matrices,
        config.n_encoder_layers * 4 * d * squares,
    )


def seconds_of(work: Work, precision: str, peaks: Peaks) -> tuple[float, Literal["memory", "compute"]]:
    """The least time of `work`, and what it waits for.

    Only memory bounds half precision: how fast a CPU multiplies it is not measured.
    """
    memory = work.bytes / peaks.bandwidth(work.bytes)
    compute = 0.0
    peak = peaks.operations.get(MULTIPLIED_IN.get(precision, ""))
    if peak:
        compute = work.products / peak + work.attention / peaks.operations["float32"]
    return (memory, "memory") if memory >= compute else (compute, "compute")


def floor(
    config: ModelConfig,
    precision: str,
    peaks: Peaks,
    *,
    sources: Sequence[int],
    outputs: Sequence[int],
    batch: int,
    beam: int,
) -> Floor:
    """The least time to decode sentences of `sources` ids to `outputs` tokens, at most `batch` of them in a step.

    However sentences share steps, there are at least as many as the longest output has tokens, and as all outputs have
    by `batch`. Threads share all of it without loss.
    """
    tokens = sum(outputs)
    steps = max(math.ceil(tokens / batch), max(outputs))
    # Means over the steps of all sentences: their sums are what counts, because work is linear in each of them.
    work = step_work(
        config,
        precision,
        batch=tokens / steps,
        beam=beam,
        source=sum(source * length for source, length in zip(sources, outputs, strict=True)) / tokens,
        cache=sum(length * (length + 1) / 2 for length in outputs) / tokens,
    )
    step, bound = seconds_of(work, precision, peaks)
    ordered = sorted(sources)
    parts = [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
    encoder = sum(seconds_of(encoder_work(config, precision, part), precision, peaks)[0] for part in parts)
    return Floor(encoder + steps * step, encoder, step, steps, bound)
