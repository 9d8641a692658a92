"""Checks of requests in all protocols, before anything is decoded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfexport.errors import TfexportError
from tfexport.serving.catalog import Served

_BREAK = re.compile(r"[\r\n]")


def require_rows(served: Served, options: Mapping[str, Any]) -> None:
    """Raises TfexportError if a sentence would take more rows than a worker has.

    Args:
        options: the options of `SearchOptions` and of alignments from a client.
    """
    rows = served.translator.search_options(**options).rows
    if rows > served.slots:
        raise TfexportError(
            f"each sentence would take {rows} rows (beam or samples, times alternatives), and this server has "
            f"{served.slots}. Ask for fewer, or start it with more --slots."
        )


def require_one_line(**texts: str | Sequence[str] | None) -> None:
    """Raises TfexportError if a sentence has a line break. Models do not know line breaks: files have a sentence per line.

    Args:
        texts: sentences by the names of their fields. White space around them does not count.
    """
    for name, value in texts.items():
        several = [value] if isinstance(value, str) else value or []
        for number, text in enumerate(several):
            if _BREAK.search(text.strip()):
                called = name if isinstance(value, str) else f"{name}.{number}"
                raise TfexportError(
                    f"{called} has a line break, and a sentence is one line. Send a list of its lines, or use /translate, "
                    "which keeps line breaks."
                )
