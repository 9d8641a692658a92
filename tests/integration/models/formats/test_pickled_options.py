"""Pickled objects become records; whatever a file asks for, nothing of it is run, imported or made room for."""

from __future__ import annotations

import argparse
import collections
import copy
import enum
import io
import os
import pickle
import random
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tfexport.errors import CheckpointError
from tfexport.models.formats import pickled_options
from tfexport.models.formats.pickled_options import InertClass, InertObject, forget, holds, plain, read_inert
from tfexport.models.formats.pickles import Refused, read_pickle


class Colour(enum.Enum):
    RED = "red"


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any):
        self.inner = inner


class Acting:
    """A class that acts when an object of it is made."""

    def __new__(cls, path: str, mode: str) -> Acting:
        with open(path, mode):
            return super().__new__(cls)


class Words(dict):
    """A dict of a toolkit's own."""


class Lines(list):
    """A list of a toolkit's own."""


@pytest.fixture(params=["zip", "older"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Path]:
    def save(content: Any, **options: Any) -> Path:
        path = tmp_path / "model.pt"
        torch.save(content, path, _use_new_zipfile_serialization=request.param == "zip", **options)
        return path

    return save


def pickled(raw: bytes, path: Path) -> Path:
    """A zip archive as torch.save writes it, whose pickle is `raw`."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", raw)
    return path


def unpickled(raw: bytes) -> Any:
    def no_storage(key: str, n_bytes: int) -> torch.Tensor:
        raise Refused("none")

    return read_pickle(io.BytesIO(raw), no_storage)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_objects_become_records_and_plain_values_stay(save: Callable[..., Path], protocol: int) -> None:
    words = Words(der=3)
    words.order = "frequency"
    content = {
        "args": argparse.Namespace(heads=4, colour=Colour.RED, nested=argparse.Namespace(path=None)),
        "slotted": Slotted({"a": (1, 2.5, True, None, b"\xff")}),
        "words": words,
        "lines": Lines(["one", "two"]),
        "ordered": collections.OrderedDict(z=1, a=2),
        "default": collections.defaultdict(int, x=7),
        "counted": collections.Counter("aab"),
        "set": {1, "a"},
        "frozen": frozenset([3]),
        "size": torch.Size([2, 3]),
        "class": Slotted,
        "number": np.float64(0.5),
        "large": -(2**70),
        5: "\u00fc" * 300,
    }
    read = read_inert(save(content, pickle_protocol=protocol))
    assert plain(read["args"], "args") == {"heads": 4, "colour": "red", "nested": {"path": None}}
    assert read["slotted"].of.endswith("test_pickled_options.Slotted")
    assert read["slotted"].attributes == {"inner": {"a": (1, 2.5, True, None, b"\xff")}}
    assert (read["words"].entries, read["words"].attributes) == ({"der": 3}, {"order": "frequency"})
    assert read["lines"].items == ["one", "two"]
    assert [*read["ordered"].items()] == [("z", 1), ("a", 2)]
    for name in ("default", "counted", "set", "frozen", "size", "large", 5):
        assert read[name] == content[name], name
    assert read["class"] == InertClass(Slotted.__module__, "Slotted")
    assert isinstance(read["number"], InertObject)
    assert repr(read["number"]).startswith("<inert numpy.")


def test_every_protocol_is_read_as_python_reads_it() -> None:
    content = [{"a": [1, -2, 2**40, 2**80, 1.5, "\n\u4f60", b"x" * 300], (1, "b"): (None, True, False)}, set("ab"), ()]
    content.append(content[0])  # from the memo
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        read = unpickled(pickle.dumps(content, protocol))
        assert read[0] is read[3]
        if protocol > 0:  # whose bytes are text
            assert read == content, protocol
        namespace = unpickled(pickle.dumps(argparse.Namespace(a=1, b=[2]), protocol))
        assert plain(namespace, "it") == {"a": 1, "b": [2]}, protocol


def test_tensors_are_read_as_torch_reads_them(save: Callable[..., Path]) -> None:
    table = torch.randn(6, 4)
    content = {
        "table": table,
        "view": table[2:4].T,  # of the same storage
        "half": torch.randn(3).half(),
        "brain": torch.randn(5, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "long": torch.arange(3),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "parameter": nn.Parameter(torch.randn(2)),
    }
    path = save({"model": content, "args": argparse.Namespace()})
    read, expected = read_inert(path)["model"], torch.load(path, weights_only=False)["model"]
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name
    before = path.read_bytes()
    read["table"].zero_()
    assert not read["view"].any()  # one storage in memory, as there is one in the file
    assert path.read_bytes() == before


class Payload:
    """What unpickling it without protection calls."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def by_opcodes(marker: Path) -> dict[str, bytes]:
    """Pickles that would run `open(marker, "w")`, by each opcode that can call."""
    text = f"V{marker}\n".encode() + b"Vw\n"
    function, acting = b"cio\nopen\n", f"c{__name__}\nActing\n".encode()
    return {
        "REDUCE": function + b"(" + text + b"tR.",
        "NEWOBJ": b"\x80\x02" + acting + b"(" + text + b"t\x81.",
        "NEWOBJ_EX": b"\x80\x04" + acting + b"(" + text + b"t}\x92.",
        "INST": b"(" + text + b"iio\nopen\n.",
        "OBJ": b"(" + function + text + b"o.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02io\x8c\x04open\x93(" + text + b"tR.",
        "getattr": b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(Vio\ntRVopen\ntR(" + text + b"tR.",
    }


@pytest.mark.parametrize("how", by_opcodes(Path()))
def test_no_opcode_calls_what_a_file_names(tmp_path: Path, how: str) -> None:
    marker = tmp_path / "marker"
    raw = by_opcodes(marker)[how]
    pickle.loads(raw)
    assert marker.exists()  # it would have worked
    marker.unlink()
    path = pickled(raw, tmp_path / "model.pt")
    if how == "getattr":  # what is called there is no name, but what another call would have given
        with pytest.raises(CheckpointError, match="Nothing in it was run"):
            read_inert(path)
    else:
        assert read_inert(path).of in ("io.open", f"{__name__}.Acting")
    assert not marker.exists()


def test_code_beside_arguments_is_not_run(save: Callable[..., Path], tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = save(
        {
            "args": argparse.Namespace(hook=Payload(os.system, f"touch {marker}")),
            "chain": Payload(eval, Payload(str, f"open({str(marker)!r}, 'w')")),
            "model": {"weight": torch.ones(2)},
        }
    )
    read = read_inert(path)
    assert not marker.exists()
    assert read["args"].attributes["hook"].of == "posix.system"
    assert read["chain"].of == "builtins.eval"
    torch.load(path, weights_only=False)
    assert marker.exists()  # it would have worked


def test_state_is_kept_and_given_to_nobody(tmp_path: Path) -> None:
    # The file gives our own record what would replace its methods, and a dict what would replace its class.
    raw = b"\x80\x02capp\nModel\n)\x81}(U\x0c__setstate__cos\nsystem\nU\x02ofU\x01xub."
    read = read_inert(pickled(raw, tmp_path / "model.pt"))
    assert read.of == "app.Model"
    assert read.attributes == {"__setstate__": InertClass("os", "system"), "of": "x"}
    assert unpickled(b"\x80\x02}}U\x09__class__cos\nsystem\nsb.") == {}


def test_names_are_not_imported(tmp_path: Path) -> None:
    sys.modules.pop("this", None)
    read = read_inert(pickled(b"cthis\nZen\n)R.", tmp_path / "model.pt"))
    assert read.of == "this.Zen"
    assert "this" not in sys.modules


def storage(count: int, then: bytes = b"") -> bytes:
    """A pickle of a float storage of `count` numbers that is declared in the file, and of what is made of it."""
    number = b"\x8a\x08" + struct.pack("<q", count)
    return b"\x80\x02(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpu" + number + b"tQ" + then + b"."


def tensor(sizes: list[int], strides: list[int], begin: int = 0) -> bytes:
    def number(value: int) -> bytes:
        return b"\x8a\x08" + struct.pack("<q", value)

    def numbers(values: list[int]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    made = storage(4)[2:-1] + number(begin) + numbers(sizes) + numbers(strides)
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + made + b"\x89NtR."


LARGE = 10 * 2**30
COPIES = b"h\x01h\x00\x85R" * 500 + b"."
HOSTILE = {
    "storage": (storage(LARGE), "declared where there are 16"),
    "negative storage": (storage(-1), "of -1 numbers"),
    "storage above all memory": (storage(2**62), "numbers is declared"),
    "view of many": (tensor([LARGE], [0]), "in a storage of 4"),
    "view beyond": (tensor([2], [5]), "in a storage of 4"),
    "view of later": (tensor([2], [1], begin=3), "in a storage of 4"),
    "view of negative": (tensor([-1], [1]), "sizes are no sizes"),
    "sizes without strides": (tensor([2, 2], [1]), "sizes are no sizes"),
    "bytes": (b"\x80\x04\x8e" + struct.pack("<Q", LARGE) + b"x.", "only 2 remain"),
    "bytearray": (b"\x80\x05\x96" + struct.pack("<Q", LARGE) + b"x.", "only 2 remain"),
    "text": (b"\x80\x04\x8d" + struct.pack("<Q", LARGE) + b"x.", "only 2 remain"),
    "long": (b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.", "not enough data"),
    "copied list": (
        b"]q\x00(" + b"N" * 2000 + b"ecbuiltins\nlist\nq\x01" + COPIES,
        "than a file of its size can contain",
    ),
    "copied dict": (
        b"}q\x00("
        + b"".join(b"M" + struct.pack("<H", n) + b"N" for n in range(2000))
        + b"uccollections\nCounter\nq\x01"
        + COPIES,
        "than a file of its size can contain",
    ),
    "key too deep": (b"}(" + b")" + b"\x85" * 100_000 + b"Nu.", "a tuple as a key"),
    "call of a value": (b"]q\x00)R.", "calls a list"),
    "arguments that are none": (b"cos\nsystem\nVls\nR.", "with a str"),
    "entry of a number": (b"K\x01Vx\nVy\ns.", "entries into a int"),
    "addition to a number": (b"K\x01Vx\na.", "adds to a int"),
    "no mark": (b"u.", "IndexError"),
    "nothing": (b".", "IndexError"),
    "extension": (b"\x82\x01.", "EXT1"),
    "buffer": (b"\x80\x05\x97.", "NEXT_BUFFER"),
    "other memory": (b"Vfile\nQ.", "outside of it"),
    "no stop": (b"]", "before seeing STOP"),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_only_declared_is_refused_and_not_made_room_for(tmp_path: Path, name: str) -> None:
    raw, telling = HOSTILE[name]
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("archive_001/data/0", struct.pack("<4f", *range(4)))  # begins at byte 48, as numbers may
        archive.writestr("archive_001/data.pkl", raw)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            read_inert(tmp_path / "model.pt")
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert telling in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_that_lie_askew_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("archive_0010/data/0", struct.pack("<4f", *range(4)))
        archive.writestr("archive_0010/data.pkl", tensor([4], [1]))
    with pytest.raises(CheckpointError, match="does not begin where"):
        read_inert(tmp_path / "model.pt")


def test_members_at_one_place_are_refused(tmp_path: Path) -> None:
    """Tensors are copied when they are used: a file of 2 MB with 400 names for its numbers would take 800 MB."""
    torch.save([torch.zeros(1000) for _ in range(8)], tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        content = archive.read("model/data.pkl")
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("archive_001/data/0", bytes(4000))
        archive.writestr("archive_001/data.pkl", content)
        for index in range(1, 8):
            other = copy.copy(archive.getinfo("archive_001/data/0"))
            other.filename = f"archive_001/data/{index}"
            archive.filelist.append(other)
    with pytest.raises(CheckpointError, match="its tensors have more bytes than the file"):
        read_inert(tmp_path / "model.pt")


def test_compressed_archives_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02X" + struct.pack("<I", 10_000_000) + bytes(10_000_000) + b".")
    with pytest.raises(CheckpointError, match=r"its data\.pkl is compressed"):
        read_inert(tmp_path / "model.pt")


def test_members_beyond_the_end_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": 1}, protocol=2))
        archive.getinfo("archive/data.pkl").file_size = 2**31
    with pytest.raises(CheckpointError, match=r"its data\.pkl is cut"):
        read_inert(tmp_path / "model.pt")


@pytest.mark.thorough
def test_what_holds_itself_or_has_no_end_is_no_argument() -> None:
    itself: dict[str, Any] = {}
    itself["itself"] = itself
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    wide: Any = []
    for _ in range(40):  # 2 ** 40 values in 80 references
        wide = [wide, wide]
    for value in (itself, deep, wide):
        read = value if value is deep else unpickled(pickle.dumps(value))
        with pytest.raises(CheckpointError, match="contains itself, or is nested deeper"):
            plain(read, "model.pt")


def test_damaged_files_are_refused(save: Callable[..., Path]) -> None:
    path = save({"args": argparse.Namespace(a=[1, "b"], c=Colour.RED), "model": {"w": torch.randn(3, 2)}})
    whole = path.read_bytes()
    generator = random.Random(0)
    n_refused = 0
    for trial in range(400):
        damaged = bytearray(whole)
        if trial % 2:
            del damaged[generator.randrange(len(whole)) :]
        else:
            for _ in range(generator.randint(1, 4)):
                damaged[generator.randrange(len(whole))] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            plain(read_inert(path), "it")
        except CheckpointError:
            n_refused += 1
    assert n_refused > 200  # all that were cut, and some that were changed


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with pytest.raises(CheckpointError, match="there is no file"):
        read_inert(path)
    for raw in (b"", b"text", pickle.dumps({"a": 1}), b"PK\x03\x04", bytes(200)):
        path.write_bytes(raw)
        with pytest.raises(CheckpointError):
            read_inert(path)
    torch.jit.script(nn.Linear(2, 2)).save(path)
    with pytest.raises(CheckpointError, match="TorchScript"):
        read_inert(path)


def test_a_list_of_storages_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    """Nested so deeply that no error can quote it."""
    machine = {"protocol_version": 1001, "little_endian": sys.byteorder == "little", "type_sizes": {}}
    parts = [pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, machine, {"heads": 4})]
    path, depth = tmp_path / "model.pt", 100_000
    for keys in (b"\x80\x02" + depth * b"]" + (depth - 1) * b"a" + b".", *map(pickle.dumps, (["0"], {"0": 1}, 7))):
        path.write_bytes(b"".join([*parts, keys]))
        with pytest.raises(CheckpointError, match="list of storages is not that of its tensors"):
            read_inert(path)


def test_a_file_is_parsed_once_for_all_that_check_it_and_again_after_a_change(
    save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(pickled_options, "read_inert", lambda path: (read.append(path), read_inert(path))[1])
    path = save({"model": 1})
    assert holds(path, lambda content: content == {"model": 1})
    assert not holds(path, lambda content: content == {})
    assert read == [path]
    path = save({"model": 1, "other": 2})
    assert holds(path, lambda content: "other" in content)
    forget()
    assert holds(path, lambda content: "model" in content)
    assert read == [path] * 3
