"""Files on the file systems that PyArrow reads: this machine's, S3, GCS, HDFS and others."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import posixpath
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from pyarrow import ArrowException
from pyarrow import fs as arrow_fs

from tfexport.errors import TfexportError
from tfexport.system.atomic_files import make_folder, whole_file

_WILD = "*?["
_HIDDEN = (".", "_")
"""What names of hidden files begin with, and those of files that are no rows, as `_SUCCESS` of Spark."""
_FILE_URI = re.compile(r"file:(?://(?:localhost)?/+|/(?!/))(.*)", re.IGNORECASE)
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""The compressions that are read, by the ends of names, as PyArrow calls them."""


HASHED_AT_ONCE = 4 << 20
"""Bytes of a file that are read and hashed at once."""


@dataclass(frozen=True)
class Stamp:
    """What tells at once that a file was changed. It may stay the same: `Place.sha256` tells for certain."""

    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Place:
    """A file or folder. It can be sent to other machines."""

    path: str
    """As its file system has it: absolute on this machine, `bucket/folder/file` on S3."""
    root: str = ""
    """A URI of its file system, as the user wrote it: of this file or another one. Empty for this machine."""

    @classmethod
    def of(cls, given: str) -> Place:
        """A place as the user writes it. `file:///a` is `/a`: the same run, with the same locks.

        Raises:
            TfexportError: PyArrow knows no such file system.
        """
        if local := _FILE_URI.fullmatch(given):
            given = f"/{os.fsdecode(unquote_to_bytes(local[1]))}"
        if "://" not in given:
            return cls(str(Path(given).absolute()))
        body, sign, options = given.partition("?")  # as in s3://bucket/folder?region=eu-north-1
        root = f"{body.rstrip('/')}{sign}{options}"
        return cls(str(_file_system(root)[1]), root)

    @property
    def is_local(self) -> bool:
        return not self.root

    @property
    def uri(self) -> str:
        """The path or URI, for people: characters of URIs are not quoted."""
        if self.is_local:
            return self.path
        body, sign, options = self.root.partition("?")
        start = f"{body.partition('://')[0]}://"
        authority, path = body.removeprefix(start).partition("/")[0], self.path
        if path.startswith("/"):  # as in hdfs://host:9000/folder
            start += authority
        elif authority.startswith(f"{path.partition('/')[0]}@"):  # as in abfss://container@account/folder
            start, path = f"{start}{authority}/", path.partition("/")[2]
        return f"{start}{path}{sign}{options}"

    @property
    def name(self) -> str:
        """The last part of the path."""
        return posixpath.basename(self.path)

    @cached_property
    def system(self) -> Any:
        """A `pyarrow.fs.FileSystem`.

        Raises:
            TfexportError: it cannot be used.
        """
        return arrow_fs.LocalFileSystem() if self.is_local else _file_system(self.root)[0]

    def __getstate__(self) -> dict[str, str]:
        return {"path": self.path, "root": self.root}

    def __truediv__(self, name: str) -> Place:
        return self.at(f"{self.path}/{name}")

    def at(self, path: str) -> Place:
        """Another path of the same file system."""
        return Place(path, self.root)

    def is_in(self, folder: Place) -> bool:
        """Whether this is in a folder, or further down."""
        if self.is_local and folder.is_local:
            return Path(folder.path).resolve() in Path(self.path).resolve().parents
        return self.uri.partition("?")[0].startswith(f"{folder.uri.partition('?')[0]}/")

    def stamp(self) -> Stamp | None:
        """Of a file; None where there is none."""
        info = self.system.get_file_info(self.path)
        return Stamp(info.size, info.mtime_ns or 0) if info.type == arrow_fs.FileType.File else None

    def names(self) -> list[str]:
        """Of the files in a folder, sorted; none where it is missing."""
        selector = arrow_fs.FileSelector(self.path, allow_not_found=True)
        return sorted(i.base_name for i in self.system.get_file_info(selector) if i.type == arrow_fs.FileType.File)

    def read(self) -> bytes:
        with self.system.open_input_stream(self.path, compression=None) as file:
            return bytes(file.read())

    def sha256(self) -> str:
        """Of all bytes of a file as they are stored, in hexadecimal.

        For each GiB of a cached file it takes 1.1 s on one core of an Intel Xeon with SHA extensions. To read the lines of
        such a file and hand them to actors takes 3 s there.

        Raises:
            OSError: it cannot be read.
        """
        digest = hashlib.sha256()
        with self.system.open_input_stream(self.path, compression=None) as file:
            while chunk := file.read_buffer(HASHED_AT_ONCE):
                digest.update(chunk)
        return digest.hexdigest()

    def write(self, content: bytes, before: Callable[[], None] = lambda: None) -> None:
        """Write a file that takes its name only when it is complete: then it replaces what has the name.

        Args:
            before: called when the content is written, before it takes its name. An exception leaves no file.

        Raises:
            OSError: it cannot be written.
        """
        path = posixpath.dirname(self.path)
        partial = f".{self.name}.{secrets.token_hex(4)}.partial"
        if self.is_local:
            with whole_file(Path(self.path), Path(path, partial)) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # it may take seconds
                before()
            return
        try:
            with self.system.open_output_stream(f"{path}/{partial}", compression=None) as file:
                file.write(content)
            before()
            self.system.move(f"{path}/{partial}", self.path)
        except BaseException:
            with suppress(OSError):
                self.system.delete_file(f"{path}/{partial}")
            raise

    def mark(self) -> None:
        """Make an empty file, in one step."""
        with self.system.open_output_stream(self.path, compression=None):
            pass

    def make(self) -> None:
        """Make a folder."""
        if self.is_local:
            make_folder(Path(self.path))
        else:
            self.system.create_dir(self.path, recursive=True)

    def remove(self) -> None:
        """Remove a file or a folder, if it is there."""
        kind = self.system.get_file_info(self.path).type
        with suppress(FileNotFoundError):
            if kind == arrow_fs.FileType.Directory:
                self.system.delete_dir(self.path)
            elif kind == arrow_fs.FileType.File:
                self.system.delete_file(self.path)


def _file_system(uri: str) -> tuple[Any, str]:
    """The file system of a URI, and the path of the URI there."""
    try:
        return arrow_fs.FileSystem.from_uri(uri)  # type: ignore[no-any-return]
    except (ArrowException, ValueError, OSError) as error:
        raise TfexportError(f"cannot use {uri}: {_line(error)}. Give a path, or a URI of PyArrow.") from error


def inputs(given: list[str], without: Place | None = None) -> list[Place]:
    """The files of paths, globs and folders, in the order in which they are given; of each of these sorted.

    Args:
        without: a folder whose files are left out: that of the output may be in one of the inputs.

    Raises:
        TfexportError: there is no such file, or one comes twice, also by another path or a link.
    """
    found: list[Place] = []
    for one in given:
        if not one:
            raise TfexportError("an input is empty. Give a path, or `.` for the current folder.")
        try:
            every = sorted(set(_matching(one)), key=lambda place: place.uri)
        except (ArrowException, OSError) as error:
            raise TfexportError(f"cannot read {one}: {_line(error)}. Check the path and your access to it.") from error
        files = [file for file in every if without is None or not file.is_in(without)]
        if every and not files:
            raise TfexportError(f"{one} has only files of the output folder. Give another folder for the output.")
        if not files:
            raise TfexportError(f"there is no file {one}. Check the path.")
        found += files
    seen = set[str]()
    for place in found:
        own = os.path.realpath(place.path) if place.is_local else place.uri
        if own in seen:
            raise TfexportError(f"{place.uri} is given twice. Give each input once.")
        seen.add(own)
    return found


def _matching(given: str) -> Iterator[Place]:
    body, sign, options = given.partition("?")
    if "://" in given and not _FILE_URI.fullmatch(given) and "*" in body:  # no URI has it, and `?` begins its options
        folder = body.partition("*")[0].rpartition("/")[0]
        start = Place.of(f"{folder}{sign}{options}")
        pattern = f"{glob.escape(start.path)}{unquote(body[len(folder) :])}"
        yield from (start.at(path) for path in _walk(start, start.path) if _matches(path, pattern))
        return
    place = Place.of(given)
    if place.stamp() is not None:  # also where its name has characters of globs
        yield place
    elif place.is_local and any(sign in given for sign in _WILD):
        for name in glob.glob(place.path, recursive=True):
            if "**" in given and _is_below_link(name, place.path):
                continue
            if place.name.startswith(_HIDDEN) or not posixpath.basename(name).startswith(_HIDDEN):
                yield from _files(Place(name))
    else:
        yield from _files(place)


def _matches(path: str, pattern: str) -> bool:
    """Whether a path is one of a glob: as on this machine, only `**` goes into folders."""
    return fnmatch.fnmatchcase(path, pattern) and ("**" in pattern or path.count("/") == pattern.count("/"))


def _files(place: Place) -> Iterator[Place]:
    if place.stamp() is not None:
        yield place
    else:
        yield from map(place.at, _walk(place, place.path))


def _walk(place: Place, folder: str) -> Iterator[str]:
    """The files below a folder, without hidden ones and those of other programs, `_SUCCESS` and so on."""
    if place.is_local:
        yield from _walk_here(folder)
        return
    for info in place.system.get_file_info(arrow_fs.FileSelector(folder, recursive=True, allow_not_found=True)):
        below = info.path[len(folder) :].strip("/").split("/")
        if info.type == arrow_fs.FileType.File and not any(part.startswith(_HIDDEN) for part in below):
            yield info.path


def _walk_here(folder: str) -> Iterator[str]:
    """As `_walk`, on this machine. Links to folders below it are not followed, since they may loop."""
    for parent, folders, names in os.walk(folder, onerror=_raise_unless_missing):
        folders[:] = [name for name in folders if not name.startswith(_HIDDEN)]
        paths = (os.path.join(parent, name) for name in names if not name.startswith(_HIDDEN))
        yield from filter(os.path.isfile, paths)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):  # such as a pipe, which is no input
        raise error


def _is_below_link(name: str, pattern: str) -> bool:
    """Whether a glob went through a link to a folder, or ends at one, after the part of it that names folders in full."""
    start = Path(pattern[: re.search(r"[*?\[]", pattern).start()] + "x").parent  # type: ignore[union-attr]
    path = Path(name)
    return any(one.is_symlink() and one.is_dir() for one in (path, *path.parents) if start in one.parents)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
