"""Atomic files and folders: they get their name only when they are complete, even if the writing process is killed."""

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
"""Error numbers of file systems that cannot exchange two names, or flush a folder to the disk."""

NO_LINK = getattr(os, "O_NOFOLLOW", 0)
"""Flag that does not follow links, so that a foreign link cannot redirect a write to another file."""


@contextmanager
def whole_file(path: Path, partial: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write. It replaces `path` when the block ends without an error; until then its name is `partial`.

    After the block, the file survives a power loss. Only one process at a time may write `partial`.

    Args:
        partial: path in the same folder; by default `path`.partial. An existing file is removed.

    Raises:
        OSError: the file cannot be written. The old file at `path` stays.
    """
    partial = partial or path.with_name(f"{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # left by a killed process, or a link
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise the name could reach the disk before the content
        move(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def move(source: Path, place: Path) -> None:
    """Rename `source`, whose content is on the disk, to `place` in the same folder, and replace an existing file.

    The new name then survives a power loss.

    Raises:
        OSError: the file cannot be renamed.
    """
    source.replace(place)
    sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk. Until then a power loss may restore the old names.

    Raises:
        OSError: the disk failed. Nothing is raised if the system does not support this.
    """
    if not hasattr(os, "O_DIRECTORY"):  # on Windows folders cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush all files in a folder and its subfolders, with their names, to the disk.

    Raises:
        OSError: the disk failed.
    """
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            sync_tree(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, so that they survive a power loss.

    Raises:
        OSError: the folder cannot be made, or the path is not a folder.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


@contextmanager
def partial_folder(place: Path) -> Iterator[Path]:
    """An empty folder next to `place`, to be filled and moved there. If it was not moved, it is removed after the block.

    It is locked while the block runs. A folder without a lock was left by a killed process, and is removed.

    Raises:
        OSError: the folder cannot be made.
    """
    _remove_abandoned(place)
    folder, lock = None, None
    try:  # starts before the folder is made, so that the folder is removed after a signal at any time
        while lock is None:
            folder = place.with_name(f".{place.name}.{secrets.token_hex(4)}.partial")
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                folder = None  # another process has made it
                continue
            try:
                lock = lock_folder(folder)
            except (BlockingIOError, FileNotFoundError):
                continue  # another process removed it, because it had no lock for a moment
            except OSError:
                if not folder.is_dir():
                    raise
                break  # without locks, no process removes folders
        assert folder is not None
        yield folder
    finally:
        if folder is not None:
            _remove(folder)
        if lock is not None:
            os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder. A signal that arrives meanwhile is raised afterwards."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _remove_abandoned(place: Path) -> None:
    name = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{8}}\.partial")
    for folder in place.parent.iterdir():
        if name.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
            with suppress(OSError):  # another process writes it, or it was removed, or it belongs to another user
                lock = lock_folder(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def exchange(left: Path, right: Path) -> bool:
    """Exchange two paths in one step; returns False if the system or the file system does not support it.

    Raises:
        OSError: the exchange failed, and nothing was changed.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # not Linux
        return False
    if renameat2(AT_FDCWD, os.fsencode(left), AT_FDCWD, os.fsencode(right), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(right))
