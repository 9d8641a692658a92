"""Stdout and stderr that are closed, full, or a pipe without a reader."""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, TypeVar, cast

from tfexport.errors import TfexportError

Command = TypeVar("Command", bound=Callable[..., Any])

BROKEN_PIPE = 141
"""The exit code if the reader of stdout has ended, as in `tfexport decode ... | head`: a shell's code for SIGPIPE."""


class ClosedStdout(io.TextIOBase):
    """A replacement for a closed stdout: Python would otherwise print nowhere, without an error."""

    def write(self, _: str) -> int:
        raise closed_error()


class Stdout(io.TextIOBase):
    """Stdout that remembers whether writing to it failed.

    Args:
        verdict: a pipe without a reader is not a failure.
    """

    def __init__(self, file: TextIO, *, verdict: bool = False):
        self._file, self._verdict = file, verdict
        self.failure: OSError | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._file.encoding

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    def reconfigure(self, **settings: Any) -> None:
        """As in `io.TextIOWrapper`."""
        self._file.reconfigure(**settings)  # type: ignore[attr-defined]

    def write(self, text: str) -> int:
        with self._noted():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with self._noted():
            self._file.flush()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._give_up()
            if self._verdict and isinstance(error, BrokenPipeError):
                return
            self.failure = error
            raise

    def _give_up(self) -> None:
        """Discard the buffer: Python would try to write it again at exit, and fail again."""
        _write_nowhere(self._file)

    def under(self) -> TextIO:
        """The file that it writes to."""
        return self._file


class Stderr:
    """Stderr that drops what it cannot write: a note that nobody can read does not end a command."""

    def __init__(self, file: TextIO):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with self._lost():
            self._file.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._lost():
            self._file.flush()

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            _write_nowhere(self._file)


def _write_nowhere(file: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def prepare() -> None:
    """Prepare stdout and stderr so that no output goes to a wrong file: call this before any file is opened.

    If stderr is closed, full or unread, notes are dropped. (Python would print them to stdout, or end the command.) A path
    that is not UTF-8 is printed as its bytes.
    """
    for descriptor in range(3):  # otherwise the next opened file gets this number, and the output of libraries
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    elif not isinstance(sys.stderr, Stderr):
        sys.stderr = cast(TextIO, Stderr(sys.stderr))
    if sys.stdout is None:
        sys.stdout = cast(TextIO, ClosedStdout())
    elif isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("tfexport-bytes", _as_bytes)
        sys.stdout.reconfigure(errors="tfexport-bytes")


def _as_bytes(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write a byte of a path as that byte, and a character that stdout's encoding lacks as `\\xNN`."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def closed_error() -> TfexportError:
    return TfexportError("stdout is closed. Redirect it to a file, or to /dev/null.")


@contextlib.contextmanager
def guarded(*, verdict: bool = False) -> Iterator[None]:
    """Print results in this block; they are flushed when it ends.

    A nested block writes directly to the underlying stdout, and handles its own errors.

    Raises:
        SystemExit: the reader of stdout has ended.
        TfexportError: the results cannot be written.
    """
    if isinstance(sys.stdout, ClosedStdout):
        yield
        return
    stdout = Stdout(sys.stdout.under() if isinstance(sys.stdout, Stdout) else sys.stdout, verdict=verdict)
    try:
        with contextlib.redirect_stdout(cast(TextIO, stdout)):
            try:
                yield
            finally:
                stdout.flush()
    except SystemExit:
        if isinstance(stdout.failure, BrokenPipeError):  # Typer would exit with 1
            raise SystemExit(BROKEN_PIPE) from None
        raise
    except OSError as error:
        if error is not stdout.failure:
            raise  # an error of another file
        if isinstance(error, BrokenPipeError):
            raise SystemExit(BROKEN_PIPE) from None
        raise TfexportError(f"cannot write to stdout: {error.strerror}. Make room, or write to a file.") from error


def printing(command: Command, *, to_file: bool = False, verdict: bool = False) -> Command:
    """The command, which reports a stdout that it cannot write to.

    Args:
        to_file: the command needs no stdout if it has an `output`.
        verdict: the exit code is the result of the command, even if nobody reads its output.
    """

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        if isinstance(sys.stdout, ClosedStdout) and not (to_file and options.get("output")):
            raise closed_error()
        with guarded(verdict=verdict):
            return command(*arguments, **options)

    return cast(Command, run)
