"""Input: lines of a file or of stdin."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tfexport.errors import TfexportError

LONGEST_LINE = 1 << 20
"""Bytes that are kept of a line. A longer one comes cut, one byte longer than this: whoever reads it must refuse it by its
length, and memory stays in proportion."""

ENDLESS_LINE = 1 << 30
"""Bytes after which a line is taken for one that never ends, as `/dev/zero` gives it."""

_PIECE = 1 << 16


class EndlessLine(TfexportError):
    """A line goes on after `ENDLESS_LINE` bytes."""


class Lines(Iterator[bytes]):
    """The lines of an open file with their newlines, none longer than `longest` and one byte.

    Args:
        name: of the file, for messages.
    """

    def __init__(self, file: BinaryIO, name: str):
        self._file, self._name = file, name
        self.longest = LONGEST_LINE
        self._number = 0
        self._is_cut = False

    def __next__(self) -> bytes:
        """Raises EndlessLine where a line does not end."""
        if self._is_cut:
            self._pass_over_the_rest()
        line = self._file.readline(self.longest + 1)
        if not line:
            raise StopIteration
        self._number += 1
        self._is_cut = len(line) > self.longest and not line.endswith(b"\n")
        return line

    def _pass_over_the_rest(self) -> None:
        """After the line was given: who waits for it need not wait for its end."""
        for _ in range(ENDLESS_LINE // _PIECE):
            piece = self._file.readline(_PIECE)
            if len(piece) < _PIECE or piece.endswith(b"\n"):
                return
        raise EndlessLine(
            f"line {self._number} of {self._name} goes on after {ENDLESS_LINE >> 20} MiB. Give a file of text, one sentence "
            "per line."
        )

    def isatty(self) -> bool:
        """Whether a person types the lines."""
        return self._file.isatty()


@contextlib.contextmanager
def opened(source: Path | None) -> Iterator[Lines]:
    """The lines of a file, also of a pipe, or of stdin where there is none."""
    if source is None or str(source) == "-":
        if sys.stdin is None:
            raise TfexportError("there is no input: stdin is closed. Give a text file.")
        yield Lines(sys.stdin.buffer, "the input")
    else:
        with lines_of(source) as lines:
            yield lines


@contextlib.contextmanager
def lines_of(path: Path) -> Iterator[Lines]:
    """The lines of a file, also of a pipe."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise TfexportError(f"cannot read {path}: {error.strerror}. Give a text file, or - for stdin.") from error
    with file:
        yield Lines(file, str(path))


def require_one_stdin(*sources: Path | None) -> None:
    """Raises TfexportError where two inputs would take their lines from stdin in turn."""
    if sum(source is None or str(source) == "-" for source in sources) > 1:
        raise TfexportError("two inputs cannot both be read from stdin. Give a file for one of them.")
