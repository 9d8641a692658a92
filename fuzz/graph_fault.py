"""The maker of faults in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fuzz.fault_edits import Plant, in_graph
from fuzz.fault_plan import Fault

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
