"""Files that are read whole. What is none (a pipe, a device, a socket) would keep its reader waiting or never end, so it is
refused. Lines of text may come from anywhere: see `input_files`."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

LARGEST_TEXT = 80 * 2**20
"""Bytes of a file of JSON, YAML, words or codes: more than twice as many as the largest vocabularies have. What Python makes
of so many stays within 2 GiB, also where it is nothing but empty objects."""

_NOT_REGULAR = "it is not a regular file, but a pipe, a device or the like: copy what it gives to a file"


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file to read its bytes.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 (returned open)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))


def require_regular(path: Path) -> None:
    """Call this before a library opens a file.

    Raises:
        OSError: it is not there, or is not a regular file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The content of a file of text, with `\\n` for every newline.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than `LARGEST_TEXT` bytes.
        UnicodeDecodeError: it is in another encoding.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_TEXT:
            raise OSError(
                errno.EFBIG, f"it has more than {LARGEST_TEXT >> 20} MiB, too many for such a file", str(path)
            )
        return io.TextIOWrapper(file, encoding=encoding).read()


def _without_waiting(name: str, flags: int) -> int:
    """Opening a pipe waits for whoever writes into it, if it is not told not to."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
