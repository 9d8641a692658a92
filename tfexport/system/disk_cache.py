"""Cache files that only save time: measurements and compiled code of libraries, for later processes."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from tfexport.system.atomic_files import whole_file
from tfexport.system.regular_files import read_bytes


def folder() -> Path:
    """The cache folder, by the XDG base directory specification. Its files may be deleted at any time.

    Raises:
        OSError: the user has no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfexport"
    except RuntimeError as error:
        raise OSError("this user has no home folder: set XDG_CACHE_HOME") from error


class NotOwned(OSError):
    """Other users may write to the folder, so its files are not trusted."""


def own_folder(*inner: str) -> Path:
    """The cache folder, or a folder in it, made if missing. Only this user may write to it.

    Raises:
        OSError: the folder cannot be made.
        NotOwned: other users can write to it.
    """
    path = folder()
    if any("\udc80" <= character <= "\udcff" for character in str(path)):  # bytes that are not UTF-8
        raise OSError(f"the path {path} is not UTF-8: set XDG_CACHE_HOME to another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    for place in (path, *(path := path / name for name in inner)):
        place.mkdir(mode=0o700, exist_ok=True)
        require_own(place)
    return path


def require_own(place: Path) -> None:
    """Raise NotOwned if other users may write to a folder, or if it is a link, which may point anywhere."""
    facts = place.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise NotOwned(f"{place} is not a folder, but a link or the like: set XDG_CACHE_HOME to another folder")
    if hasattr(os, "geteuid") and (facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise NotOwned(f"other users may write to {place}: chmod go-w it, or set XDG_CACHE_HOME to another folder")


def load(name: str) -> bytes:
    """The content of a file; empty if it is missing, or if other users may have written it."""
    try:
        require_own(folder())
        return read_bytes(folder() / name)
    except OSError:
        return b""


def keep(name: str, content: bytes | memoryview) -> None:
    """Write a file, if possible. Without it, the next process only takes longer."""
    with suppress(OSError):
        path = own_folder() / name
        with whole_file(path, path.with_name(f"{name}.{os.getpid()}.partial")) as file:
            file.write(content)
