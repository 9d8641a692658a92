"""What one step launches, graph by graph: each is bound to memory of one size and run by itself, without a search."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cuda_dry import stand_in
from benchmarks.cuda_dry.stand_in import Counts
from tfexport import contract, graph_contract
from tfexport.bundle.reader import Bundle
from tfexport.config import ModelConfig
from tfexport.contract import BEST_TOKENS, Dialect, GraphSpec, Role
from tfexport.runtimes.cuda_provider import WITHOUT_XQA
from tfexport.runtimes.device import Device, DeviceTensor
from tfexport.runtimes.ort import OrtExecutable

SLOTS, SOURCE, BEAM = 64, 64, 4
GRAPHS: Mapping[Dialect, tuple[Role, ...]] = {
    "ort-cuda": ("decoder_step", "beam_step"),
    "onnx24": ("decoder_step", "greedy_search", "beam_search"),
}
"""The graphs of a step that `ort-cuda` runs, and the portable step beside them."""


def step_rows(bundle: Bundle, model: str, device: Device, batches: Sequence[int]) -> list[Any]:
    """Counts of one run of every graph of a step of `ort-cuda`, for some numbers of sentences."""
    os.environ.setdefault(*WITHOUT_XQA)
    rows = []
    for short, precision in contract.FLOATS.items():
        for dialect, roles in GRAPHS.items():
            for spec in graph_contract.graphs_of(bundle.config, precision, dialect):
                if spec.role not in roles or not bundle.has_graph(spec.role, precision, dialect):
                    continue
                executable = OrtExecutable(bundle.graph(spec.role, precision, dialect), device, 1, record=False)
                for batch in batches:
                    case = {"model": model, "precision": short, "dialect": dialect, "role": spec.role, "batch": batch}
                    rows.append({**case, **_counted(executable, spec, bundle.config, device, batch)})
    return rows


def _counted(
    executable: OrtExecutable, spec: GraphSpec, config: ModelConfig, device: Device, batch: int
) -> dict[str, Any]:
    memory, tensors = [], {}
    for name, shape, dtype in _tensors(spec, config, batch):
        tensor = DeviceTensor(0, shape, dtype)
        memory.append(device.allocate(tensor.nbytes))
        tensors[name] = tensor._replace(address=memory[-1].address)
    for past, present in spec.caches.items():
        tensors[present] = tensors[past]
    call = executable.bind(tensors)
    call()  # sets up what is set up once
    stand_in.forget_kernels()
    before = Counts.now()
    call()
    counts = Counts.now().since(before)
    return {"counts": counts, "kernels": _families(stand_in.kernels())}


def _tensors(spec: GraphSpec, config: ModelConfig, batch: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    # The standard step has a beam in its rows, and the one of `ort-cuda` has a sentence in each.
    beam = BEAM if spec.role in ("beam_step", "beam_search") else 1
    sizes = {"batch": batch, "rows": batch * beam, "beam": beam, "src": SOURCE, "cache": SLOTS * beam}
    sizes |= {"found": BEST_TOKENS, "candidates": 2 * beam}
    for tensor in (*spec.inputs, *spec.outputs):
        shape = (sizes[axis] if isinstance(axis, str) else axis for axis in contract.shape(tensor, config))
        yield tensor.name, tuple(shape), tensor.dtype


def _families(kernels: Mapping[str, int]) -> dict[str, int]:
    """Kernels by their names without types and arguments."""
    found: dict[str, int] = {}
    for name, count in kernels.items():
        family = name.removeprefix("void ").partition("<")[0].partition("(")[0].rpartition("::")[2]
        found[family] = found.get(family, 0) + count
    return found


def bundle_sizes(directory: Path) -> dict[str, int]:
    """Bytes of a bundle's files, by what they are: weights, and graphs by their dialect."""
    found: dict[str, int] = {}
    for path in sorted(directory.iterdir()):
        kind = path.name if path.suffix == ".safetensors" else _dialect_of(path.name) if path.suffix == ".onnx" else ""
        if kind:
            found[kind] = found.get(kind, 0) + path.stat().st_size
    return found


def _dialect_of(name: str) -> str:
    parts = name.split(".")
    found = {"ort": "ort", "ort-cuda": "ort-cuda"}
    return f"graphs of {found.get(parts[-2], 'onnx24')}"
