"""Shards: ranges of rows of an input file. Each becomes one output file, and its name tells which rows it has.

A shard ends after `rows_per_shard` rows, after `MOST_BYTES`, or with a row group of Parquet. So the shards of a file
depend on its content and on `rows_per_shard` alone, and a run that goes on meets those of the run before.
"""

from __future__ import annotations

import io
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tfexport.errors import TfexportError
from tfexport.scale.options import CorpusFormat
from tfexport.scale.storage import COMPRESSED, Place, Stamp

MOST_BYTES = 32 << 20
"""Bytes of rows after which a shard ends."""
LONGEST_ROW = 1 << 30
"""Bytes of a line after which the file is taken for one without lines."""
RAW = "raw"
"""The column of lines that are not parsed yet."""
_NAME = re.compile(r"part-(\d{5,})-(\d{12,})-(\d+)\.(?:parquet|jsonl|txt)")
_SUFFIX: dict[CorpusFormat, str] = {"parquet": "parquet", "jsonl": "jsonl", "text": "txt"}


@dataclass(frozen=True, order=True)
class Shard:
    """The rows [first, first + rows) of an input file, of which `file` is the number among the inputs of the run."""

    file: int
    first: int
    rows: int

    def name(self, format: CorpusFormat) -> str:
        """Of its output file. Names sort as the rows do."""
        return f"part-{self.file:05d}-{self.first:012d}-{self.rows}.{_SUFFIX[format]}"

    @classmethod
    def parse(cls, name: str) -> Shard | None:
        """The shard of an output file; None for another file."""
        found = _NAME.fullmatch(name)
        return cls(*map(int, found.groups())) if found else None


@dataclass(frozen=True)
class Input:
    """A file that is read."""

    place: Place
    format: CorpusFormat
    stamp: Stamp

    @classmethod
    def of(cls, place: Place) -> Input:
        """Raises: TfexportError: there is no such file."""
        stamp = place.stamp()
        if stamp is None:
            raise TfexportError(f"there is no file {place.uri} any more. Check the path.")
        return cls(place, format_of(place.uri), stamp)

    def require_unchanged(self) -> None:
        """Raises: TfexportError: the file is another than at the start of the run."""
        if self.place.stamp() != self.stamp:
            raise TfexportError(
                f"{self.place.uri} was changed while it was read. Begin anew, in another folder, when it is complete."
            )

    def require_columns(self, columns: Mapping[str, str]) -> None:
        """Check the columns, each by the flag that names it.

        Raises:
            TfexportError: it is Parquet that cannot be read, or has no text in one of them.
        """
        if self.format != "parquet":
            return
        try:
            with parquet.ParquetFile(self.place.path, filesystem=self.place.system) as file:
                schema = file.schema_arrow
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self, error) from error
        for flag, name in columns.items():
            if schema.names.count(name) != 1:
                there = ", ".join(schema.names[:20])
                raise TfexportError(f"{self.place.uri} has no column {name!r}. Give {flag}: there are {there}.")
            if not _is_text(schema.field(name).type):
                kind = schema.field(name).type
                raise TfexportError(f"the column {name!r} of {self.place.uri} has {kind}, no text. Give {flag}.")


def format_of(uri: str) -> CorpusFormat:
    """By the extension; what is neither Parquet nor JSON lines is text."""
    name = uri.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    if name.endswith((".parquet", ".pq")):
        return "parquet"
    return "jsonl" if name.endswith((".jsonl", ".ndjson", ".json")) else "text"


def read_shards(
    source: Input, file: int, rows: int, done: Set[Shard] = frozenset()
) -> Iterator[tuple[Shard, pa.Table]]:
    """The shards of an input that are not `done`, in order; the last has no rows, and tells where the file ends.

    Args:
        file: its number among the inputs.
        rows: of a shard, at most.

    Raises:
        TfexportError: the file cannot be read, or was changed.
    """
    source.require_unchanged()
    first = 0
    try:
        for table in _tables(source, rows, sorted(one for one in done if one.file == file)):
            shard = Shard(file, first, table if isinstance(table, int) else len(table))
            first += shard.rows
            if isinstance(table, int) or shard in done:
                continue
            source.require_unchanged()  # after reading: what comes out is of the file that was there at the start
            yield shard, table
    except (pa.ArrowException, OSError, EOFError) as error:
        source.require_unchanged()  # a better reason
        raise _unreadable(source, error) from error
    source.require_unchanged()
    yield Shard(file, first, 0), pa.table({})


def _tables(source: Input, rows: int, done: list[Shard]) -> Iterator[pa.Table | int]:
    """The rows of each shard; or their number, where they need not be read."""
    if source.format == "parquet":
        yield from _row_groups(source, rows, done)
        return
    raw = source.place.system.open_input_stream(source.place.path, compression="detect", buffer_size=1 << 20)
    with raw, io.BufferedReader(raw, 1 << 20) as lines:
        waiting: list[bytes] = []
        size = 0
        is_first = True
        while line := lines.readline(LONGEST_ROW + 1):
            if len(line) > LONGEST_ROW:
                raise TfexportError(f"{source.place.uri} has a line of more than 1 GiB. Give one text per line.")
            waiting.append(line.removeprefix(BOM_UTF8) if is_first else line)
            is_first = False
            size += len(line)
            if len(waiting) == rows or size >= MOST_BYTES:
                yield _lines(waiting)
                waiting, size = [], 0
        if waiting:
            yield _lines(waiting)


def _lines(lines: list[bytes]) -> pa.Table:
    return pa.table({RAW: pa.array(lines, pa.large_binary())})


def _row_groups(source: Input, rows: int, done: list[Shard]) -> Iterator[pa.Table | int]:
    with parquet.ParquetFile(source.place.path, filesystem=source.place.system, pre_buffer=False) as file:
        first = 0
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)
            last = first + about.num_rows
            within = [shard for shard in done if first <= shard.first < last]
            if about.num_rows and sum(shard.rows for shard in within) == about.num_rows:
                yield from (shard.rows for shard in within)
            elif about.num_rows:
                size = max(1, min(rows, MOST_BYTES * about.num_rows // max(1, about.total_byte_size)))
                yield from _slices(file, group, size)
            first = last


def _slices(file: Any, group: int, size: int) -> Iterator[pa.Table]:
    """Tables of `size` rows of a row group, however the library's batches come."""
    waiting: list[pa.RecordBatch] = []
    for batch in file.iter_batches(batch_size=size, row_groups=[group]):
        waiting.append(batch)
        table = pa.Table.from_batches(waiting)
        while len(table) >= size:
            yield table.slice(0, size)
            table = table.slice(size)
        waiting = table.to_batches() if len(table) else []
    if waiting:
        yield pa.Table.from_batches(waiting)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(test(kind) for test in (*tests, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view))


def _unreadable(source: Input, error: BaseException) -> TfexportError:
    about = " ".join(str(error).split())[:300].rstrip(".")
    return TfexportError(f"cannot read {source.place.uri} as {source.format}: {about}. Repair it, or leave it out.")


def gaps(parts: Set[Shard], totals: dict[int, int]) -> list[str]:
    """What of the files, with so many rows each, has no part or several, in words."""
    problems = []
    for file, rows in totals.items():
        expected = 0
        for shard in sorted(one for one in parts if one.file == file):
            if shard.first != expected:
                problems.append(f"input {file} has rows {expected} and {shard.first}, which do not meet")
            expected = shard.first + shard.rows
        if expected != rows:
            problems.append(f"input {file} has {rows} rows, its parts {expected}")
    return problems
