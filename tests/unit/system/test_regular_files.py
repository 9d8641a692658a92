"""Files that are read whole: nothing waits for a pipe, and no device is read for ever."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tfexport.system import regular_files
from tfexport.system.regular_files import open_regular, read_bytes, read_text, require_regular

READERS = [open_regular, read_bytes, read_text, require_regular]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no such files")


@pytest.mark.parametrize("read", READERS)
def test_a_pipe_and_a_device_are_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(OSError, match="not a regular file"):
            read(path)
    with pytest.raises(OSError, match=r"directory|not a regular file"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing")


def test_files_are_read_also_through_links(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\n")
    link.symlink_to(path)
    require_regular(link)
    assert read_bytes(link) == b"\xef\xbb\xbfa\r\nb\n"
    assert read_text(link, "utf-8-sig") == "a\nb\n"


def test_a_text_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_files, "LARGEST_TEXT", 2)
    (tmp_path / "file").write_bytes(b"abc")
    with pytest.raises(OSError, match="too many for such a file"):
        read_text(tmp_path / "file")
