"""Files and folders that are whole or not there, whatever ends the process that writes them, and who is writing them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

AT_FDCWD = -100
RENAME_EXCHANGE = 2

NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV)
"""What file systems answer that cannot exchange two names."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends well. Until then it is `path`.partial.

    One process at a time may write `path`.

    Raises:
        OSError: it cannot be written; what was at `path` stays.
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
    """An empty folder beside `place`, to be filled and moved there; what lies in it when the block ends is removed.

    It is locked while the block runs. Folders that killed processes have left are known by having no lock, and removed.

    Raises:
        OSError: it cannot be made.
    """
    _remove_abandoned(place)
    folder, lock = None, None
    try:  # from before it is made, so that a signal finds it wherever it comes
        while lock is None:
            folder = place.with_name(f".{place.name}.{secrets.token_hex(4)}.partial")
            try:
                folder.mkdir(mode=0o700)
                lock = lock_folder(folder)
            except FileExistsError:
                folder = None  # not ours to remove
            except (BlockingIOError, FileNotFoundError):
                continue  # in the moment without a lock another process took it for abandoned
            except OSError:
                if not folder.is_dir():
                    raise
                break  # a file system without locks: there nothing is ever taken for abandoned
        assert folder is not None
        yield folder
    finally:
        if folder is not None:
            _remove(folder)
        if lock is not None:
            os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder, also where a signal comes meanwhile, which is raised when that is done."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _remove_abandoned(place: Path) -> None:
    name = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{8}}\.partial")
    for folder in place.parent.iterdir():
        if name.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
            with suppress(OSError):  # somebody writes it, or it is gone, or not ours to remove
                lock = lock_folder(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def lock_folder(folder: Path) -> int:
    """Lock a folder against others that do so; returns a descriptor that holds the lock until it is closed, or the process
    ends in any way.

    Raises:
        BlockingIOError: another process has locked it.
        FileNotFoundError: it is not there, perhaps no longer.
        OSError: the file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It may have been moved before it was locked, and its name be another one's now.
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def exchange(one: Path, other: Path) -> bool:
    """Let two paths swap what they name, in one step; False where the system or the file system cannot.

    Raises:
        OSError: it failed, and nothing was changed.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # not Linux
        return False
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(other))
