"""Files that only save time: what a library measured or compiled in one process, for the next one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def folder() -> Path:
    """Where they lie, as the XDG base directory specification says; anything in it may be deleted at any time.

    Raises:
        OSError: this user has no home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfexport"
    except RuntimeError as error:
        raise OSError("this user has no home folder: set XDG_CACHE_HOME") from error


def load(name: str) -> bytes:
    """The content of a file; nothing where there is none."""
    try:
        return (folder() / name).read_bytes()
    except OSError:
        return b""


def keep(name: str, content: bytes | memoryview) -> None:
    """Write a file, if that is possible: without it the next process takes longer, and that is all."""
    with suppress(OSError):
        path = folder() / name
        partial = path.with_name(f"{name}.{os.getpid()}.partial")
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)  # --share-weights trusts only what nobody else can write to
        partial.write_bytes(content)
        partial.replace(path)
