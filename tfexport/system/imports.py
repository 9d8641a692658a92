"""Errors of libraries that are imported on demand."""

from __future__ import annotations

import errno
from typing import Any

from tfexport.errors import RuntimeUnavailable, words_of

_OUT_OF_MEMORY = (
    *("cannot allocate memory", "can't allocate memory", "failed to allocate memory", "bad_alloc", "bad allocation"),
    *("failed to map segment", "can't start new thread"),
)
"""Messages of the system, the dynamic loader, PyTorch and ONNX Runtime about a lack of memory, other than MemoryError."""


def import_failure(error: ImportError, library: str, absent: str) -> Exception:
    """The error to raise after the import of `library` raised `error`.

    Returns:
        RuntimeUnavailable with the message `absent` if the library is not installed, or with the problem if it is.
        MemoryError if there is not enough memory for it.
    """
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == library:
        return RuntimeUnavailable(absent)
    if is_out_of_memory(error):
        return MemoryError(f"{library} cannot be loaded")
    return RuntimeUnavailable(f"{library} is installed and cannot be imported: {words_of(error)}. Install it again.")


def figure_class(absent: str) -> Any:
    """The class `matplotlib.figure.Figure`. Commands ask for it before the long work whose result it draws.

    Raises:
        RuntimeUnavailable: matplotlib is not installed; `absent` is the message.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise import_failure(error, "matplotlib", absent) from error
    return Figure


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, reports a lack of memory, regardless of its type."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if any(sign in words_of(error).lower() for sign in _OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False
