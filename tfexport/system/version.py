"""The version of this package."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _installed


@cache  # it reads and parses a file, and every graph has it
def version() -> str:
    """The installed version, as in `1.2.0`; `0+source` for a source tree that is not installed."""
    try:
        return _installed("tfexport")
    except PackageNotFoundError:
        return "0+source"
