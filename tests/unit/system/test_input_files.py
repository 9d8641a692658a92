"""Lines of any length are read in little memory, and a line that never ends ends the reading."""

from __future__ import annotations

import io
import os
import threading
from codecs import BOM_UTF8
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from tfexport.errors import TfexportError
from tfexport.system import input_files
from tfexport.system.input_files import LONGEST_LINE, Lines, opened


class Endless(io.RawIOBase):
    """Zeros without an end, as of /dev/zero."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        buffer[:] = bytes(len(buffer))
        return len(buffer)


def lines_of(content: bytes) -> list[bytes]:
    return list(Lines(io.BytesIO(content), "it"))


@pytest.mark.parametrize("content", [b"", b"\n", b"a\n\nb", b"a\r\nb\n", b"\0\n\xff\n", b"a\rb\x85c\n"])
def test_lines_are_those_of_the_file(content: bytes) -> None:
    assert lines_of(content) == list(io.BytesIO(content))


@pytest.mark.parametrize("beyond", [-1, 0, 1, 2, 1 << 16, (1 << 16) + 1])
@pytest.mark.parametrize("end", [b"", b"\n", b"\nnext", b"\nnext\n"])
def test_what_is_longer_than_the_longest_line_is_cut_where_its_length_shows_it(beyond: int, end: bytes) -> None:
    content = b"a" * (LONGEST_LINE + beyond)
    first, *rest = lines_of(content + end)
    if beyond > 0:
        assert first == content[: LONGEST_LINE + 1]
    else:
        assert first == (content + end).partition(b"\n")[0] + (
            b"\n" if end and len(content) < LONGEST_LINE + 1 else b""
        )
    assert rest == list(io.BytesIO(end[1:]))


@pytest.mark.parametrize("content", [b"", b"\n", b"\nb\n", b"a\n", BOM_UTF8 + b"a\n" + BOM_UTF8])
def test_a_byte_order_mark_at_the_start_of_a_file_is_not_part_of_its_text(content: bytes) -> None:
    assert lines_of(BOM_UTF8 + content) == (list(io.BytesIO(content)) or [b""])
    lines = Lines(io.BytesIO(BOM_UTF8 + content), "it")
    lines.keeps_mark = True
    assert list(lines) == list(io.BytesIO(BOM_UTF8 + content))


@pytest.mark.parametrize("beyond", [0, 1, 2, 3, 4])
def test_a_long_line_after_a_byte_order_mark_shows_its_length(beyond: int) -> None:
    content = b"a" * (LONGEST_LINE + beyond)
    first, second = lines_of(BOM_UTF8 + content + b"\nb")
    assert (len(first.rstrip()), second) == (min(LONGEST_LINE + 1, len(content)), b"b")


def test_a_line_without_an_end_is_given_and_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "ENDLESS_LINE", 1 << 21)
    lines = Lines(cast(BinaryIO, io.BufferedReader(Endless())), "zeros")
    assert len(next(lines)) == LONGEST_LINE + 1
    with pytest.raises(TfexportError, match="line 1 of zeros has more than 2 MiB"):
        next(lines)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_lines_come_from_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=[b"a\nb\n"])
    writer.start()
    with opened(pipe) as lines:
        assert list(lines) == [b"a\n", b"b\n"]
        assert not lines.isatty()
    writer.join()
