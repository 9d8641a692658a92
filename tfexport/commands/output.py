"""The output of results: stdout, or a file that gets its name only when it is complete, and that a later run can continue.

out.txt.partial        the lines so far, in order
out.txt.partial.json   the description of their run: only the same run may add lines
out.txt                the complete file; the other two are removed
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tfexport.commands.console import say
from tfexport.commands.standard_streams import ClosedStdout, closed_error, guarded
from tfexport.errors import TfexportError
from tfexport.system.atomic_files import NO_LINK, move, whole_file
from tfexport.system.ending import end_if_asked
from tfexport.system.file_locks import OPEN_FILES_CAN_MOVE, lock_file
from tfexport.system.regular_files import read_text


@dataclass(frozen=True)
class OpenOutput:
    """An open output file, or stdout."""

    file: TextIO
    done: int
    """The number of lines that an earlier run has written. The next line is the result of the input line after them."""


def refuse_to_replace(output: Path | None, *inputs: Path | None, bundle: Path) -> None:
    """Raises TfexportError where an output would replace a file that is read, or a file of the bundle.

    The files next to the output, with the lines so far and the description of their run, count too.
    """
    if output is None:
        return
    for path in (output, *files_beside(output)):
        if not path.is_file():
            continue
        for source in inputs:
            if source is not None and source.is_file() and path.samefile(source):
                raise TfexportError(
                    f"{source} is read, and would be replaced by what is written. Give another file with -o."
                )
        if path.resolve().parent == bundle.resolve():
            raise TfexportError(f"{path} is a file of the bundle, and would be replaced. Give another file with -o.")


def files_beside(output: Path) -> tuple[Path, Path]:
    """The files with the lines so far, and with the description of their run."""
    partial, notes = (output.with_name(f"{output.name}.partial{suffix}") for suffix in ("", ".json"))
    return partial, notes


@contextlib.contextmanager
def writing(
    output: Path | None, about: Mapping[str, Any], *, resume: bool = False, window: int = 1
) -> Iterator[OpenOutput]:
    """Open an output; `about` is everything that its lines depend on, JSON-ready.

    With `resume` the output continues after the lines of an earlier run, which may have been killed at any point.

    Args:
        window: the number of lines that are decoded together. After whole windows, the next lines are in the same batches
            as without an interruption, and their scores are the same to the last digit.

    Raises:
        TfexportError: the output cannot be written, `resume` finds lines of another run, or lines of an earlier run would be
            lost without `resume`.
    """
    if output is None:
        if resume:
            raise TfexportError("only a file can be resumed. Give the file of the earlier run with -o.")
        with _stdout() as file:
            yield OpenOutput(file, 0)
        return
    if output.exists() and not output.is_file():  # such as /dev/null: a file cannot be moved there
        with _failures_told(output, ""), output.open("w", encoding="utf-8", newline="\n") as file:
            yield OpenOutput(file, 0)
        return
    partial, notes = files_beside(output)
    with _failures_told(output, f" The lines done so far are in {partial}."):
        with _opened_alone(partial) as file:
            if not resume and file.seek(0, os.SEEK_END):
                raise TfexportError(
                    f"{partial} has the lines of an interrupted run. Continue it with --resume, or remove this file to "
                    "begin again."
                )
            done = _lines_to_keep(file, partial, notes, about, window) if resume else 0
            if not done:
                # In this order: existing lines must never be next to the description of another run.
                file.truncate(0)
                os.fsync(file.fileno())
                with whole_file(notes) as new:
                    new.write(json.dumps(about).encode())
            own = notes.stat().st_ino
            try:
                with io.TextIOWrapper(file, encoding="utf-8", newline="\n") as text:
                    yield OpenOutput(text, done)
                    text.flush()
                    os.fsync(file.fileno())
                    end_if_asked()
                    if OPEN_FILES_CAN_MOVE:
                        move(partial, output)  # before closing the file, which releases the lock
                if not OPEN_FILES_CAN_MOVE:
                    move(partial, output)
            except (KeyboardInterrupt, SystemExit):
                say(f"the lines done so far are in {partial}; --resume continues after them")
                raise
        with contextlib.suppress(FileNotFoundError):
            if notes.stat().st_ino == own:  # not the file of another process that has begun here since
                notes.unlink()


def content_of(path: Path | None) -> str | None:
    """An identifier of a file, to detect changes since a run began; its name if it can be read only once."""
    from tfexport.bundle.reader import file_sha256

    if path is None or not path.is_file():
        return None if path is None else str(path)
    return file_sha256(path)


def _opened_alone(partial: Path) -> io.BufferedRandom:
    """Open and lock the file with the lines so far. No other process can open it until it is closed here.

    Raises:
        TfexportError: the file cannot be opened, has another name too, or another process writes it.
    """
    while True:
        try:
            file = open(partial, "a+b", opener=_of_its_own)  # noqa: SIM115 (returned open)
        except OSError as error:
            reason = f"{partial} is a link" if partial.is_symlink() else error.strerror
            raise TfexportError(
                f"cannot write {partial.with_suffix('')}: {reason}. Give another file with -o."
            ) from error
        try:
            # Worker processes do not share the lock: it ends with this process, not with the last worker.
            lock_file(file)
        except (BlockingIOError, PermissionError):
            file.close()
            raise TfexportError(
                f"another process writes {partial}. Wait until it is done, or give another file with -o."
            ) from None
        except OSError:
            return file  # locks are not supported
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), partial.stat()):
                return file
        file.close()  # another process completed the file between the opening and the lock


def _of_its_own(name: str, flags: int) -> int:
    """Open a file that has no other name. Otherwise a write could change a file of another user."""
    descriptor = os.open(name, flags | NO_LINK | getattr(os, "O_NONBLOCK", 0), 0o666)
    about = os.fstat(descriptor)
    if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"{name} is not a file of its own")


def _lines_to_keep(file: io.BufferedRandom, partial: Path, notes: Path, about: Mapping[str, Any], window: int) -> int:
    """The number of lines in whole windows that were written; later lines are removed.

    After a loss of power the file may have zeros where data did not reach the disk. Lines from the first zero on are
    removed.

    Raises:
        TfexportError: the lines are results of another run.
    """
    lines = size = done = end = 0
    file.seek(0)
    for line in file:
        if b"\0" in line:
            break
        if line.endswith(b"\n"):
            lines, size = lines + 1, size + len(line)
            if lines % window == 0:
                done, end = lines, size
    if lines:
        _require_same(partial, notes, about)
    if not done:
        say(f"note: there is nothing to resume in {partial}: beginning with the first line")
    file.truncate(end)
    file.seek(end)
    return done


def _require_same(partial: Path, notes: Path, about: Mapping[str, Any]) -> None:
    try:
        before = json.loads(read_text(notes))
    except (OSError, ValueError, RecursionError):
        before = None
    if before != json.loads(json.dumps(about)):
        known = before if isinstance(before, dict) else {}
        other = [name for name in about if known.get(name) != about[name]] or ["unknown options"]
        raise TfexportError(
            f"{partial} was begun with another {', '.join(other)}: its lines would not fit. Give the same as then, or "
            "begin again without --resume."
        )


@contextlib.contextmanager
def _stdout() -> Iterator[TextIO]:
    if isinstance(sys.stdout, ClosedStdout):
        raise closed_error()
    with guarded():
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
        yield sys.stdout


@contextlib.contextmanager
def _failures_told(output: Path, kept: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TfexportError(f"cannot write {output}: {error.strerror}.{kept} Make room and run again.") from error
