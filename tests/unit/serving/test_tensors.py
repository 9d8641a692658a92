"""Tensors of the Open Inference Protocol."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient import utils

from tfexport.errors import TfexportError
from tfexport.serving.open_inference.tensors import Tensor, binary_strings, json_strings, split_body


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8"))))
def test_strings_are_written_and_read_as_triton_does(texts: list[str]) -> None:
    theirs = utils.serialize_byte_tensor(np.array([one.encode() for one in texts], dtype=object))
    raw = theirs.item() if theirs.size else b""
    assert binary_strings("TEXT", memoryview(raw), len(texts)) == texts
    assert Tensor("T", "BYTES", (len(texts),), texts).binary() == raw


def test_numbers_are_float32() -> None:
    tensor = Tensor("SCORE", "FP32", (2,), [0.1, -2.5])
    assert np.frombuffer(tensor.binary(), "<f4").tolist() == tensor.data() == [float(np.float32(0.1)), -2.5]


@pytest.mark.parametrize(
    ("data", "count", "error"),
    [
        (b"\x01\x00\x00", 1, "element 0 of TEXT ends beyond"),
        (struct.pack("<I", 5) + b"abcd", 1, "element 0 of TEXT ends beyond"),
        (struct.pack("<I", 2**32 - 1), 1, "element 0 of TEXT ends beyond"),
        (struct.pack("<I", 1) + b"a" + struct.pack("<I", 1) + b"b", 1, "more than the 1 elements"),
        (b"", 1, "has 0 elements, and its shape says 1"),
    ],
)
def test_wrong_lengths_are_errors(data: bytes, count: int, error: str) -> None:
    with pytest.raises(TfexportError, match=error):
        binary_strings("TEXT", memoryview(data), count)


@given(st.binary(max_size=40), st.integers(0, 5))
def test_any_bytes_are_strings_or_an_error(data: bytes, count: int) -> None:
    with suppress(TfexportError):
        assert len(binary_strings("TEXT", memoryview(data), count)) == count


def test_bytes_that_are_no_utf8_stay_unreadable() -> None:
    [text] = binary_strings("TEXT", memoryview(struct.pack("<I", 2) + b"a\xff"), 1)
    with pytest.raises(UnicodeEncodeError):
        text.encode()


def test_lists_of_lists_are_flat() -> None:
    assert json_strings("TEXT", [["a", "b"], ["c"]], 3) == ["a", "b", "c"]
    for data, count in ((["a", 1], 2), ([], 1), (None, 0), (["a", "b"], 1), ("a", 1)):
        with pytest.raises(TfexportError):
            json_strings("TEXT", data, count)


def test_the_header_tells_where_json_ends() -> None:
    assert split_body(b"{}abc", None)[0] == b"{}abc"
    json, rest = split_body(b"{}abc", "2")
    assert (json, bytes(rest)) == (b"{}", b"abc")
    for header in ("6", "-1", "x", "", "1" * 30, "²"):
        with pytest.raises(TfexportError, match="Inference-Header-Content-Length"):
            split_body(b"{}abc", header)
