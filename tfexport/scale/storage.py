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
"""The first characters of the names of hidden files, and of files without rows, such as `_SUCCESS` of Spark."""
_FILE_URI = re.compile(r"file:(?://(?:localhost)?/+|/(?!/))(.*)", re.IGNORECASE)
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""PyArrow's names of the compressions that can be read, by the suffixes of files."""
HASHED_AT_ONCE = 4 << 20
"""The number of bytes of a file that are read and hashed at once."""


@dataclass(frozen=True)
class Stamp:
    """The size of a file and the time of its last change. Files with different stamps differ. Files with equal stamps may
    differ too: `Place.sha256` decides."""

    size: int
    """The size, in bytes."""
    mtime_ns: int
    """The time of the last change, in nanoseconds."""


@dataclass(frozen=True)
class Place:
    """A file or folder. It can be sent to other machines."""

    path: str
    """The path in its file system: absolute on this machine, `bucket/folder/file` on S3."""
    root: str = ""
    """A URI of its file system, as the user wrote it for this file or another one. Empty for this machine."""

    @classmethod
    def of(cls, source: str) -> Place:
        """The place of a path or URI. `file:///a` and `/a` are the same place, with the same locks.

        Raises:
            TfexportError: PyArrow knows no such file system.
        """
        if local := _FILE_URI.fullmatch(source):
            source = f"/{os.fsdecode(unquote_to_bytes(local[1]))}"
        if "://" not in source:
            return cls(str(Path(source).absolute()))
        body, sign, options = source.partition("?")  # as in s3://bucket/folder?region=eu-north-1
        root = f"{body.rstrip('/')}{sign}{options}"
        return cls(str(_file_system(root)[1]), root)

    @property
    def is_local(self) -> bool:
        return not self.root

    @property
    def uri(self) -> str:
        """The path or URI for messages, without quoting of characters."""
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
            TfexportError: the file system cannot be used.
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
        """Whether this place is in a folder, or in one of its subfolders."""
        if self.is_local and folder.is_local:
            return Path(folder.path).resolve() in Path(self.path).resolve().parents
        return self.uri.partition("?")[0].startswith(f"{folder.uri.partition('?')[0]}/")

    def stamp(self) -> Stamp | None:
        """The stamp of a file; None if there is no such file."""
        info = self.system.get_file_info(self.path)
        return Stamp(info.size, info.mtime_ns or 0) if info.type == arrow_fs.FileType.File else None

    def names(self) -> list[str]:
        """The names of the files in a folder, sorted; an empty list if the folder is missing."""
        selector = arrow_fs.FileSelector(self.path, allow_not_found=True)
        return sorted(i.base_name for i in self.system.get_file_info(selector) if i.type == arrow_fs.FileType.File)

    def read(self) -> bytes:
        with self.system.open_input_stream(self.path, compression=None) as file:
            return bytes(file.read())

    def sha256(self) -> str:
        """The sha256 of a file as it is stored, in hexadecimal.

        It takes 1.1 s per GiB of a cached file on one core of an Intel Xeon with SHA extensions. Reading the lines of such a
        file and sending them to actors takes 3 s per GiB there.

        Raises:
            OSError: the file cannot be read.
        """
        digest = hashlib.sha256()
        with self.system.open_input_stream(self.path, compression=None) as file:
            while chunk := file.read_buffer(HASHED_AT_ONCE):
                digest.update(chunk)
        return digest.hexdigest()

    def write(self, content: bytes, before: Callable[[], None] = lambda: None) -> None:
        """Write a file under a temporary name, and rename it when it is complete. It then replaces a file of that name.

        Args:
            before: called after the content is written, before the file is renamed. If it raises, the file is removed.

        Raises:
            OSError: the file cannot be written.
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
        """Make an empty file under its final name."""
        with self.system.open_output_stream(self.path, compression=None):
            pass

    def make(self) -> None:
        """Make a folder."""
        if self.is_local:
            make_folder(Path(self.path))
        else:
            self.system.create_dir(self.path, recursive=True)

    def remove(self) -> None:
        """Remove a file or a folder if it exists."""
        kind = self.system.get_file_info(self.path).type
        with suppress(FileNotFoundError):
            if kind == arrow_fs.FileType.Directory:
                self.system.delete_dir(self.path)
            elif kind == arrow_fs.FileType.File:
                self.system.delete_file(self.path)


def _file_system(uri: str) -> tuple[Any, str]:
    """The file system of a URI, and the path of the URI in it."""
    try:
        return arrow_fs.FileSystem.from_uri(uri)  # type: ignore[no-any-return]
    except (ArrowException, ValueError, OSError) as error:
        raise TfexportError(f"cannot use {uri}: {_line(error)}. Give a path, or a URI of PyArrow.") from error


def inputs(sources: list[str], without: Place | None = None) -> list[Place]:
    """The files of paths, globs and folders, in the order of `sources`. The files of each source are sorted.

    Args:
        without: a folder whose files are left out, because the output folder may be in one of the sources.

    Raises:
        TfexportError: a source has no file, or a file comes twice, also by another path or a link.
    """
    places: list[Place] = []
    for source in sources:
        if not source:
            raise TfexportError("an input is empty. Give a path, or `.` for the current folder.")
        try:
            every = sorted(set(_matching(source)), key=lambda place: place.uri)
        except (ArrowException, OSError) as error:
            raise TfexportError(
                f"cannot read {source}: {_line(error)}. Check the path and your access to it."
            ) from error
        files = [file for file in every if without is None or not file.is_in(without)]
        if every and not files:
            raise TfexportError(f"{source} has only files of the output folder. Give another folder for the output.")
        if not files:
            raise TfexportError(f"there is no file {source}. Check the path.")
        places += files
    seen = set[str]()
    for place in places:
        own = os.path.realpath(place.path) if place.is_local else place.uri
        if own in seen:
            raise TfexportError(f"{place.uri} is given twice. Give each input once.")
        seen.add(own)
    return places


def _matching(source: str) -> Iterator[Place]:
    """The files of a path, a glob or a folder."""
    body, sign, options = source.partition("?")
    # In a URI, `*` can only be of a glob, and `?` begins the options.
    if "://" in source and not _FILE_URI.fullmatch(source) and "*" in body:
        folder = body.partition("*")[0].rpartition("/")[0]
        start = Place.of(f"{folder}{sign}{options}")
        pattern = f"{glob.escape(start.path)}{unquote(body[len(folder) :])}"
        yield from (start.at(path) for path in _walk(start, start.path) if _matches(path, pattern))
        return
    place = Place.of(source)
    if place.stamp() is not None:  # also where its name has characters of globs
        yield place
    elif place.is_local and any(sign in source for sign in _WILD):
        for name in glob.glob(place.path, recursive=True):
            if "**" in source and _is_below_link(name, place.path):
                continue
            if place.name.startswith(_HIDDEN) or not posixpath.basename(name).startswith(_HIDDEN):
                yield from _files(Place(name))
    else:
        yield from _files(place)


def _matches(path: str, pattern: str) -> bool:
    """Whether a path matches a glob. As on this machine, only `**` matches the names of several folders."""
    return fnmatch.fnmatchcase(path, pattern) and ("**" in pattern or path.count("/") == pattern.count("/"))


def _files(place: Place) -> Iterator[Place]:
    if place.stamp() is not None:
        yield place
    else:
        yield from map(place.at, _walk(place, place.path))


def _walk(place: Place, folder: str) -> Iterator[str]:
    """The files in a folder and its subfolders, without hidden files and files of other programs, such as `_SUCCESS`."""
    if place.is_local:
        yield from _walk_here(folder)
        return
    for info in place.system.get_file_info(arrow_fs.FileSelector(folder, recursive=True, allow_not_found=True)):
        below = info.path[len(folder) :].strip("/").split("/")
        if info.type == arrow_fs.FileType.File and not any(part.startswith(_HIDDEN) for part in below):
            yield info.path


def _walk_here(folder: str) -> Iterator[str]:
    """`_walk` on this machine. It does not follow links to folders, since they may loop."""
    for parent, folders, names in os.walk(folder, onerror=_raise_unless_missing):
        folders[:] = [name for name in folders if not name.startswith(_HIDDEN)]
        paths = (os.path.join(parent, name) for name in names if not name.startswith(_HIDDEN))
        yield from filter(os.path.isfile, paths)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):  # such as a pipe, which is no input
        raise error


def _is_below_link(name: str, pattern: str) -> bool:
    """Whether a path leads through a link to a folder, or to one, below the folder that the glob names without wildcards."""
    start = Path(pattern[: re.search(r"[*?\[]", pattern).start()] + "x").parent  # type: ignore[union-attr]
    path = Path(name)
    below = (folder for folder in (path, *path.parents) if start in folder.parents)
    return any(folder.is_symlink() and folder.is_dir() for folder in below)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
