"""The `tfexport` command, also as `python -m tfexport`: runs the command line and tells of its errors."""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from typing import NoReturn

from tfexport.cli import app
from tfexport.console import say
from tfexport.errors import TfexportError


def main() -> NoReturn:
    """Run the command line; errors of ours become one line on stderr."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    # So that these, too, remove half-written files on their way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        app(arguments, standalone_mode=True)
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = _explain(error)
        say(f"error: {message}")
        sys.exit(code)
    sys.exit(0)


def _explain(error: Exception) -> tuple[str, int]:
    """What to tell of an error, in one line, and the exit code."""
    text = " ".join(str(error).split())
    if isinstance(error, TfexportError):
        return text, 2
    if isinstance(error, ModuleNotFoundError):
        extra = {"lightning": "train", "sacrebleu": "train", "onnxruntime": "cpu"}.get(error.name or "", "export")
        return f"this command needs {error.name}, which is not installed: pip install 'tfexport[{extra}]'.", 2
    if isinstance(error, MemoryError):
        return f"not enough memory: {text}. Use a smaller --beam or --batch-size.", 2
    if isinstance(error, OSError):
        return f"{text}. Check the paths, permissions and room on the disk.", 2
    return f"{type(error).__name__}: {text}. This is a fault of tfexport: report it with what --debug shows.", 3


if __name__ == "__main__":
    main()
