"""One archive in parts of a limited size, with a manifest that says how to check and join them."""

from __future__ import annotations

import hashlib
import io
import lzma
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MANIFEST = "pack.json"
LEVEL = 1
"""Of xz. Level 6 takes two to five times as long, for 1 %: code for GPUs is compressed already."""


class BadPack(Exception):
    """Parts are missing or damaged; the message says which, and what to do."""


class OtherPython(BadPack):
    """A pack is for another version of Python than this one."""


class PartWriter(io.RawIOBase):
    """A stream that goes on in the next file when one is full: `part-00`, `part-01`, ..."""

    def __init__(self, folder: Path, most: int):
        self._folder, self._most = folder, most
        self._file: BinaryIO | None = None
        self._room = 0
        self.parts: list[dict[str, Any]] = []
        self._digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            if self._room == 0:
                self._next()
            piece = view[done : done + self._room]
            assert self._file is not None
            self._file.write(piece)
            self._digest.update(piece)
            done, self._room = done + len(piece), self._room - len(piece)
        return len(view)

    def _next(self) -> None:
        self._finish()
        name = f"part-{len(self.parts):02}"
        self._file, self._room = (self._folder / name).open("wb"), self._most
        self._digest = hashlib.sha256()
        self.parts.append({"file": name})

    def _finish(self) -> None:
        if self._file is not None:
            self.parts[-1] |= {"bytes": self._file.tell(), "sha256": self._digest.hexdigest()}
            self._file.close()
            self._file = None

    def close(self) -> None:
        self._finish()
        super().close()


def write_parts(tree: Path, folder: Path, most: int) -> list[dict[str, Any]]:
    """Pack what is in `tree` into `folder`, in parts of at most `most` bytes.

    Returns:
        `file`, `bytes` and `sha256` of each part.
    """
    writer = PartWriter(folder, most)
    with (
        lzma.LZMAFile(writer, "wb", preset=LEVEL) as stream,
        tarfile.open(fileobj=stream, mode="w|", bufsize=1 << 20) as archive,
    ):
        archive.add(tree, arcname=".", filter=_anonymous)
    writer.close()
    return writer.parts


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


class PartReader(io.RawIOBase):
    """The parts as one stream."""

    def __init__(self, paths: Iterable[Path]):
        self._paths = iter(paths)
        self._file: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._file is None:
                path = next(self._paths, None)
                if path is None:
                    return 0
                self._file = path.open("rb")
            data = self._file.read(len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
            self._file.close()
            self._file = None


def checked_parts(folder: Path, manifest: Mapping[str, Any]) -> list[Path]:
    """The parts of a pack, in their order.

    Raises:
        BadPack: one is missing, or has other bytes than the manifest says.
    """
    paths = [folder / part["file"] for part in manifest["parts"]]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise BadPack(f"{', '.join(missing)} of the pack is not in {folder}. Copy it there.")
    for path, part in zip(paths, manifest["parts"], strict=True):
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != part["sha256"]:
            raise BadPack(f"{path} is damaged: its sha256 is not that of {MANIFEST}. Copy it again.")
    return paths


@contextmanager
def _archive(paths: Sequence[Path]) -> Iterator[tarfile.TarFile]:
    with (
        io.BufferedReader(PartReader(paths), 1 << 20) as stream,
        tarfile.open(fileobj=stream, mode="r|xz") as archive,
    ):
        yield archive


def extract_parts(folder: Path, manifest: Mapping[str, Any], target: Path) -> None:
    """Check the parts and unpack them to `target`.

    Raises:
        BadPack: one is missing or damaged.
    """
    target.mkdir(parents=True, exist_ok=True)
    with _archive(checked_parts(folder, manifest)) as archive:
        archive.extractall(target, filter="data")
