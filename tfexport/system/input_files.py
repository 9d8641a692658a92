"""Input lines of a file or of stdin."""

from __future__ import annotations

import contextlib
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tfexport.errors import TfexportError

LONGEST_LINE = 1 << 20
"""Maximum number of bytes of a line. A longer line is cut to one byte more than this, which limits the memory. The reader
must refuse it by its length."""

ENDLESS_LINE = 1 << 30
"""Number of bytes after which a line counts as endless, such as that of `/dev/zero`."""

_PIECE = 1 << 16


class EndlessLine(TfexportError):
    """A line has more than `ENDLESS_LINE` bytes."""


class Lines(Iterator[bytes]):
    """The lines of an open file with their newlines, each at most one byte longer than `longest`.

    Some editors write a byte order mark at the start of a file. It is left out, unless `keeps_mark` is set.

    Args:
        name: name of the file, for messages.
    """

    def __init__(self, file: BinaryIO, name: str):
        self._file, self._name = file, name
        self.longest = LONGEST_LINE
        self.keeps_mark = False
        self._number = 0
        self._is_cut = False

    def __next__(self) -> bytes:
        """The next line; raises EndlessLine if a line does not end."""
        if self._is_cut:
            self._pass_over_the_rest()
        line = self._file.readline(self.longest + 1)
        if not line:
            raise StopIteration
        if not self._number and not self.keeps_mark and line.startswith(BOM_UTF8):
            line = line.removeprefix(BOM_UTF8)
            if not line.endswith(b"\n"):
                line += self._file.readline(len(BOM_UTF8))  # a line that is too long stays too long
        self._number += 1
        self._is_cut = len(line) > self.longest and not line.endswith(b"\n")
        return line

    def _pass_over_the_rest(self) -> None:
        """Skip the rest of a long line, after the line was returned: the caller need not wait for its end."""
        for _ in range(ENDLESS_LINE // _PIECE):
            piece = self._file.readline(_PIECE)
            if len(piece) < _PIECE or piece.endswith(b"\n"):
                return
        raise EndlessLine(
            f"line {self._number} of {self._name} has more than {ENDLESS_LINE >> 20} MiB. Give a file of text, one sentence "
            "per line."
        )

    def isatty(self) -> bool:
        """Whether the lines come from a terminal."""
        return self._file.isatty()


@contextlib.contextmanager
def opened(source: Path | None) -> Iterator[Lines]:
    """The lines of a file or a pipe; of stdin if `source` is None."""
    if source is None or str(source) == "-":
        if sys.stdin is None:
            raise TfexportError("there is no input: stdin is closed. Give a text file.")
        yield Lines(sys.stdin.buffer, "the input")
    else:
        with lines_of(source) as lines:
            yield lines


@contextlib.contextmanager
def lines_of(path: Path) -> Iterator[Lines]:
    """The lines of a file or a pipe."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise TfexportError(f"cannot read {path}: {error.strerror}. Give a text file, or - for stdin.") from error
    with file:
        yield Lines(file, str(path))


def require_one_stdin(*sources: Path | None) -> None:
    """Raise TfexportError if two inputs would both read stdin."""
    if sum(source is None or str(source) == "-" for source in sources) > 1:
        raise TfexportError("two inputs cannot both be read from stdin. Give a file for one of them.")
