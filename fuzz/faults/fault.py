"""A fault, as all files of faults list them, and the maker of faults in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuzz.faults.edits import Plant, in_graph


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a bundle."""

    name: str
    base: str
    """The checkpoint whose bundle it is planted into; see `bases.py`."""
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
        variants = {".ort.": "ort", ".ort-cuda.": "ort-cuda"}
        return next((dialect for variant, dialect in variants.items() if variant in self.file), "onnx24")


E0, E1, D0, D1 = "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"
ONE, ONE32 = np.int64(1), np.int32(1)
NEVER = "within what the kernels of this machine compute; wrong where there are none"


def fault(
    file: str,
    name: str,
    about: str,
    places: str | Sequence[str],
    *changes: Callable[[Any], None],
    base: str = "words",
    plant: Plant | None = None,
    harmless: str = "",
) -> Fault:
    """A fault in the graph `file` (without .onnx), whose name tells the precision."""
    precision = next((part for part in file.split(".") if part in ("fp16", "bf16", "int8", "int4")), "fp32")
    found = (places,) if isinstance(places, str) else tuple(places)
    path = f"{file}.onnx"
    return Fault(f"{file} {name}", base, path, precision, about, found, plant or in_graph(path, *changes), harmless)
