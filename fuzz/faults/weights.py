"""Faults in the weights of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fuzz.faults.edits import (
    Array,
    Plant,
    Tensors,
    filled,
    in_weights,
    rows_swapped,
    scaled,
    tensors_swapped,
    transposed,
)
from fuzz.faults.fault import D0, D1, E0, E1, Fault
from tfexport.contract import SCREENING_FILE, WEIGHTS_FILE
from tfexport.graphs.projections import PARTS, STACKED


def _one_number(name: str, place: tuple[int, ...], by: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][place] += by

    return change


def _changed(name: str, change: Callable[[Array], Array]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name][...] = change(tensors[name].copy())

    return edit


def slower_sinusoids(table: Array) -> Array:
    """The table with rates of 1000 in the place of 10000."""
    length, width = table.shape
    rates = 1000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.arange(length)[:, None] * rates
    interleaved = np.allclose(table[1, 1], np.cos(1.0), atol=1e-3)
    sines = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, width)
    return (sines if interleaved else np.concatenate([np.sin(angles), np.cos(angles)], axis=1)).astype(table.dtype)


def _truncated(file: str) -> Plant:
    """Half-precision weights cut off and not rounded."""

    def plant(folder: Path) -> None:
        exact = load_file(folder / WEIGHTS_FILE)

        def change(tensors: Tensors) -> None:
            for name, tensor in tensors.items():
                if tensor.dtype == np.float32:
                    continue
                parts = [name] if name in exact else [name.replace(STACKED, part) for part in PARTS]
                wanted = np.concatenate([exact[part] for part in parts]).reshape(tensor.shape)
                if tensor.dtype == np.float16:
                    rounded = wanted.astype(np.float16)
                    above = np.abs(rounded.astype(np.float32)) > np.abs(wanted)
                    tensor[...] = np.where(above, np.nextafter(rounded, np.float16(0)), rounded)
                else:
                    cut = (wanted.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
                    tensor[...] = cut.astype(tensor.dtype)

        in_weights(file, change)(folder)

    return plant


def weight_faults() -> list[Fault]:
    def fault(
        name: str,
        about: str,
        place: str | Sequence[str],
        change: Callable[[Tensors], None],
        *,
        base: str = "words",
        precision: str = "fp32",
        file: str = "",
        harmless: str = "",
    ) -> Fault:
        file = file or (WEIGHTS_FILE if precision == "fp32" else f"weights.{precision}.safetensors")
        places = (place,) if isinstance(place, str) else tuple(place)
        return Fault(f"weights {name}", base, file, precision, about, places, in_weights(file, change), harmless)

    words, targets = "encoder.tokens", "decoder.tokens"
    rows = "encoder.tokens.weight"
    found = [
        fault("source rows", "two words that no line has, swapped", words, rows_swapped(rows, 60, 61)),
        fault("target row zero", "a word that is never written", targets, filled("decoder.tokens.weight", 0.0, 70)),
        fault("source row infinite", "a word that no line has", words, filled(rows, np.inf, 55)),
        fault(
            "position NaN",
            "a position that no output reaches",
            "decoder.positions",
            filled("decoder.positions.table", np.nan, 30),
        ),
        fault(
            "positions swapped",
            "two rows that no line reaches",
            "encoder.positions",
            rows_swapped("encoder.positions.table", 25, 26),
        ),
        fault("output rows", "two words swapped in the output", "output", rows_swapped("output_weight", 60, 61)),
        fault("output row zero", "a word without its logit", "output", filled("output_weight", 0.0, 75)),
        fault(
            "matrix 1.002",
            "a matrix too large by 0.2 %",
            f"{E1}.feed_forward.hidden",
            scaled(f"{E1}.feed_forward.hidden.weight", 1.002),
        ),
        fault(
            "bias zero",
            "the biases of a module lost",
            f"{D0}.cross_attention.output",
            filled(f"{D0}.cross_attention.output.bias", 0.0),
        ),
        fault(
            "transposed",
            "a square matrix, [in, out]",
            f"{D1}.self_attention.",
            transposed(f"{D1}.self_attention.value.weight"),
        ),
        fault("layers", "two layers in the wrong order", E0, tensors_swapped(E0, E1)),
        fault("norm 1.01", "a norm too large by 1 %", f"{D0}.norms.1", scaled(f"{D0}.norms.1.weight", 1.01)),
        fault(
            "one number",
            "one of the numbers of a matrix",
            f"{D1}.feed_forward.output",
            _one_number(f"{D1}.feed_forward.output.weight", (5, 7), 0.01),
        ),
        fault(
            "key bias",
            "the biases of keys lost",
            f"{E0}.self_attention.key",
            filled(f"{E0}.self_attention.key.bias", 0.0),
            harmless="it adds the same to the scores of all keys of a query, which softmax takes away",
        ),
        fault(
            "padding row",
            "the embedding of padding",
            words,
            filled(rows, 9.0, 1),
            harmless="padding is behind the lengths, and no line can spell it",
        ),
        fault(
            "sharp query 1.0005",
            "queries of a sharp model too large by 0.05 %",
            f"{E0}.self_attention.query",
            scaled(f"{E0}.self_attention.query.weight", 1.0005),
            base="sharp",
        ),
        fault(
            "sinusoids",
            "rates of 1000 in the place of 10000",
            "encoder.positions",
            _changed("encoder.positions.table", slower_sinusoids),
            base="screened",
        ),
        fault(
            "output bias of a rare word",
            "a word of 1,100 that never comes",
            "output",
            _one_number("output_bias", (1000,), -5.0),
            base="screened",
        ),
        fault(
            "far distances",
            "what far tokens add to scores",
            "encoder.positions",
            rows_swapped("encoder.positions.table", 0, 30),
            base="relative",
        ),
        fault("fp16 source rows", "unseen words swapped", words, rows_swapped(rows, 60, 61), precision="fp16"),
        fault(
            "fp16 matrix 1.002",
            "too large by 0.2 %, four steps of float16",
            f"{E1}.feed_forward.hidden",
            scaled(f"{E1}.feed_forward.hidden.weight", 1.002),
            precision="fp16",
        ),
        fault("fp16 norm bias", "lost", f"{D0}.norms.2", filled(f"{D0}.norms.2.bias", 0.0), precision="fp16"),
        fault(
            "bf16 position NaN",
            "a position that no line reaches",
            "encoder.positions",
            filled("encoder.positions.table", np.nan, 30),
            precision="bf16",
        ),
        fault("bf16 target row", "never written", targets, filled("decoder.tokens.weight", 0.0, 70), precision="bf16"),
        fault(
            "bf16 heads swapped",
            "rows of two heads of the values swapped",
            f"{D0}.cross_attention.value",
            _changed(f"{D0}.cross_attention.value.weight", lambda a: np.roll(a, 16, axis=0)),
            precision="bf16",
        ),
        fault(
            "int8 one scale",
            "one column too large by 1 %",
            (f"{D0}.feed_forward.output", "int8"),
            _changed(f"{D0}.feed_forward.output.scale", lambda a: np.where(np.arange(a.size) == 3, a * 1.01, a)),
            precision="int8",
        ),
        fault(
            "int8 scales",
            "all columns of a projection too large by 1 %",
            f"{E0}.self_attention.output",
            scaled(f"{E0}.self_attention.output.scale", 1.01),
            precision="int8",
        ),
        fault(
            "int8 blocks",
            "groups of inputs in the wrong order",
            f"{E0}.self_attention.query",
            _changed(f"{E0}.self_attention.query.int8", lambda a: a[:, ::-1]),
            precision="int8",
        ),
        fault(
            "int8 off by one",
            "every number of an output, each by one step",
            "output",
            _changed("output.int8", lambda a: np.where(np.arange(48)[None, None, :, None] == 7, a ^ 1, a)),
            precision="int8",
        ),
        fault(
            "int8 projections",
            "the cross queries of two layers swapped",
            f"{D0}.cross_attention.query",
            tensors_swapped(f"{D0}.cross_attention.query", f"{D1}.cross_attention.query"),
            precision="int8",
        ),
        fault(
            "int4 block scales",
            "the scales of two blocks of each output swapped",
            f"{D0}.cross_attention.output",
            _changed(f"{D0}.cross_attention.output.scale", lambda a: a[:, ::-1]),
            precision="int4",
        ),
        fault(
            "int4 pairs",
            "the two numbers of a byte swapped",
            f"{E1}.feed_forward.hidden",
            _changed(f"{E1}.feed_forward.hidden.int4", lambda a: (a << 4) | (a >> 4)),
            precision="int4",
        ),
        fault(
            "int4 scales",
            "all scales of a projection too large by 1 %",
            "cross",
            scaled("cross.scale", 1.01),
            precision="int4",
        ),
        fault(
            "int4 one number",
            "one number of a matrix off by one step",
            f"{D1}.feed_forward.hidden",
            _changed(f"{D1}.feed_forward.hidden.int4", lambda a: a ^ (np.arange(a.size).reshape(a.shape) == 99)),
            precision="int4",
        ),
    ]
    for name, tensor, change, about in (
        ("norms halved", "norm", lambda a: a / 2, "bounds are too small, so that a wrong word may be proven best"),
        ("errors zero", "error", lambda a: a * 0, "bounds without the rounding of weights"),
        ("scales 0.9", "scale", lambda a: a * np.float32(0.9), "8-bit logits too small"),
        ("words rolled", "int8", lambda a: np.roll(a, 1, axis=2), "the numbers of other words"),
        ("norm of one word", "norm", lambda a: np.where(np.arange(a.size) == 1050, 0, a), "a word that cannot win"),
    ):
        change_of: Any = _changed(f"screening.{tensor}", change)
        places = ("screening", "greedy_step")
        found.append(fault(f"screening {name}", about, places, change_of, base="screened", file=SCREENING_FILE))
    for precision in ("fp16", "bf16"):
        file = f"weights.{precision}.safetensors"
        plant = _truncated(file)
        about = "numbers are cut off, not rounded"
        found.append(Fault(f"weights {precision} truncated", "words", file, precision, about, (file, "coder."), plant))
    return found
