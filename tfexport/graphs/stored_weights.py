"""Initializers as references into a bundle's weights files, so that all graphs share one copy.

Half-precision files have the weights of query, key and value of a decoder's self-attention in one tensor, because the
dialect `ort-cuda` computes them as one product. The other graphs refer to its parts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from tfexport.graphs.projections import PARTS, STACKED
from tfexport.system.regular_files import open_regular

_TYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "I8": ir.DataType.INT8,
    "U8": ir.DataType.UINT8,
}


_Place = tuple[Path, int, str, list[int], int]
"""File, offset, type, shape and size in bytes of a tensor."""


def _parts(name: str, place: _Place) -> Iterator[tuple[str, _Place]]:
    """The tensors that are rows of the tensor `name`."""
    module, _, kind = name.rpartition(".")
    if not module.endswith(f".{STACKED}") or kind not in ("weight", "bias"):
        return
    path, offset, dtype, (rows, *rest), nbytes = place
    size = nbytes // len(PARTS)
    for index, part in enumerate(PARTS):
        shape = [rows // len(PARTS), *rest]
        yield f"{module.removesuffix(STACKED)}{part}.{kind}", (path, offset + index * size, dtype, shape, size)


class StoredWeights:
    """The tensors of safetensors files, by name, as ONNX external data."""

    def __init__(self, *paths: Path):
        self.folder = paths[0].parent
        self._entries: dict[str, _Place] = {}
        for path in paths:
            with open_regular(path) as file:
                (header_length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(header_length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                place = (path, 8 + header_length + begin, entry["dtype"], entry["shape"], end - begin)
                self._entries |= {name: place, **dict(_parts(name, place))}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> list[int]:
        return self._entries[name][3]

    def tensor(self, name: str) -> ir.ExternalTensor:
        """The tensor of this name. A weight of a Conv1d with kernel 1 is [out, in], without its last axis."""
        path, offset, dtype, shape, nbytes = self._entries[name]
        if len(shape) == 3 and shape[2] == 1:
            shape = shape[:2]
        return ir.ExternalTensor(
            path.name, offset, nbytes, _TYPES[dtype], shape=ir.Shape(shape), name=name, base_dir=path.parent
        )
