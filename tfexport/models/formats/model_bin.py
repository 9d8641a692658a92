"""CTranslate2's `model.bin`: variables by name, in floating point or in integers with scales, and other names for them.

Source of the layout: `specs/model_spec.py` of CTranslate2 4.8 for what is written today (version 6), its `models/model.cc`
for what versions 1 to 5 wrote. No length is believed before the file has so many bytes left.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError
from tfexport.system.regular_files import open_regular

VERSION = 6
"""The newest version of the layout that is read."""

_TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16, np.int16)
"""By type id; the last is bfloat16, which NumPy does not have: its bits."""
_BFLOAT16 = 5
_BY_SIZE = {4: 0, 2: 2, 1: 1}
"""Type ids by bytes of a number, which is what versions 1 to 3 tell."""
_GLOBAL_INT16_SCALE = 1000.0
"""Of 16-bit weights without a scale, as the first versions wrote them (`ops/quantize.cc`)."""
_GIT_LFS = int.from_bytes(b"vers", "little")
"""What a pointer of Git LFS begins with, as a number: `version https://git-lfs...`."""
_MOST_AXES = 4
_MOST_ALIASES = 16
"""How many times a file may use its numbers. Layers share weights; but each may be copied, as it is converted."""


@dataclass(frozen=True)
class ModelBin:
    """What a `model.bin` holds. Other names for a tensor stand beside its own, with the same tensor."""

    version: int
    spec: str
    """The name of the model's layout, such as TransformerSpec."""
    revision: int
    """Of the layout."""
    weights: dict[str, Tensor]
    """float32, of one axis or more; integers are multiplied by the inverse of their scales."""
    attributes: dict[str, int | float]
    """Single numbers; those that were stored in floating point are floats."""
    texts: dict[str, str]


def read_model_bin(path: Path, check: Callable[[str, int], None]) -> ModelBin:
    """Read all of a file.

    Args:
        check: is given the name of the model's layout and its revision before anything large is read, and raises what
            should come out where they are not those of a model that can be used.

    Raises:
        CheckpointError: the file is missing, is not complete or contradicts itself.
        ConfigError: it is of a later version, or has weights of 4 bits.
    """
    try:
        with open_regular(path) as stream:
            return _Reader(path, stream).read(check)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}. Check that it was copied completely.") from error


class _Reader:
    def __init__(self, path: Path, stream: IO[bytes]):
        self._path, self._stream = path, stream
        self._left = os.fstat(stream.fileno()).st_size

    def read(self, check: Callable[[str, int], None]) -> ModelBin:
        version = self._number("I")
        if version == _GIT_LFS:
            raise CheckpointError(
                f"{self._path} is a pointer of Git LFS in the place of the model. Fetch the model with `git lfs pull`."
            )
        if version >= 2**16:
            raise self._damaged("begins with no version of CTranslate2's layout")
        if version > VERSION:
            raise ConfigError(
                f"{self._path} has version {version} of CTranslate2's layout, and versions up to {VERSION} are read. "
                "Convert the model with an earlier CTranslate2, or give the checkpoint that it was made from."
            )
        if version < 1:
            raise self._damaged("begins with version 0")
        spec, revision = (self._text(), self._number("I")) if version >= 2 else ("", 1)
        check(spec, revision)
        found: dict[str, Tensor] = {}
        for _ in range(self._number("I")):
            name = self._text()
            if name in found:
                raise self._damaged(f"has {name} twice")
            found[name] = self._variable(name, version)
        aliases = self._aliases(found) if version >= 3 else {}
        if self._left:
            raise self._damaged(f"goes on for {self._left} bytes after its end")
        return self._sorted(version, spec, revision, found, aliases)

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {what}, so it is damaged. Check that it was copied completely.")

    def _bytes(self, count: int) -> bytes:
        """The next `count` bytes, which are there."""
        data = self._stream.read(count) if count <= self._left else b""
        if len(data) != count:
            raise self._damaged(f"ends where {count} more bytes should be")
        self._left -= count
        return data

    def _number(self, kind: str) -> int:
        (number,) = struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}")))
        return int(number)

    def _text(self) -> str:
        """A string as in C, with its length, the last 0 counted."""
        data = self._bytes(self._number("H"))
        return data.partition(b"\0")[0].decode("utf-8")

    def _variable(self, name: str, version: int) -> Tensor:
        shape = [self._number("I") for _ in range(self._number("B"))]
        kind = self._number("B")
        if version < 4:
            size, kind = kind, _BY_SIZE.get(kind, len(_TYPES))
            n_bytes = self._number("I") * size
        else:
            n_bytes = self._number("I")
        if kind >= len(_TYPES):
            raise self._damaged(f"has {name} in numbers of no known kind")
        dtype = np.dtype(_TYPES[kind]).newbyteorder("<")
        if len(shape) > _MOST_AXES or 0 in shape or math.prod(shape) * dtype.itemsize != n_bytes:
            raise self._damaged(f"says that {name} is {shape}, in {n_bytes} bytes")
        array = np.frombuffer(self._bytes(n_bytes), dtype).reshape(shape)
        tensor = torch.from_numpy(array.astype(_TYPES[kind]))  # which can be written to
        return tensor.view(torch.bfloat16) if kind == _BFLOAT16 else tensor

    def _aliases(self, found: dict[str, Tensor]) -> dict[str, str]:
        aliases: dict[str, str] = {}
        for _ in range(self._number("I")):
            alias, name = self._text(), self._text()
            if name not in found:
                raise self._damaged(f"says that {alias} is {name}, which it does not have")
            if alias in found or alias in aliases:
                raise self._damaged(f"has {alias} twice")
            aliases[alias] = name
        return aliases

    def _sorted(
        self, version: int, spec: str, revision: int, found: dict[str, Tensor], aliases: dict[str, str]
    ) -> ModelBin:
        weights: dict[str, Tensor] = {}
        attributes: dict[str, int | float] = {}
        texts: dict[str, str] = {}
        scales = {f"{name}_scale" for name, tensor in found.items() if _is_quantized(tensor)}
        for name, tensor in found.items():
            if name in scales:
                continue
            if tensor.dim() == 0:
                attributes[name] = tensor.item()
            elif tensor.dtype == torch.int8 and tensor.dim() == 1:
                texts[name] = tensor.numpy().tobytes().decode("utf-8", errors="replace")
            elif tensor.is_floating_point():
                weights[name] = tensor.float()
            elif not _is_quantized(tensor):
                raise self._damaged(f"has {name} in {len(tensor)} whole numbers")
            else:
                weights[name] = self._dequantized(name, tensor, found.get(f"{name}_scale"))
        used = own = sum(tensor.nbytes for tensor in weights.values())
        for alias, name in aliases.items():
            if name in weights:
                weights[alias] = weights[name]
                used += weights[name].nbytes
        if used > _MOST_ALIASES * own:
            raise self._damaged("has other names for more weights than a model has")
        return ModelBin(version, spec, revision, weights, attributes, texts)

    def _dequantized(self, name: str, tensor: Tensor, scale: Tensor | None) -> Tensor:
        """As `ops/dequantize_cpu.cc` defines it: multiplied by the inverse, in float32, of one scale for a row (8 bits) or
        for all (16 bits)."""
        if tensor.dtype == torch.int32:
            raise ConfigError(
                f"{self._path} has {name} in 4 bits (AWQ), which is not supported. Convert the model again without AWQ."
            )
        if scale is None and tensor.dtype == torch.int16:
            scale = torch.tensor(_GLOBAL_INT16_SCALE)
        wanted = [tensor.shape[0]] if tensor.dtype == torch.int8 else []
        if scale is None or not scale.is_floating_point() or list(scale.shape) != wanted:
            told = "none" if scale is None else f"one of {list(scale.shape)}"
            raise self._damaged(f"has {name} in integers, which need a {name}_scale of {wanted}, and has {told}")
        inverse = 1.0 / scale.float()
        return tensor.float() * inverse.reshape(*wanted, *[1] * (tensor.dim() - len(wanted)))


def _is_quantized(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and not tensor.is_floating_point()
