"""Pickles within pickles, that say what no toolkit writes."""

from __future__ import annotations

import io
import pickle
import struct

import pytest
import torch

from tfexport.models.formats.pickled_options import InertObject, plain
from tfexport.models.formats.pickles import Refused, read_pickle


def test_tensors_without_numbers_have_small_sizes() -> None:
    def pickled(sizes: tuple[int, int]) -> bytes:
        numbers = b"".join(b"\x8a\x08" + struct.pack("<q", size) for size in sizes) + b"\x86"
        storage = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x00tQ"
        return (
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + numbers + b"K\x01K\x01\x86\x89NtR."
        )

    def empty(key: str, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)

    assert read_pickle(io.BytesIO(pickled((0, 24))), empty).shape == (0, 24)
    with pytest.raises(Refused, match="an empty tensor of sizes"):
        read_pickle(io.BytesIO(pickled((0, 2**40))), empty)


def test_a_tensor_among_arguments_is_not_computed_with() -> None:
    (found,) = plain([torch.ones(3)], "args")
    assert isinstance(found, InertObject)
    assert found.of == "torch.Tensor"


def colliding_pairs(count: int) -> list[tuple[int, int]]:
    return [(number, -1 - number % 2) for number in range(count)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({k * (2**61 - 1): 0 for k in range(1, 40)}, "a number of more than 60 bits as a key"),
        ({k * (2**61 - 1) for k in range(1, 40)}, "a number of more than 60 bits as a key"),
        ({(0, 2**61): 0}, "a number of more than 60 bits as a key"),
        (dict.fromkeys(colliding_pairs(5000)), "more than 4096 tuples of numbers as keys"),
        (
            [dict.fromkeys(colliding_pairs(3000)), set(colliding_pairs(3000))],
            "more than 4096 tuples of numbers as keys",
        ),
    ],
    ids=["dict", "set", "in tuples", "tuples", "tuples of several"],
)
def test_keys_whose_hashes_a_file_can_choose_are_refused(value: object, message: str) -> None:
    with pytest.raises(Refused, match=message):
        read_pickle(io.BytesIO(pickle.dumps(value)), no_numbers)


def test_keys_of_ordinary_files_are_read() -> None:
    value = {**{f"w{k}": k for k in range(9000)}, **{(f"a{k}", "b"): k for k in range(9000)}, 2**59: 1, 1.5: 2}
    assert read_pickle(io.BytesIO(pickle.dumps(value)), no_numbers) == value


def no_numbers(key: str, n_bytes: int) -> torch.Tensor:
    raise AssertionError("no tensor")
