"""When progress is shown on stderr, and what it says."""

from __future__ import annotations

import io
import sys

import pytest

from tfexport.commands.console import with_progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("terminal", "shows_lines", "shows_parts"), [("both", False, True), ("stderr", True, True)])
def test_lines_on_a_terminal_hide_progress_and_parts_do_not(
    terminal: str, shows_lines: bool, shows_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal() if terminal == "both" else io.StringIO())
    monkeypatch.setattr(sys, "stderr", lines := Terminal())
    assert list(with_progress([1, 2], "decoding lines")) == [1, 2]
    monkeypatch.setattr(sys, "stderr", parts := Terminal())
    assert list(with_progress([1000, 200], "translating", rows=int)) == [1000, 200]
    assert ("decoding lines 2" in lines.getvalue()) == shows_lines
    assert ("translating: 1,200 rows in 2 parts" in parts.getvalue()) == shows_parts


def test_a_file_gets_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    assert list(with_progress([1], "translating", rows=int)) == [1]
    assert file.getvalue() == ""
