"""The `tfexport` command, also as `python -m tfexport`: runs the command line and prints its errors."""

from __future__ import annotations

import signal
import sys

TYPE_CHECKING = False  # no import of typing: Ctrl-C prints a traceback until `main` runs
if TYPE_CHECKING:
    from typing import NoReturn

SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT")
"""The signals that end a command."""

LONGEST_MESSAGE = 8000
"""Maximum number of characters of an error message. It quotes names and values of a file, which may have any length."""

_EXTRAS = {"lightning": "train", "sacrebleu": "train", "onnxruntime": "cpu", "pyarrow": "ray", "ray": "ray"}
"""The extra to install for a missing module."""


def main() -> NoReturn:
    """Run the command line. Errors of tfexport become one line on stderr."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # While libraries are imported, Ctrl-C has nothing to undo or to report.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    import logging

    import tfexport.cli  # noqa: F401 (here, where Ctrl-C has nothing to undo)
    from tfexport.commands import standard_streams

    standard_streams.prepare()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        try:
            _let_signals_end()
            _run()
        finally:
            _let_signals_kill()
    except KeyboardInterrupt:  # Typer catches it only after it has made its parsers, which takes a while
        sys.exit(128 + signal.SIGINT)


def _run() -> NoReturn:
    import traceback

    from tfexport.cli import app_of
    from tfexport.commands import standard_streams
    from tfexport.commands.console import say
    from tfexport.system import ending

    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    try:
        with standard_streams.guarded():  # also for help
            app_of(arguments[0] if arguments else "")(arguments, standalone_mode=True)
    except BaseException as error:
        number = ending.taken()
        if isinstance(error, SystemExit) and number is not None:  # also if the signal was lost and the command went on
            sys.exit(128 + number)
        is_panic = type(error).__module__ == "pyo3_runtime"  # of a library in Rust
        if not isinstance(error, Exception) and not is_panic:
            raise
        # A library that is interrupted during its import raises an unrelated error.
        if number is not None and not debug:
            sys.exit(128 + number)
        if debug:
            traceback.print_exc()
        message, code = _explain(error)
        say(f"error: {_shortened(message)}")
        if example := getattr(error, "example", ""):
            say(example)
        sys.exit(code)
    sys.exit(0)


def _shortened(message: str) -> str:
    """A long message without its middle: the end says what to do."""
    half = LONGEST_MESSAGE // 2
    return message if len(message) <= LONGEST_MESSAGE else f"{message[:half]} ... {message[-half:]}"


def _let_signals_end() -> None:
    """Let signals end the command by an exception, which removes half-written files."""
    from tfexport.system import ending

    for name in SIGNALS:
        number = getattr(signal, name, None)  # Windows lacks some of them
        # `nohup`, and a shell that runs a background job, set signals to be ignored.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, ending.end)


def _let_signals_kill() -> None:
    """Restore the default action of signals. After the command nothing is left to undo, and Python would print an exception
    during its shutdown."""
    from tfexport.system import ending

    for name in SIGNALS:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is ending.end:
            signal.signal(number, signal.SIG_DFL)


def _explain(error: BaseException) -> tuple[str, int]:
    """The message of an error, in one line, and the exit code."""
    from tfexport.errors import DeviceMemoryError, TfexportError, words_of
    from tfexport.system.imports import is_out_of_memory

    text = words_of(error)
    if isinstance(error, DeviceMemoryError):
        return text, 2
    if is_out_of_memory(error):
        about = f": {text.rstrip('.')}" if text else ""  # Python's own error has no message
        return f"not enough memory{about}. Use a smaller --beam or --batch-size, or end other programs.", 2
    if isinstance(error, TfexportError):
        return text, 2
    if isinstance(error, ModuleNotFoundError):
        extra = _EXTRAS.get(error.name or "", "export")
        return f"this command needs {error.name}, which is not installed: pip install 'tfexport[{extra}]'.", 2
    if isinstance(error, ImportError):
        return f"a library is installed and cannot be imported: {text}. Install it again.", 2
    if isinstance(error, OSError):
        return f"{text}. Check the paths, permissions and room on the disk.", 2
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return "a path is not UTF-8, and a library takes no other. Rename the file, or a folder that it is in.", 2
    return f"{type(error).__name__}: {text}. This is a fault of tfexport: report it with what --debug shows.", 3


if __name__ == "__main__":
    main()
