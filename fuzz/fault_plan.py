"""Faults in the weights, tokenizers and manifest of a bundle; those of graphs have files of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fuzz.fault_edits import (
    Array,
    Plant,
    Tensors,
    file_replaced,
    files_swapped,
    filled,
    in_config,
    in_json,
    in_weights,
    rows_swapped,
    scaled,
    tensors_swapped,
    transposed,
    words_swapped,
)
from tfexport.bundle.reader import MANIFEST
from tfexport.contract import SCREENING_FILE, WEIGHTS_FILE
from tfexport.graphs.projections import PARTS, STACKED


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a bundle."""

    name: str
    base: str
    """The checkpoint whose bundle it is planted into; see `fault_bases.py`."""
    file: str
    precision: str
    """Whose verdict it spoils, as flags name it."""
    about: str
    places: tuple[str, ...]
    """What `--bisect` is to name: any of these, in a line of its output."""
    plant: Plant
    harmless: str = ""
    """Why no output can change, where that is so."""

    @property
    def dialect(self) -> str:
        """Of the graph, or what kind of file it is."""
        if not self.file.endswith(".onnx"):
            return "weights" if self.file.endswith(".safetensors") else "text" if "token" in self.file else "manifest"
        variants = {".ort.": "ort", ".ort-cuda.": "ort-cuda", ".lengths.": "onnx24-lengths"}
        return next((dialect for variant, dialect in variants.items() if variant in self.file), "onnx24")


E0, E1, D0, D1 = "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"


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


def _weights() -> list[Fault]:
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


def _tokenizers() -> list[Fault]:
    def fault(name: str, about: str, side: str, plant: Plant, base: str = "words", harmless: str = "") -> Fault:
        file = f"{side}_tokenizer.json"
        return Fault(f"tokenizer {name}", base, file, "fp32", about, (file, f"{side} tok"), plant, harmless)

    def source(name: str, about: str, change: Callable[[Any], None]) -> Fault:
        return fault(name, about, "source", in_json("source_tokenizer.json", change))

    def set_pre_tokenizer(content: Any) -> None:
        content["tokenizer"]["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithNext",
            "invert": False,
        }

    def without_first_word(content: Any) -> None:
        words = content["tokenizer"]["model"]["vocab"]
        words["gone"] = words.pop(next(word for word, index in words.items() if index == 80))

    return [
        fault("target words", "two words that come, swapped", "target", words_swapped("target", 10, 11)),
        fault("rare target words", "two words that never come", "target", words_swapped("target", 70, 71)),
        fault("source words", "two words of the text swapped", "source", words_swapped("source", 10, 11)),
        fault("rare source words", "two words that no line has", "source", words_swapped("source", 70, 71)),
        fault("native target words", "of 1,100", "target", words_swapped("target", 70, 71), base="screened"),
        source("lowercase", "upper case is kept", lambda c: c["tokenizer"].update(normalizer=None)),
        source("pre-tokenizer", "a space belongs to the word after it", set_pre_tokenizer),
        source("unknown", "unknown words become padding", lambda c: c["tokenizer"]["model"].update(unk_token="<pad>")),
        source("a word renamed", "a word that no line has", without_first_word),
        source("prefix", "every line begins with a word more", lambda c: c.update(prefix="wort9 ")),
        source("language", "every line begins with an id more", lambda c: c.update(before=[9])),
    ]


def _manifest() -> list[Fault]:
    def fault(
        name: str,
        about: str,
        places: Sequence[str],
        plant: Plant,
        *,
        base: str = "words",
        precision: str = "fp32",
        harmless: str = "",
    ) -> Fault:
        found = (MANIFEST, *places)
        return Fault(f"manifest {name}", base, MANIFEST, precision, about, found, plant, harmless)

    def field(name: str, value: Any, about: str, base: str = "words", harmless: str = "") -> Fault:
        return fault(f"{name} ({base})", about, (name,), in_config(name, value), base=base, harmless=harmless)

    def entries_swapped(one: str, other: str) -> Plant:
        def change(manifest: Any) -> None:
            first, second = (next(g for g in manifest["graphs"] if g["file"] == name) for name in (one, other))
            first["file"], second["file"] = other, one

        return in_json(MANIFEST, change)

    def dialect(runtime: str, precision: str, value: str) -> Plant:
        def change(manifest: Any) -> None:
            assert manifest["runtimes"][runtime][precision] != value
            manifest["runtimes"][runtime][precision] = value

        return in_json(MANIFEST, change)

    def given(name: str, value: Any) -> Plant:
        return in_json(MANIFEST, lambda manifest: manifest["source"]["given"].update({name: value}))

    def tokenizers_swapped(manifest: Any) -> None:
        sides = manifest["tokenizers"]
        sides["source"], sides["target"] = sides["target"], sides["source"]

    same = "the other dialect computes the same, only slower"
    return [
        field("eos_id", 4, "outputs end at a word"),
        field("bos_id", 0, "outputs begin with another token"),
        field("source_eos", False, "sources without their end"),
        field("source_bos", False, "sources without their beginning"),
        field("unk_id", 5, "the id of unknown words"),
        field("pad_id", 0, "another padding", harmless="what is behind the lengths counts for nothing"),
        field("norm_eps", 1e-3, "PyTorch over this bundle computes otherwise"),
        field("embedding_scale", 6.9, "PyTorch over this bundle computes otherwise"),
        field("activation", "gelu", "PyTorch over this bundle computes otherwise"),
        field("norm_first", True, "PyTorch over this bundle computes otherwise"),
        field("max_target_length", 12, "outputs are cut short"),
        field("max_source_length", 9, "long sources are refused"),
        field("n_heads", 6, "heads of another size"),
        field("n_encoder_heads", 6, "heads of another size in the encoder alone"),
        field("n_encoder_heads", 0, "the decoder's heads in the encoder", "screened"),
        field("final_norm_eps", 1e-3, "PyTorch over this bundle computes otherwise", "screened"),
        field("final_norm_in", "decoder", "PyTorch over this bundle computes otherwise", "screened"),
        field("positions", "none", "PyTorch over this bundle computes otherwise", "screened"),
        field("forced_first_id", 9, "outputs begin with this word"),
        field("suppressed_ids", [20], "a word that cannot come"),
        field("suppressed_ids", [], "padding may come", "screened"),
        field("suppressed_first_ids", [], "an output may be empty", "screened"),
        field("eos_id", 5, "outputs end at a word", "sharp"),
        field("suppressed_ids", [], "padding may come", "sharp"),
        field("max_distance", 14, "PyTorch over this bundle computes otherwise", "relative"),
        fault("fp32 by onnx24", "ort-cpu runs other graphs", ("runtimes",), dialect("ort-cpu", "float32", "onnx24"),
              harmless=same),
        fault("fp16 by lengths", "ort-cpu runs other graphs", ("runtimes",),
              dialect("ort-cpu", "float16", "onnx24-lengths"), precision="fp16", harmless=same),
        fault("tensorrt by lengths", "TensorRT ignores lengths", ("runtimes",),
              dialect("tensorrt", "float16", "onnx24-lengths"), precision="fp16"),
        fault("dialects swapped", "TensorRT would be given lengths, which it ignores", ("decoder_step",),
              entries_swapped("decoder_step.fp16.onnx", "decoder_step.fp16.lengths.onnx"), precision="fp16"),
        fault("int8 by int4", "a step of another precision", ("decoder_step",),
              entries_swapped("decoder_step.int8.ort.onnx", "decoder_step.int4.ort.onnx"), precision="int4"),
        fault("greedy by int4", "a step of another precision", ("greedy_step",),
              entries_swapped("greedy_step.ort.onnx", "greedy_step.int4.ort.onnx")),
        fault("attention by int4", "a step of another precision", ("beam_step_attention",),
              entries_swapped("beam_step_attention.ort.onnx", "beam_step_attention.int4.ort.onnx")),
        fault("files swapped", "two graphs under each other's names", ("beam_step",),
              files_swapped("beam_step.ort.onnx", "beam_step.int4.ort.onnx")),
        fault("encoder replaced", "the encoder of float32 in the place of int4's", ("encoder",),
              file_replaced("encoder.int4.ort.onnx", "encoder.ort.onnx"), precision="int4"),
        fault("given heads", "the checkpoint would be read with other heads", ("given", "n_heads"), given("n_heads", 6)),
        fault("given pad", "the checkpoint would be read with another padding", ("given", "pad_id"),
              given("pad_id", 0)),
        fault("given eos", "the checkpoint would be read with another end", ("given", "eos_id"), given("eos_id", 4)),
        fault("tokenizers swapped", "sources are read with the target's words", ("tokenizer",),
              in_json(MANIFEST, tokenizers_swapped)),
    ]  # fmt: skip


def planned() -> list[Fault]:
    """Faults of all files but the graphs."""
    return [*_weights(), *_tokenizers(), *_manifest()]
