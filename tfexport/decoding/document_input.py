"""Splits the input of `decode` into units of documents: each line, a column of each line, or the whole input."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from tfexport.decoding.documents import DocumentMaker, Unit
from tfexport.documents.document import Document
from tfexport.errors import TfexportError
from tfexport.system.input_files import Lines

LONGEST_DOCUMENT = 1 << 24
"""The largest number of bytes of a line or a whole document that is split into sentences."""

LONGEST_MARKUP = 1 << 20
"""The largest number of bytes of a document with markup: Python's parser takes quadratic time if many tags stay open."""

_EMPTY = Document("", (), ())


def units_of(lines: Lines, maker: DocumentMaker, column: str | None, *, is_whole: bool) -> Iterator[Unit]:
    """The units of an input.

    Args:
        column: the number, from 1, or the name of the column to translate; the first line has the names.
        is_whole: the whole input is one unit.

    Raises:
        TfexportError: the column does not exist, or the whole input is too long or not UTF-8.
    """
    lines.longest = LONGEST_DOCUMENT
    lines.keeps_mark = True  # documents keep every character
    if is_whole:
        return iter([_whole(lines, maker)])
    if column is None:
        return (_line(line, number, maker) for number, line in enumerate(lines, start=1))
    if re.fullmatch("[0-9]{1,9}", column):
        if int(column) < 1:
            raise TfexportError("columns are counted from 1. Give --column 1 for the first.")
        cells = enumerate(lines, start=1)
        return (_cell(line, number, int(column), maker) for number, line in cells)
    header = next(lines, b"")
    names = header.decode("utf-8-sig", "replace").rstrip("\r\n").split("\t")
    if names.count(column) != 1:
        known = ", ".join(repr(name[:40]) for name in names[:20])
        problem = "no column is" if column not in names else "several columns are"
        raise TfexportError(f"{problem} called {column!r}; the first line has {known}. Give one of them, or a number.")
    place = names.index(column) + 1
    first = Unit(1, _EMPTY, before=header.decode("utf-8", "replace").removesuffix("\n"))
    numbered = enumerate(lines, start=2)
    return chain([first], (_cell(line, number, place, maker) for number, line in numbered))


def _text(line: bytes, most: int) -> str:
    """The text of a line, without its newline.

    Raises:
        UnreadableText: the line is too long or not UTF-8.
    """
    if len(line) > most:
        raise UnreadableText("too_long", f"more than {most:,} bytes: split the line")
    try:
        return line.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UnreadableText("invalid_utf8", f"byte {error.start + 1} is not UTF-8") from None


class UnreadableText(Exception):
    """A line that is marked instead of decoded."""

    def __init__(self, status: str, message: str):
        super().__init__(message)
        self.status = status


def _line(line: bytes, number: int, maker: DocumentMaker) -> Unit:
    try:
        text = _text(line, LONGEST_DOCUMENT)
    except UnreadableText as problem:
        return Unit(number, _EMPTY, status=problem.status, message=str(problem))
    return Unit(number, maker.document(text))


def _cell(line: bytes, number: int, column: int, maker: DocumentMaker) -> Unit:
    has_markup = maker.options.markup is not None
    try:
        text = _text(line, LONGEST_MARKUP if has_markup else LONGEST_DOCUMENT)
    except UnreadableText as problem:
        return Unit(number, _EMPTY, status=problem.status, message=str(problem))
    ending = "\r" if text.endswith("\r") else ""
    cells = text.removesuffix("\r").split("\t")
    if len(cells) < column:
        if not text.strip():
            return Unit(number, _EMPTY, before=text)
        message = f"it has {len(cells)} columns, no column {column}: it is left unchanged"
        return Unit(number, _EMPTY, before=text, status="missing_column", message=message)
    before, after = "\t".join([*cells[: column - 1], ""]), "\t".join(["", *cells[column:]])
    cell = cells[column - 1]
    try:
        return Unit(number, maker.document(cell), before, after + ending)
    except TfexportError as problem:
        if not has_markup:
            raise
        return Unit(number, _EMPTY, before=text, status="invalid_markup", message=str(problem))


def _whole(lines: Iterable[bytes], maker: DocumentMaker) -> Unit:
    parts, size = [], 0
    for line in lines:
        parts.append(line)
        size += len(line)
        if size > LONGEST_MARKUP:
            raise TfexportError(
                f"the input has more than {LONGEST_MARKUP:,} bytes, the limit for one document with markup. Split it."
            )
    raw = b"".join(parts)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TfexportError(f"the input is not UTF-8, from byte {error.start + 1} on. Convert it.") from error
    return Unit(1, maker.document(text))
