"""Where results are written: stdout, or a file that takes its name only when it is complete, and can be gone on with.

out.txt.partial        the lines so far, in order
out.txt.partial.json   what they are results of: nothing else may be added to them
out.txt                both are gone, and all lines are there
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tfexport.console import say
from tfexport.errors import TfexportError


@dataclass(frozen=True)
class Output:
    """An open output."""

    file: TextIO
    done: int
    """Lines that an earlier run has written: the next line is that of the input line after so many."""


@contextlib.contextmanager
def writing(output: Path | None, about: Mapping[str, Any], *, resume: bool = False) -> Iterator[Output]:
    """Open an output; `about` is all that its lines depend on, JSON-ready.

    With `resume` it goes on after the lines that an earlier run has left, which may have been killed at any point.

    Raises:
        TfexportError: it cannot be written, or `resume` finds lines of something else.
    """
    if output is None:
        if resume:
            raise TfexportError("only a file can be gone on with. Give the one that was begun with -o.")
        with _stdout() as file:
            yield Output(file, 0)
        return
    if output.exists() and not output.is_file():  # such as /dev/null: cannot be moved onto
        with _failures_told(output, ""), output.open("w", encoding="utf-8", newline="\n") as file:
            yield Output(file, 0)
        return
    partial, notes = (output.with_name(f"{output.name}.partial{suffix}") for suffix in ("", ".json"))
    with _failures_told(output, f" The lines done so far are in {partial}."):
        done = _lines_to_keep(partial, notes, about) if resume else 0
        try:
            if not done:
                notes.write_text(json.dumps(about), encoding="utf-8")
            file = partial.open("a" if done else "w", encoding="utf-8", newline="\n")
        except OSError as error:
            raise TfexportError(f"cannot write {output}: {error.strerror}. Give another file with -o.") from error
        try:
            with file:
                yield Output(file, done)
            partial.replace(output)
            notes.unlink(missing_ok=True)
        except KeyboardInterrupt:
            say(f"the lines done so far are in {partial}; --resume goes on after them")
            raise


def _lines_to_keep(partial: Path, notes: Path, about: Mapping[str, Any]) -> int:
    """The number of whole lines that were written; a last one that is cut is removed.

    Raises:
        TfexportError: they are results of something else.
    """
    if not partial.exists():
        say(f"note: there is no {partial} to go on with: beginning with the first line")
        return 0
    try:
        before = json.loads(notes.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        before = None
    if before != json.loads(json.dumps(about)):
        known = before if isinstance(before, dict) else {}
        other = [name for name in about if known.get(name) != about[name]] or ["unknown options"]
        raise TfexportError(
            f"{partial} was begun with another {', '.join(other)}: its lines would not fit. Give what was given then, or "
            "begin anew without --resume."
        )
    done = end = 0
    with partial.open("r+b") as file:
        for line in file:
            if line.endswith(b"\n"):
                done, end = done + 1, end + len(line)
        file.truncate(end)
    return done


@contextlib.contextmanager
def _stdout() -> Iterator[TextIO]:
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    try:
        yield sys.stdout
        sys.stdout.flush()
    except OSError as error:
        # What could not be written is still in the buffer: Python would fail on it once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # nobody reads on, as in `tfexport decode ... | head`
            raise SystemExit(141) from None
        raise TfexportError(f"cannot write to stdout: {error.strerror}. Make room, or write to -o FILE.") from error


@contextlib.contextmanager
def _failures_told(output: Path, kept: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TfexportError(f"cannot write {output}: {error.strerror}.{kept} Make room and run again.") from error
