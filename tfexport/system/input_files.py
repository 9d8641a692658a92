"""Input: lines of a file or of stdin."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tfexport.errors import TfexportError


@contextlib.contextmanager
def opened(source: Path | None) -> Iterator[BinaryIO]:
    """The lines of a file, or of stdin where there is none."""
    if source is None or str(source) == "-":
        if sys.stdin is None:
            raise TfexportError("there is no input: stdin is closed. Give a text file.")
        yield sys.stdin.buffer
    else:
        try:
            file = source.open("rb")
        except OSError as error:
            raise TfexportError(f"cannot read {source}: {error.strerror}. Give a text file, or - for stdin.") from error
        with file:
            yield file


def require_one_stdin(*sources: Path | None) -> None:
    """Raises TfexportError where two inputs would take their lines from stdin in turn."""
    if sum(source is None or str(source) == "-" for source in sources) > 1:
        raise TfexportError("two inputs cannot both be read from stdin. Give a file for one of them.")
