"""Markdown tables. This module imports nothing that a bare machine might lack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a table."""

    def line(cells: Sequence[Any]) -> str:
        return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"

    return [line(head), line(["---"] * len(head)), *map(line, rows)]


def spread_text(found: Mapping[str, float] | None, digits: int) -> str:
    """A median with its 10th and 90th percentile; empty where nothing was measured."""
    if found is None:
        return ""
    median, p10, p90 = (f"{found[key]:.{digits}f}" for key in ("median", "p10", "p90"))
    return f"{median} ({p10} to {p90})"
