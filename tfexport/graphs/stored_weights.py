"""Initializers as references into a bundle's weights files, so that all graphs share one copy."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import onnx_ir as ir

from tfexport.system.regular_files import open_regular

_TYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "I8": ir.DataType.INT8,
    "U8": ir.DataType.UINT8,
}


class StoredWeights:
    """The tensors of safetensors files by their names, as ONNX external data."""

    def __init__(self, *paths: Path):
        self.folder = paths[0].parent
        self._entries: dict[str, tuple[Path, int, str, list[int], int]] = {}
        for path in paths:
            with open_regular(path) as file:
                (header_length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(header_length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                self._entries[name] = (path, 8 + header_length + begin, entry["dtype"], entry["shape"], end - begin)

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
