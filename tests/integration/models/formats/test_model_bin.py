"""CTranslate2's model.bin: what is damaged or lies about its sizes is refused before anything is allocated."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from makers.model_bin import Content, to_bytes
from tests.support.checkpoints import refused
from tfexport.errors import ConfigError
from tfexport.models.formats.model_bin import ModelBin, read_model_bin

CONTENT = Content(
    {
        "a/weight": np.array([[1, -2, 3], [4, 5, -127]], np.int8),
        "a/weight_scale": np.array([3, 7], np.float32),
        "b/weight": np.array([[0.5, 2.0]], np.float16),
        "c/weight": np.array([[0x3F80, 0xC000]], np.uint16),
        "d/weight": np.array([[300, -5]], np.int16),
        "d/weight_scale": np.array(10.0, np.float32),
        "e/bias": np.array([1.5], np.float32),
        "flag": np.array(1, np.int8),
        "number": np.array(1000, np.int32),
        "real": np.array(2.5, np.float32),
        "word": np.frombuffer(b"</s>", np.int8),
    },
    {"f/weight": "a/weight"},
)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelBin]:
    def read(data: bytes) -> ModelBin:
        path = tmp_path / "model.bin"
        path.write_bytes(data)
        return read_model_bin(path, lambda spec, revision: None)

    return read


def test_numbers_are_those_that_were_stored(read: Callable[..., ModelBin]) -> None:
    found = read(to_bytes(CONTENT))
    assert (found.version, found.spec, found.revision) == (6, "TransformerSpec", 7)
    assert found.attributes == {"flag": 1, "number": 1000, "real": 2.5}
    assert found.texts == {"word": "</s>"}
    wanted = {
        # As CTranslate2: times the inverse of the scale, in float32.
        "a/weight": CONTENT.variables["a/weight"] * (np.float32(1) / np.array([[3], [7]], np.float32)),
        "b/weight": [[0.5, 2.0]],
        "c/weight": [[1.0, -2.0]],
        "d/weight": np.array([[300, -5]], np.float32) * (np.float32(1) / np.float32(10)),
        "e/bias": [1.5],
    }
    assert found.weights.keys() == wanted.keys() | {"f/weight"}
    assert found.weights["f/weight"] is found.weights["a/weight"]
    for name, array in wanted.items():
        assert found.weights[name].dtype == torch.float32
        assert torch.equal(found.weights[name], torch.tensor(np.asarray(array, np.float32))), name


def test_weights_of_16_bits_without_a_scale_have_that_of_the_first_versions(read: Callable[..., ModelBin]) -> None:
    content = CONTENT.with_variables(**{"d/weight_scale": None})
    assert read(to_bytes(content)).weights["d/weight"][0].tolist() == pytest.approx([0.3, -0.005])


def test_a_file_that_ends_early_is_refused_wherever_it_ends(read: Callable[..., ModelBin]) -> None:
    whole = to_bytes(CONTENT)
    for size in range(len(whole)):
        assert "so it is damaged" in refused(read, whole[:size])
    assert "has 1 bytes after its end" in refused(read, whole + b"\0")


def number_at(data: bytes, before: bytes, number: int) -> bytes:
    """`data` with another number of 32 bits after the first occurrence of `before`."""
    at = data.index(before) + len(before)
    return data[:at] + struct.pack("<I", number) + data[at + 4 :]


MOST = 2**32 - 1
ROWS = b"a/weight\0\x02"
"""The name and the number of axes, before the first of them."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: number_at(data, b"Spec\0\x07\0\0\0", MOST), "so it is damaged"),
        (lambda data: number_at(data, ROWS, MOST), f"says that a/weight is [{MOST}, 3], in 6 bytes"),
        (lambda data: number_at(data, ROWS, 0), "says that a/weight is [0, 3], in 6 bytes"),
        (lambda data: number_at(data, ROWS + struct.pack("<IIB", 2, 3, 1), MOST), f"in {MOST} bytes"),
        (
            lambda data: number_at(data.replace(ROWS, b"a/weight\0\xff"), b"a/weight\0", MOST),
            "ends where",
        ),
        (
            lambda data: data.replace(
                ROWS + struct.pack("<IIBI", 2, 3, 1, 6), ROWS + struct.pack("<IIBI", MOST, 1, 1, MOST)
            ),
            f"ends where {MOST} more bytes should be",
        ),
        (lambda data: number_at(data, b"</s>", MOST), "ends where 2 more bytes should be"),
        (lambda data: data.replace(b"flag\0\0\x01", b"flag\0\0\x09"), "has flag in numbers of no known kind"),
        (lambda data: data.replace(b"e/bias", b"e/\xffias"), "'utf-8' codec can't decode"),
        (lambda data: data.replace(b"\x09\0b/weight", b"\x09\0c/weight"), "has c/weight twice"),
    ],
)
def test_numbers_that_lie_are_refused(
    read: Callable[..., ModelBin], change: Callable[[bytes], bytes], message: str
) -> None:
    data = change(to_bytes(CONTENT))
    tracemalloc.start()
    try:
        assert message in refused(read, data)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a/weight_scale": None}, "which need a a/weight_scale of [2], and has none"),
        ({"a/weight_scale": np.ones(3, np.float32)}, "of [2], and has one of [3]"),
        ({"a/weight_scale": np.ones(2, np.int8)}, "a/weight_scale of [2], and has one of [2]"),
        ({"d/weight_scale": np.ones(1, np.float32)}, "d/weight_scale of [], and has one of [1]"),
        ({"a/weight": np.zeros((2, 3), np.int32)}, "in 4 bits (AWQ)"),
        ({"e/bias": np.zeros(3, np.int16)}, "has e/bias in 3 whole numbers"),
        ({"e/bias": np.zeros((1,) * 5, np.float32)}, "says that e/bias is [1, 1, 1, 1, 1], in 4 bytes"),
    ],
)
def test_integers_need_their_scales(read: Callable[..., ModelBin], changes: dict[str, Any], message: str) -> None:
    assert message in refused(read, to_bytes(CONTENT.with_variables(**changes)))


def test_other_names_are_of_variables_that_there_are(read: Callable[..., ModelBin]) -> None:
    for aliases, message in (
        ({"x": "y"}, "says that x is y, which it lacks"),
        ({"flag": "number"}, "has flag twice"),
    ):
        assert message in refused(read, to_bytes(replace(CONTENT, aliases=aliases)))


def test_many_names_for_one_weight_are_refused(read: Callable[..., ModelBin]) -> None:
    """Each may be copied, as the model is converted: a file of megabytes would take gigabytes."""
    weights = {"w": np.ones((8, 8), np.float32)}
    few, many = (replace(CONTENT, variables=weights, aliases={f"w{i}": "w" for i in range(n)}) for n in (15, 16))
    assert len(read(to_bytes(few)).weights) == 16
    assert "has other names for more weights than a model has" in refused(read, to_bytes(many))


@pytest.mark.parametrize("version", range(1, 6))
def test_older_versions_hold_the_same_numbers(read: Callable[..., ModelBin], version: int) -> None:
    """In kinds of numbers that they had: before version 4 those of 32 bits are in floating point, of 16 bits in integers."""
    kept = {
        name: array for name, array in CONTENT.variables.items() if version >= 4 or name[0] not in "bcn"
    }  # b, c and number
    content = replace(CONTENT, variables=kept, version=version)
    found, newest = read(to_bytes(content)), read(to_bytes(replace(content, version=6)))
    assert found.version == version
    assert (found.attributes, found.texts) == (newest.attributes, newest.texts)
    assert found.weights.keys() == newest.weights.keys()
    assert all(torch.equal(tensor, newest.weights[name]) for name, tensor in found.weights.items())


def test_what_reads_it_is_asked_before_weights_are(read: Callable[..., ModelBin], tmp_path: Path) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(to_bytes(CONTENT)[:30])  # the rest is never read
    seen = []

    def check(spec: str, revision: int) -> None:
        seen.append((spec, revision))
        raise ConfigError("Give another one.")

    assert refused(read_model_bin, path, check) == "Give another one."
    assert seen == [("TransformerSpec", 7)]
    assert "cannot read" in refused(read_model_bin, tmp_path / "missing.bin", check)
