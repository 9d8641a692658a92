"""Files that only save time: what a library measured or compiled in one process, for the next one."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from tfexport.system.atomic_files import whole_file
from tfexport.system.regular_files import read_bytes


def folder() -> Path:
    """Where they lie, as the XDG base directory specification says; anything in it may be deleted at any time.

    Raises:
        OSError: this user has no home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfexport"
    except RuntimeError as error:
        raise OSError("this user has no home folder: set XDG_CACHE_HOME") from error


class NotOwned(OSError):
    """Others than this user may write to the folder: what lies there may be anybody's."""


def own_folder(*inner: str) -> Path:
    """The folder, or one in it, made where it is missing. Nobody but this user may write to it.

    Raises:
        OSError: it cannot be made.
        NotOwned: others can write to it.
    """
    path = folder()
    if any("\udc80" <= character <= "\udcff" for character in str(path)):  # bytes that are no character
        raise OSError(f"the path {path} is not UTF-8: set XDG_CACHE_HOME to another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    for place in (path, *(path := path / name for name in inner)):
        place.mkdir(mode=0o700, exist_ok=True)
        require_own(place)
    return path


def require_own(place: Path) -> None:
    """Raises NotOwned where others than this user may write to a folder, or it is a link, which may point anywhere."""
    facts = place.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise NotOwned(f"{place} is not a folder, but a link or the like: set XDG_CACHE_HOME to another folder")
    if hasattr(os, "geteuid") and (facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise NotOwned(
            f"others than this user may write to {place}: chmod go-w it, or set XDG_CACHE_HOME to another folder"
        )


def load(name: str) -> bytes:
    """The content of a file; nothing where there is none, or where others may have written it."""
    try:
        require_own(folder())
        return read_bytes(folder() / name)
    except OSError:
        return b""


def keep(name: str, content: bytes | memoryview) -> None:
    """Write a file, if that is possible: without it the next process takes longer, and that is all."""
    with suppress(OSError):
        path = own_folder() / name
        with whole_file(path, path.with_name(f"{name}.{os.getpid()}.partial")) as file:
            file.write(content)
