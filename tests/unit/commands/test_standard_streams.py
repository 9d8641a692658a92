"""What a command does with a stdout that it cannot write to."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest
import typer

from tfexport.commands import standard_streams
from tfexport.commands.standard_streams import ClosedStdout, Stderr, guarded, printing
from tfexport.errors import TfexportError


@contextmanager
def unread(is_buffered: bool) -> Iterator[None]:
    """Stdout is a pipe that nobody reads from."""
    reading, writing = os.pipe()
    os.close(reading)
    with io.TextIOWrapper(open(writing, "wb"), write_through=not is_buffered) as file, redirect_stdout(file):
        yield


def say(code: int = 0) -> None:
    print("one")
    sys.stdout.flush()
    print("two")
    raise typer.Exit(code)


@pytest.mark.parametrize("is_buffered", [False, True])
def test_a_command_ends_as_by_sigpipe(is_buffered: bool) -> None:
    with unread(is_buffered), pytest.raises(SystemExit) as caught:
        printing(say)()
    assert caught.value.code == 141


@pytest.mark.parametrize("is_buffered", [False, True])
@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_code_of_a_comparison_is_its_verdict(is_buffered: bool, code: int) -> None:
    with unread(is_buffered), pytest.raises(typer.Exit) as caught:
        printing(say, verdict=True)(code)
    assert caught.value.exit_code == code


def test_another_pipe_that_breaks_is_not_stdout() -> None:
    def fail() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        printing(fail)()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
@pytest.mark.parametrize("verdict", [False, True])
def test_a_full_disk_is_told_of(monkeypatch: pytest.MonkeyPatch, verdict: bool) -> None:
    with open("/dev/full", "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with pytest.raises(TfexportError, match="cannot write to stdout: No space left on device"):
            printing(say, verdict=verdict)()


def test_a_command_that_needs_stdout_does_not_begin_without(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[object] = []

    def command(output: object = None) -> None:
        began.append(output)

    monkeypatch.setattr(sys, "stdout", ClosedStdout())
    for run, options in ((printing(command), {"output": "out"}), (printing(command, to_file=True), {})):
        with pytest.raises(TfexportError, match="stdout is closed"):
            run(**options)
    assert not began
    printing(command, to_file=True)(output="out")
    assert began == ["out"]


def test_closed_streams_are_replaced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    standard_streams.prepare()
    print("a note", file=sys.stderr)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "stdout", None)
    standard_streams.prepare()
    with pytest.raises(TfexportError, match="stdout is closed"):
        print("a result")


@pytest.mark.parametrize(("text", "written"), [("d\udcff", b"d\xff"), ("\u00fc", b"\\xfc"), ("\ud800", b"\\ud800")])
def test_paths_are_printed_as_their_bytes(monkeypatch: pytest.MonkeyPatch, text: str, written: bytes) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", file)
    standard_streams.prepare()
    print(text, end="", flush=True)
    assert raw.getvalue() == written


@pytest.mark.parametrize("is_buffered", [False, True])
def test_notes_that_nobody_reads_are_lost(is_buffered: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with io.TextIOWrapper(open(writing, "wb"), write_through=not is_buffered) as file, redirect_stderr(file):
        standard_streams.prepare()
        assert isinstance(sys.stderr, Stderr)
        for _ in range(2):
            print("a note", file=sys.stderr, flush=True)
            sys.stderr.writelines(["one\n", "two\n"])
        assert not sys.stderr.isatty()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
def test_notes_that_have_no_room_are_lost() -> None:
    with open("/dev/full", "w", encoding="utf-8") as file, redirect_stderr(file):
        standard_streams.prepare()
        print("a note", file=sys.stderr, flush=True)


def test_who_ends_by_itself_when_nobody_reads_ends_as_by_sigpipe() -> None:
    """As Typer does while it prints help."""

    def print_and_exit() -> None:
        try:
            print("help", flush=True)
        except BrokenPipeError:
            sys.exit(1)

    with unread(is_buffered=False), pytest.raises(SystemExit) as caught, guarded():
        print_and_exit()
    assert caught.value.code == 141


@pytest.mark.parametrize("code", [0, 1])
def test_a_verdict_within_another_block_is_the_exit_code(code: int) -> None:
    with unread(is_buffered=False), pytest.raises(typer.Exit) as caught, guarded():
        printing(say, verdict=True)(code)
    assert caught.value.exit_code == code


def test_within_another_block_a_closed_stdout_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", ClosedStdout())
    with pytest.raises(TfexportError, match="stdout is closed"), guarded():
        printing(say)()
