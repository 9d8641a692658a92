"""Locks on files and folders. A lock ends with its process, even if the process is killed.

Linux and macOS have `fcntl`, Windows has `msvcrt`.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
msvcrt: ModuleType | None
try:
    import msvcrt
except ImportError:  # not Windows
    msvcrt = None

LOCKED_BYTE = 1 << 30
"""The byte that is locked on Windows. Other processes can neither read nor write a locked byte, so it is far after the
content of usual files."""

OPEN_FILES_CAN_MOVE = os.name != "nt"
"""Whether a file can be renamed while a process has it open."""


def lock_file(file: BinaryIO) -> None:
    """Lock an open file against other processes, until it is closed. Child processes do not share the lock.

    Raises:
        BlockingIOError, PermissionError: another process has locked it.
        OSError: the system or the file system has no locks.
    """
    if fcntl is not None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif msvcrt is not None:
        position = file.tell()
        file.seek(LOCKED_BYTE)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        finally:
            file.seek(position)
    else:
        raise _not_supported(file.name)


def lock_folder(folder: Path) -> int:
    """Lock a folder against other calls of this function; returns a descriptor that holds the lock until it is closed.

    Raises:
        BlockingIOError: another process has locked the folder.
        FileNotFoundError: the folder does not exist, or was just removed.
        OSError: the system or the file system has no locks on folders.
    """
    if fcntl is None:
        raise _not_supported(str(folder))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The folder may have been moved before it was locked, so that the name now belongs to another folder.
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _not_supported(name: str) -> OSError:
    return OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), name)
