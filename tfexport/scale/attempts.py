"""Attempts to decode a shard. Empty marker files show which attempts ended with their worker.

A worker creates a marker before it decodes, and removes it afterwards. If two attempts at a whole shard have left their
markers, its rows are decoded one by one, each with a marker of its own. If three attempts at a row have left theirs, the row
gets the status `worker_ended`, and is not decoded again.

attempts/part-…/shard-5d01-9f3c       an attempt at the whole shard, by an actor of the driver 5d01
attempts/part-…/row-17-5d01-9f3c      an attempt at row 17 alone

Only markers of the same driver count. Markers of another driver are left when that driver is interrupted, so their rows may
be harmless.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tfexport.scale.row_function import Row, RowFunction
from tfexport.scale.storage import Place

SHARD_ATTEMPTS = 2
"""The number of attempts at a whole shard, before its rows are decoded one by one."""
ROW_ATTEMPTS = 3
"""The number of attempts at a single row."""


class Attempts:
    """The attempts at a shard that ended with their worker.

    Args:
        folder: the folder of the shard's markers. It may be missing.
        driver: the name of the driver.
    """

    def __init__(self, folder: Place, driver: str):
        self._folder, self._driver = folder, driver
        names = [name for name in folder.names() if name.split("-")[-2:-1] == [driver]]
        self.shard = sum(name.startswith("shard-") for name in names)
        """The number of attempts at the whole shard."""
        self.rows = Counter(int(name.split("-")[1]) for name in names if name.startswith("row-"))
        """The number of attempts at each row alone."""

    @contextmanager
    def mark(self, name: str) -> Iterator[None]:
        """Keep a marker during an attempt. An exception removes the marker too; the end of the process leaves it."""
        marker = self._folder / f"{name}-{self._driver}-{secrets.token_hex(4)}"
        self._folder.make()
        marker.mark()
        try:
            yield
        finally:
            marker.remove()

    def remove(self) -> None:
        """Remove all markers of the shard."""
        self._folder.remove()


def rows_of(function: RowFunction, values: Sequence[object], position: str, attempts: Attempts) -> list[Row]:
    """The rows of a shard, without decoding rows that end their workers.

    Args:
        values: the values of the shard, as for `RowFunction.rows`.
        position: the position of the shard in the corpus.
    """
    if attempts.shard < SHARD_ATTEMPTS:
        with attempts.mark("shard"):
            return list(function.rows(values, position))
    aside = Row("worker_ended", f"the worker ended {ROW_ATTEMPTS} times while it decoded this row: see the log of Ray")
    rest = [aside if attempts.rows[number] >= ROW_ATTEMPTS else value for number, value in enumerate(values)]
    rows: list[Row] = []
    decoded = function.rows(rest, position, singly=True)
    for number in range(len(rest)):
        with attempts.mark(f"row-{number}"):
            rows.append(next(decoded))
    return rows
