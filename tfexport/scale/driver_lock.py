"""One driver on an output folder at a time. A second driver gets an error. A killed driver holds nothing.

On a file system with locks, the driver locks a file, which the kernel unlocks when the process ends. Elsewhere, as on object
stores, each driver writes a claim of its own and renews it:

OUT/_tfexport/driver.lock          the locked file
OUT/_tfexport/driver.json          the process that has locked it, for the error of the second driver
OUT/_tfexport/drivers/….json       claims

A driver writes its claim before it lists the others. If the store lists all files written before, at least one of two
drivers sees the other. A claim that nobody renews belongs to a killed driver.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import BinaryIO

from pyarrow import ArrowException

from tfexport.errors import TfexportError
from tfexport.scale.storage import Place
from tfexport.system.file_locks import lock_file

RENEWED = 10.0
"""Seconds between two writes of a claim."""
PATIENCE = 4
"""The number of renewals that may be missing before a claim counts as that of a killed driver."""
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)

Check = Callable[[], None]
"""Raises TfexportError if another driver has taken the folder meanwhile."""


@contextmanager
def only_driver(folder: Place, own: Place) -> Iterator[Check]:
    """Hold an output folder, so that no other driver can hold it.

    Args:
        own: the folder `_tfexport` in it, which has no output. It is made.

    Raises:
        TfexportError: another driver holds it, or nothing can be written there.
    """
    with ExitStack() as stack:
        try:
            own.make()
            if own.system.type_name == "local":
                file = stack.enter_context(Path((own / "driver.lock").path).open("ab"))
                is_locked = _lock(file, folder, own)
            else:
                is_locked = False
            check = stack.enter_context(claimed(folder, own)) if not is_locked else lambda: None
        except (ArrowException, OSError) as error:
            about = "it is not a folder" if isinstance(error, FileExistsError | NotADirectoryError) else str(error)
            raise TfexportError(
                f"cannot write to {folder.uri}: {about}. Check the path and your access to it."
            ) from error
        yield check


def _lock(file: BinaryIO, folder: Place, own: Place) -> bool:
    """Lock a file; False if the file system has no locks."""
    try:
        lock_file(file)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        if isinstance(error, BlockingIOError | PermissionError):
            raise _in_use(folder, own / "driver.json") from error
        raise
    (own / "driver.json").write(json.dumps(_about()).encode())
    return True


@contextmanager
def claimed(folder: Place, own: Place, renewed: float = RENEWED) -> Iterator[Check]:
    """Hold a folder by a claim; see `only_driver`.

    Args:
        renewed: the seconds between two writes of the claim.
    """
    claims = own / "drivers"
    claims.make()
    claim = claims / f"{secrets.token_hex(8)}.json"
    ended, lost = Event(), Event()

    def write(beat: int) -> None:
        claim.write(json.dumps({**_about(), "beat": beat}).encode())

    def renew() -> None:
        beat = 0
        while not ended.wait(renewed):
            beat += 1
            with suppress(ArrowException, OSError):  # perhaps the next one reaches the store
                if claim.stamp() is None:
                    lost.set()
                    return
                write(beat)

    def check() -> None:
        if lost.is_set():
            raise TfexportError(
                f"{folder.uri} was taken over by another run, since this one could not be reached for long. Leave the "
                "folder to that, or stop it and go on with --resume."
            )

    write(0)
    thread = Thread(target=renew, daemon=True, name="tfexport-claim")
    thread.start()
    try:
        _refuse_living(folder, claims, claim.name, renewed)
        yield check
    finally:
        ended.set()
        thread.join()
        claim.remove()


def _refuse_living(folder: Place, claims: Place, own: str, renewed: float) -> None:
    """Wait for renewals of the claims of other drivers, and remove the claims that nobody renews.

    Args:
        own: the file name of this driver's claim.

    Raises:
        TfexportError: another driver renews its claim.
    """
    before = {name: _content(claims / name) for name in claims.names() if name != own}
    until = time.monotonic() + PATIENCE * renewed
    while before and time.monotonic() < until:
        time.sleep(renewed / 2)
        for name, content in list(before.items()):
            now = _content(claims / name)
            if now is None:
                del before[name]  # its driver has ended
            elif now != content:
                raise _in_use(folder, claims / name)
    for name in before:
        (claims / name).remove()


def _content(place: Place) -> bytes | None:
    try:
        return place.read()
    except FileNotFoundError:
        return None


def _about() -> dict[str, object]:
    return {"process": os.getpid(), "host": socket.gethostname()}


def _in_use(folder: Place, about: Place) -> TfexportError:
    """The error of a second driver.

    Args:
        about: the file that describes the first driver.
    """
    holder = ""
    with suppress(ArrowException, OSError, ValueError, KeyError, TypeError):
        driver = json.loads(about.read())
        holder = f", process {driver['process']} on {driver['host']}"
    return TfexportError(
        f"another run writes to {folder.uri} now{holder}. Wait until it ends, stop it, or give another folder."
    )
