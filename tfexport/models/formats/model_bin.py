"""CTranslate2's `model.bin`: variables by name, as floating point or as integers with scales, and aliases.

Source of the layout: `specs/model_spec.py` of CTranslate2 4.8 for version 6, and its `models/model.cc` for versions 1 to 5.
Every length is checked against the remaining bytes of the file.
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
"""The newest supported version of the layout."""

_TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16, np.int16)
"""Types by type id. The last is bfloat16, which NumPy lacks; its bits are read as int16."""
_BFLOAT16 = 5
_BY_SIZE = {4: 0, 2: 2, 1: 1}
"""Type ids by item size in bytes, which versions 1 to 3 store instead."""
_GLOBAL_INT16_SCALE = 1000.0
"""Scale of 16-bit weights without a scale, from the first versions (`ops/quantize.cc`)."""
_GIT_LFS = int.from_bytes(b"vers", "little")
"""The first bytes of a Git LFS pointer (`version https://git-lfs...`), as a number."""
_MOST_AXES = 4
_MOST_ALIASES = 16
"""Maximum number of uses of a file's numbers. Layers may share weights, but the conversion may copy each of them."""


@dataclass(frozen=True)
class ModelBin:
    """The content of a `model.bin`. Aliases of a tensor are entries with the same tensor."""

    version: int
    spec: str
    """Name of the model's layout, such as TransformerSpec."""
    revision: int
    """Revision of the layout."""
    weights: dict[str, Tensor]
    """Weights in float32, with at least one axis. Integers are multiplied by the inverse of their scales."""
    attributes: dict[str, int | float]
    """Single numbers; those that are stored in floating point are floats."""
    texts: dict[str, str]


def read_model_bin(path: Path, check: Callable[[str, int], None]) -> ModelBin:
    """Read a whole file.

    Args:
        check: called with the name of the model's layout and its revision before anything large is read. It raises the error
            for an unsupported layout.

    Raises:
        CheckpointError: the file is missing, incomplete or contradicts itself.
        ConfigError: the file has a later version, or weights of 4 bits.
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
        tensors: dict[str, Tensor] = {}
        for _ in range(self._number("I")):
            name = self._text()
            if name in tensors:
                raise self._damaged(f"has {name} twice")
            tensors[name] = self._variable(name, version)
        aliases = self._aliases(tensors) if version >= 3 else {}
        if self._left:
            raise self._damaged(f"has {self._left} bytes after its end")
        return self._sorted(version, spec, revision, tensors, aliases)

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {what}, so it is damaged. Check that it was copied completely.")

    def _bytes(self, count: int) -> bytes:
        """The next `count` bytes; raises CheckpointError if the file ends before."""
        data = self._stream.read(count) if count <= self._left else b""
        if len(data) != count:
            raise self._damaged(f"ends where {count} more bytes should be")
        self._left -= count
        return data

    def _number(self, kind: str) -> int:
        (number,) = struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}")))
        return int(number)

    def _text(self) -> str:
        """A C string after its length, which includes the terminating 0."""
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
        tensor = torch.from_numpy(array.astype(_TYPES[kind]))  # a writable copy
        return tensor.view(torch.bfloat16) if kind == _BFLOAT16 else tensor

    def _aliases(self, tensors: dict[str, Tensor]) -> dict[str, str]:
        aliases: dict[str, str] = {}
        for _ in range(self._number("I")):
            alias, name = self._text(), self._text()
            if name not in tensors:
                raise self._damaged(f"says that {alias} is {name}, which it lacks")
            if alias in tensors or alias in aliases:
                raise self._damaged(f"has {alias} twice")
            aliases[alias] = name
        return aliases

    def _sorted(
        self, version: int, spec: str, revision: int, tensors: dict[str, Tensor], aliases: dict[str, str]
    ) -> ModelBin:
        weights: dict[str, Tensor] = {}
        attributes: dict[str, int | float] = {}
        texts: dict[str, str] = {}
        scales = {f"{name}_scale" for name, tensor in tensors.items() if _is_quantized(tensor)}
        for name, tensor in tensors.items():
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
                weights[name] = self._dequantized(name, tensor, tensors.get(f"{name}_scale"))
        used = own = sum(tensor.nbytes for tensor in weights.values())
        for alias, name in aliases.items():
            if name in weights:
                weights[alias] = weights[name]
                used += weights[name].nbytes
        if used > _MOST_ALIASES * own:
            raise self._damaged("has other names for more weights than a model has")
        return ModelBin(version, spec, revision, weights, attributes, texts)

    def _dequantized(self, name: str, tensor: Tensor, scale: Tensor | None) -> Tensor:
        """Dequantize as in `ops/dequantize_cpu.cc`: multiply by the float32 inverse of one scale per row (8 bits) or per
        tensor (16 bits)."""
        if tensor.dtype == torch.int32:
            raise ConfigError(
                f"{self._path} has {name} in 4 bits (AWQ), which is not supported. Convert the model again without AWQ."
            )
        if scale is None and tensor.dtype == torch.int16:
            scale = torch.tensor(_GLOBAL_INT16_SCALE)
        wanted = [tensor.shape[0]] if tensor.dtype == torch.int8 else []
        if scale is None or not scale.is_floating_point() or list(scale.shape) != wanted:
            actual = "none" if scale is None else f"one of {list(scale.shape)}"
            raise self._damaged(f"has {name} in integers, which need a {name}_scale of {wanted}, and has {actual}")
        inverse = 1.0 / scale.float()
        return tensor.float() * inverse.reshape(*wanted, *[1] * (tensor.dim() - len(wanted)))


def _is_quantized(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and not tensor.is_floating_point()
