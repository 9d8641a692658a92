"""Shards whose worker ended: what was under way is known by empty files that were left.

A worker marks a shard before it decodes it, and removes the mark after that. A shard that was left twice is decoded row
by row, each marked. A row that was left three times is set aside.

tries/part-…/shard-5d01-9f3c       a try of the whole shard, by an actor of the driver 5d01
tries/part-…/row-17-5d01-9f3c      a try of row 17 of it alone

Only marks of the same driver count. Others were left when that driver was interrupted, so the row may be harmless.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tfexport.scale.row_function import Row, RowFunction
from tfexport.scale.storage import Place

WHOLE_TRIES = 2
"""Of a shard, before its rows are decoded one by one."""
ROW_TRIES = 3
"""Of a row alone."""


class Tries:
    """Those of a shard.

    Args:
        folder: which has its marks, and may be missing.
        driver: the name of the driver.
    """

    def __init__(self, folder: Place, driver: str):
        self._folder, self._driver = folder, driver
        names = [name for name in folder.names() if name.split("-")[-2:-1] == [driver]]
        self.whole = sum(name.startswith("shard-") for name in names)
        """Tries of the whole shard whose worker ended."""
        self.rows = Counter(int(name.split("-")[1]) for name in names if name.startswith("row-"))
        """Of single rows."""

    @contextmanager
    def mark(self, name: str) -> Iterator[None]:
        """Mark what is under way. An error removes the mark; what ends the process does not."""
        place = self._folder / f"{name}-{self._driver}-{secrets.token_hex(4)}"
        self._folder.make()
        place.mark()
        try:
            yield
        finally:
            place.remove()

    def remove(self) -> None:
        """Remove all marks."""
        self._folder.remove()


def rows_of(function: RowFunction, values: Sequence[object], place: str, tries: Tries) -> list[Row]:
    """The rows of a shard, without those that end their workers."""
    if tries.whole < WHOLE_TRIES:
        with tries.mark("shard"):
            return list(function.rows(values, place))
    aside = Row("worker_ended", f"the worker ended {ROW_TRIES} times while it decoded this row: see the log of Ray")
    rest = [aside if tries.rows[number] >= ROW_TRIES else value for number, value in enumerate(values)]
    rows: list[Row] = []
    decoded = function.rows(rest, place, singly=True)
    for number in range(len(rest)):
        with tries.mark(f"row-{number}"):
            rows.append(next(decoded))
    return rows
