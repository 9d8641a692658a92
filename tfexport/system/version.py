"""The version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _installed


def version() -> str:
    """The installed version, as in `1.2.0`; `0+source` for a source tree that is not installed."""
    try:
        return _installed("tfexport")
    except PackageNotFoundError:
        return "0+source"
