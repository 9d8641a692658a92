"""Reading of regular files. Pipes, devices and sockets are refused, because they could block the reader or never end. Lines
of text may come from any source; see `input_files`."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

LARGEST_TEXT = 80 * 2**20
"""Maximum size in bytes of a file of JSON, YAML, words or codes, more than twice that of the largest vocabularies. Python's
objects for such a file stay within 2 GiB, even if all of them are empty objects."""

_NOT_REGULAR = "it is not a regular file, but a pipe, a device or the like: copy its content to a file"


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file to read its bytes.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 (returned open)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))


def require_regular(path: Path) -> None:
    """Check a file before a library opens it.

    Raises:
        OSError: the file does not exist, or is not a regular file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The content of a text file, with `\\n` for every newline.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than `LARGEST_TEXT` bytes.
        UnicodeDecodeError: the file has another encoding.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_TEXT:
            raise OSError(
                errno.EFBIG, f"it has more than {LARGEST_TEXT >> 20} MiB, too many for such a file", str(path)
            )
        return io.TextIOWrapper(file, encoding=encoding).read()


def _without_waiting(name: str, flags: int) -> int:
    """Open a file without blocking. By default, opening a pipe waits for a writer."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
