"""Faults in the tokenizers and the manifest of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fuzz.faults.edits import (
    Plant,
    file_replaced,
    files_swapped,
    in_config,
    in_json,
    words_swapped,
)
from fuzz.faults.fault import Fault
from tfexport.bundle.reader import MANIFEST


def tokenizer_faults() -> list[Fault]:
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


def manifest_faults() -> list[Fault]:
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
        fault("tensorrt by ort-cuda", "TensorRT has none of these operators", ("runtimes",),
              dialect("tensorrt", "float16", "ort-cuda"), precision="fp16"),
        fault("dialects swapped", "TensorRT would be given operators that it has not", ("decoder_step",),
              entries_swapped("decoder_step.fp16.onnx", "decoder_step.fp16.ort-cuda.onnx"), precision="fp16"),
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
