"""Tensors of the Open Inference Protocol, as JSON, or as binary data after the JSON (the binary tensor data extension).

A BYTES tensor is a sequence of elements, each with its length before it in four bytes, little-endian. Every length is
checked before it is used.

Source: https://github.com/kserve/open-inference-protocol, specification/protocol, and
https://github.com/triton-inference-server/server, docs/protocol/extension_binary_data.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfexport.errors import TfexportError

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Tensor:
    """An output tensor."""

    name: str
    datatype: str
    """BYTES or FP32."""
    shape: tuple[int, ...]
    values: Sequence[Any]
    """Strings or numbers, flat."""

    def data(self) -> list[Any]:
        """The flat values for JSON."""
        if self.datatype == "FP32":
            return np.asarray(self.values, dtype=np.float32).astype(np.float64).tolist()
        return list(self.values)

    def binary(self) -> bytes:
        """The binary data after the JSON."""
        if self.datatype == "FP32":
            return np.asarray(self.values, dtype="<f4").tobytes()
        encoded = [value.encode() for value in self.values]
        return b"".join(part for one in encoded for part in (_LENGTH.pack(len(one)), one))


def split_body(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    """The JSON of a request and the binary data after it.

    Args:
        header_length: the header Inference-Header-Content-Length; without it the whole body is JSON.

    Raises:
        TfexportError: the header is not a length within the body.
    """
    if header_length is None:
        return body, memoryview(b"")
    if not (header_length.isascii() and header_length.isdecimal() and len(header_length) < 20):
        raise TfexportError("Inference-Header-Content-Length is not a number. Give the bytes of the JSON.")
    length = int(header_length)
    if length > len(body):
        raise TfexportError(
            f"Inference-Header-Content-Length is {length}, and the body has {len(body)} bytes. Correct it."
        )
    return body[:length], memoryview(body)[length:]


def binary_strings(name: str, data: memoryview, count: int) -> list[str]:
    """The elements of a BYTES tensor. Bytes that are not UTF-8 become lone surrogates, which no model can read.

    Args:
        count: the number of elements in the shape.

    Raises:
        TfexportError: the number of elements differs, or a length is beyond the end.
    """
    found: list[str] = []
    place = 0
    while place < len(data):
        if len(found) == count:
            raise TfexportError(f"{name} has more than the {count} elements of its shape. Correct one of them.")
        start = place + _LENGTH.size
        end = start + _LENGTH.unpack_from(data, place)[0] if start <= len(data) else math.inf
        if end > len(data):
            raise TfexportError(f"element {len(found)} of {name} ends beyond its data. Correct its length.")
        place = int(end)
        found.append(bytes(data[start:place]).decode("utf-8", "surrogateescape"))
    return _counted(name, found, count)


def json_strings(name: str, data: Any, count: int) -> list[str]:
    """The elements of a BYTES tensor in JSON: strings, flat or in lists of lists.

    Raises:
        TfexportError: the number of elements differs from the shape, or an element is not a string.
    """
    if not isinstance(data, list):
        raise TfexportError(f"{name} has no data. Give a list of strings, or binary data.")
    found = []
    for value in _flat(data):
        if not isinstance(value, str):
            raise TfexportError(f"an element of {name} is not a string. Give text.")
        found.append(value)
    return _counted(name, found, count)


def size_of(shape: Iterable[int]) -> int:
    """The number of elements."""
    return math.prod(shape)


def _counted(name: str, found: list[str], count: int) -> list[str]:
    if len(found) != count:
        raise TfexportError(f"{name} has {len(found)} elements, and its shape says {count}. Correct one of them.")
    return found


def _flat(data: list[Any]) -> Iterator[Any]:
    waiting = [iter(data)]
    while waiting:
        for value in waiting[-1]:
            if isinstance(value, list):
                waiting.append(iter(value))
                break
            yield value
        else:
            waiting.pop()
