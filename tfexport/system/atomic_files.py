"""Files and folders that appear under their name only when they are complete, whatever ends the process that writes them."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tfexport.system.file_locks import lock_folder

AT_FDCWD = -100
RENAME_EXCHANGE = 2

NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV)
"""The errors of file systems that cannot exchange two names."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write. It replaces `path` when the block ends without an error; until then its name is `path`.partial.

    One process at a time may write `path`.

    Raises:
        OSError: it cannot be written. What was at `path` stays.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or the name could reach the disk before the content
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def partial_folder(place: Path) -> Iterator[Path]:
    """An empty folder beside `place`, to be filled and moved there. It is removed when the block ends, if it is still there.

    It is locked while the block runs. A folder without a lock was left by a killed process, and is removed.

    Raises:
        OSError: it cannot be made.
    """
    _remove_abandoned(place)
    folder, lock = None, None
    try:  # begins before the folder is made, so that a signal at any time removes it
        while lock is None:
            folder = place.with_name(f".{place.name}.{secrets.token_hex(4)}.partial")
            try:
                folder.mkdir(mode=0o700)
                lock = lock_folder(folder)
            except FileExistsError:
                folder = None  # another process has made it
            except (BlockingIOError, FileNotFoundError):
                continue  # another process removed it, because it was without a lock for a moment
            except OSError:
                if not folder.is_dir():
                    raise
                break  # no locks here: then no process removes folders
        assert folder is not None
        yield folder
    finally:
        if folder is not None:
            _remove(folder)
        if lock is not None:
            os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder. A signal that arrives meanwhile is raised when that is done."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _remove_abandoned(place: Path) -> None:
    name = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{8}}\.partial")
    for folder in place.parent.iterdir():
        if name.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
            with suppress(OSError):  # a process writes it, or it is gone, or belongs to another user
                lock = lock_folder(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def exchange(one: Path, other: Path) -> bool:
    """Exchange what two paths name, in one step; returns False where the system or the file system cannot.

    Raises:
        OSError: it failed, and nothing was changed.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # not Linux
        return False
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(other))
