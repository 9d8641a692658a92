"""Reading of torch.save files that contain more than tensors, without running any of their code.

Toolkits save their arguments and vocabularies as pickled objects of their own classes. Such a file is read as plain
containers, numbers, strings and tensors. Each object of a class becomes an `InertObject`, a record of its content. Both
formats of torch.save are supported: the zip archive, and the stream of pickles of PyTorch before 1.6.
"""

from __future__ import annotations

import mmap
import struct
import sys
import zipfile
from collections.abc import Callable
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from tfexport.errors import CheckpointError, words_of
from tfexport.models.formats.pickles import InertClass, InertObject, Refused, read_pickle
from tfexport.system.regular_files import open_regular

__all__ = ["InertClass", "InertObject", "forget", "holds", "plain", "read_inert"]

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""The first two pickles of a file from PyTorch before 1.6."""
_ALIGNMENT = 16
"""Alignment of storages in bytes. Numbers of several bytes must be aligned in memory."""
_MOST_VALUES = 1_000_000
_MOST_LEVELS = 50


def holds(path: Path, wanted: Callable[[Any], bool]) -> bool:
    """Whether a file is a complete file of torch.save whose content satisfies `wanted`. It never raises."""
    try:
        status = path.stat()
    except OSError:
        return False
    return _holds(path, status.st_mtime_ns, status.st_size, wanted)


@lru_cache(maxsize=16)  # large vocabularies take half a second, and several toolkits check the same file
def _holds(path: Path, changed: int, size: int, wanted: Callable[[Any], bool]) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(2) in (b"PK", b"\x80\x02") and wanted(_content(path, changed, size))
    except (OSError, CheckpointError):
        return False


@lru_cache(maxsize=1)
def _content(path: Path, changed: int, size: int) -> Any:
    """The content of the file that was checked last, for the next toolkit that checks it; see `forget`."""
    return read_inert(path)


def forget() -> None:
    """Release the file that `holds` has read last."""
    _content.cache_clear()


def read_inert(path: Path) -> Any:
    """Read a file of torch.save: plain values, inert objects, and tensors, which stay on disk until they are used.

    Subclasses of dict keep only their entries. Tensors lose `requires_grad` and hooks. Copy tensors to keep them: they
    change with the file, and truncating the file kills the process.

    Raises:
        CheckpointError: the file is missing, damaged or not from torch.save, or declares more than it contains.
    """
    try:
        with open_regular(path) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writes to tensors do not change the file
            if mapped[:2] == b"PK":
                return _read_archive(mapped, zipfile.ZipFile(file).infolist())
        return _read_stream(mapped)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}. Give the path of a checkpoint such as model.pt.") from error
    except Refused as error:
        raise CheckpointError(
            f"{path} cannot be read as a file of torch.save: {error}. Nothing in it was run. Check where it came from, and "
            "that it was copied completely."
        ) from error
    except Exception as error:  # for a damaged file, the parsers may raise any error
        what = ": ".join(filter(None, (type(error).__name__, words_of(error))))[:200]
        raise CheckpointError(
            f"{path} cannot be read as a file of torch.save ({what}). Check that it was copied completely."
        ) from error


def plain(value: Any, where: str) -> Any:
    """Convert arguments to dicts, lists, numbers and strings; `where` is their origin, for messages.

    Namespaces and omegaconf's containers and nodes become their content. Objects made of one string or number, such as
    enums, become that value. Other objects stay inert, and tensors become inert objects.

    Raises:
        CheckpointError: the value contains itself, or is deeper or larger than a model's arguments.
    """
    n_values = 0

    def visit(value: Any, level: int) -> Any:
        nonlocal n_values
        n_values += 1
        if level > _MOST_LEVELS or n_values > _MOST_VALUES:
            raise CheckpointError(
                f"{where} contains itself, or is nested deeper than {_MOST_LEVELS} levels, or has more than {_MOST_VALUES} "
                "values: those are not arguments of a model. Check where it came from."
            )
        if isinstance(value, InertObject):
            held = _held(value)
            return value if held is value else visit(held, level + 1)
        if isinstance(value, dict):
            return {key: visit(inner, level + 1) for key, inner in value.items()}
        if isinstance(value, Tensor):  # Python's operators would compute with it
            return InertObject("torch.Tensor")
        if isinstance(value, list | tuple):
            return [visit(inner, level + 1) for inner in value]
        return value

    return visit(value, 0)


def _held(value: InertObject) -> Any:
    if value.of == "argparse.Namespace":
        return value.attributes
    if value.of.startswith("omegaconf."):
        return value.attributes.get("_content", value.attributes.get("_val"))
    if value.of == "builtins.getattr" and len(value.args) == 2:  # some versions of Python pickle an enum like this
        return value.args[1]
    is_of_one = len(value.args) == 1 and value.state is None and isinstance(value.args[0], str | int | float)
    return value.args[0] if is_of_one else value


def _read_archive(mapped: mmap.mmap, listed: list[zipfile.ZipInfo]) -> Any:
    """The zip archive of PyTorch 1.6 and later: `*/data.pkl`, and one member `*/data/KEY` for each storage."""
    members = {member.filename: member for member in listed}
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise Refused(
            "it is a zip archive of something else. Extract it with unzip, and give the checkpoint or the folder inside"
        )
    top = pickles[0].removesuffix("data.pkl")
    if f"{top}constants.pkl" in members:
        raise Refused(
            "it is a TorchScript archive, which is a program. Save its weights with "
            "torch.save(torch.jit.load(FILE).state_dict(), 'ckpt.pt'), and export ckpt.pt"
        )

    def content(name: str) -> tuple[int, int]:
        """The offset and the size of a member."""
        member = members.get(top + name)
        if member is None:
            raise Refused(f"it has no {name}")
        if member.compress_type != zipfile.ZIP_STORED:
            raise Refused(f"its {name} is compressed")
        # The content follows a header of 30 bytes, whose last two numbers are the lengths of the name and the extra fields.
        start = member.header_offset + 30 + sum(struct.unpack_from("<HH", mapped, member.header_offset + 26))
        if start + member.file_size > len(mapped):
            raise Refused(f"its {name} is cut")
        return start, member.file_size

    if f"{top}byteorder" in members:
        start, size = content("byteorder")
        _check_byte_order(mapped[start : start + size] == b"little")

    keys, used = set[str](), 0

    def storage(key: str, n_bytes: int) -> Tensor:
        nonlocal used
        start, size = content(f"data/{key}")
        used += 0 if key in keys else size
        keys.add(key)
        if used > len(mapped):  # several members at the same place: copies of them could take any amount of memory
            raise Refused("its tensors have more bytes than the file")
        if n_bytes > size:
            raise Refused(f"a tensor of {n_bytes} bytes is declared where there are {size}")
        if start % _ALIGNMENT:
            raise Refused(f"its data/{key} does not begin where torch.save would let it begin")
        return _bytes(mapped, start, n_bytes)

    start, size = content("data.pkl")
    return read_pickle(BytesIO(mapped[start : start + size]), storage)


def _read_stream(mapped: mmap.mmap) -> Any:
    """PyTorch before 1.6: a number, a version, the machine, the object, the keys of the storages, and these in order."""

    stream = cast(IO[bytes], mapped)  # it supports all methods that are used here

    def no_storage(key: str, n_bytes: int) -> Tensor:
        raise Refused("it has a tensor where none can be")

    if mapped[:1] != b"\x80" or read_pickle(stream, no_storage) != _MAGIC:
        raise Refused(f"it begins with {mapped[:16]!r}")
    version, machine = (read_pickle(stream, no_storage) for _ in range(2))
    if version != _PROTOCOL:
        raise Refused(f"its version is {version!r}, not {_PROTOCOL}")
    _check_byte_order(bool(machine["little_endian"]))
    begin = mapped.tell()

    # The offsets of storages depend on the types of all of them, so the object is read twice, at first without numbers.
    declared: dict[str, int] = {}

    def note(key: str, n_bytes: int) -> Tensor:
        declared[key] = n_bytes
        return torch.empty(n_bytes, dtype=torch.uint8, device="meta")

    read_pickle(stream, note)
    keys = read_pickle(stream, no_storage)
    start, records = mapped.tell(), {}
    if not isinstance(keys, list) or not all(isinstance(key, str) and key in declared for key in keys):
        raise Refused("its list of storages is not that of its tensors")
    for key in keys:
        start += 8  # the number of elements precedes the storage
        if start + declared[key] > len(mapped):
            raise Refused(f"a tensor of {declared[key]} bytes is declared where there are {len(mapped) - start}")
        records[key] = _bytes(mapped, start, declared[key])
        if start % _ALIGNMENT:
            records[key] = records[key].clone()
        start += declared[key]
    if start != len(mapped):
        raise Refused("its tensors have other sizes than it declares")
    mapped.seek(begin)
    return read_pickle(stream, lambda key, n_bytes: records[key][:n_bytes])


def _check_byte_order(is_little: bool) -> None:
    if is_little != (sys.byteorder == "little"):
        raise Refused("its numbers have the byte order of another kind of machine")


def _bytes(mapped: mmap.mmap, start: int, size: int) -> Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=start)
