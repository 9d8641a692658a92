"""Shards: ranges of rows of an input file. Each shard becomes one output file, whose name tells which rows it has.

A shard ends after `rows_per_shard` rows, after `MOST_BYTES`, or with a row group of Parquet. So the shards of a file depend
only on its content and on `rows_per_shard`, and a resumed run has the same shards as the run before.
"""

from __future__ import annotations

import io
import re
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tfexport.errors import TfexportError
from tfexport.scale.options import CorpusFormat
from tfexport.scale.storage import COMPRESSED, Place, Stamp

MOST_BYTES = 32 << 20
"""The number of bytes after which a shard ends."""
MOST_ROWS = 64
"""The largest number of rows of Parquet that are read at once."""
LONGEST_ROW = 1 << 30
"""The largest number of bytes in a line. A file with a longer line counts as a file without lines."""
RAW = "raw"
"""The column with the unparsed lines of a table."""
_NOT_TEXT = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh91AY&SY": "bz2",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
    b"PAR1\x15": "Parquet",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""Formats that must not be read as lines of text, by the first bytes of their files."""
_REMEDIES = {
    **{name: f"Give it a name that ends with {end}" for end, name in COMPRESSED.items()},
    "Parquet": "Give it a name that ends with .parquet",
    "UTF-16": "Write it in UTF-8",
}
"""The remedies for files of some of these formats. Files of other formats must be unpacked."""
_NAME = re.compile(r"part-(\d{5,})-(\d{12,})-(\d+)\.(?:parquet|jsonl|txt)")
_SUFFIX: dict[CorpusFormat, str] = {"parquet": "parquet", "jsonl": "jsonl", "text": "txt"}


@dataclass(frozen=True, order=True)
class Shard:
    """The rows [first, first + rows) of the input file number `file` of a run. All numbers count from 0."""

    file: int
    first: int
    rows: int

    def name(self, format: CorpusFormat) -> str:
        """The name of its output file. Names sort as rows do."""
        return f"part-{self.file:05d}-{self.first:012d}-{self.rows}.{_SUFFIX[format]}"

    @classmethod
    def parse(cls, name: str) -> Shard | None:
        """The shard of an output file; None for the name of any other file."""
        match = _NAME.fullmatch(name)
        return cls(*map(int, match.groups())) if match else None


@dataclass(frozen=True)
class Input:
    """An input file of a run."""

    place: Place
    format: CorpusFormat
    stamp: Stamp

    @classmethod
    def of(cls, place: Place) -> Input:
        """Raises: TfexportError: there is no such file."""
        stamp = place.stamp()
        if stamp is None:
            raise TfexportError(f"there is no file {place.uri} any more. Check the path.")
        return cls(place, format_of(place.name), stamp)

    def require_unchanged(self) -> None:
        """Raises: TfexportError: the file was changed since the start of the run."""
        if self.place.stamp() != self.stamp:
            raise TfexportError(
                f"{self.place.uri} was changed while it was read. Begin anew, in another folder, when it is complete."
            )

    def sha256(self, parts: Set[str] = frozenset()) -> str:
        """The sha256 of the file.

        Args:
            parts: the sha256 that finished parts recorded for this file.

        Raises:
            TfexportError: the file cannot be read, or finished parts were made of other content.
        """
        self.require_unchanged()
        try:
            sha256 = self.place.sha256()
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self, error) from error
        if parts - {sha256}:
            raise TfexportError(
                f"{self.place.uri} has other content than the finished parts were made of, with the same size and time. "
                "Restore it, or begin anew in another folder."
            )
        return sha256

    def require_columns(self, columns: Mapping[str, str]) -> None:
        """Check the columns that have the texts.

        Args:
            columns: the names of columns, by the flags that give them.

        Raises:
            TfexportError: the file cannot be read, or a column of Parquet is missing or has no text.
        """
        if self.format != "parquet":
            self._require_text()
            return
        try:
            with parquet.ParquetFile(self.place.path, filesystem=self.place.system) as file:
                schema = file.schema_arrow
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self, error) from error
        for flag, name in columns.items():
            count = schema.names.count(name)
            if not count:
                there = ", ".join(schema.names[:20]) + (" and others" if len(schema.names) > 20 else "")
                raise TfexportError(f"{self.place.uri} has no column {name!r}. Give {flag}: there are {there}.")
            if count > 1:
                raise TfexportError(f"{self.place.uri} has {count} columns {name!r}. Rename all but the one to read.")
            if not _is_text(schema.field(name).type):
                kind = schema.field(name).type
                raise TfexportError(f"the column {name!r} of {self.place.uri} has {kind}, no text. Give {flag}.")

    def _require_text(self) -> None:
        """Raises: TfexportError: the file cannot be read, or has a format or compression that its name does not tell."""
        if compression_of(self.place.name)[1] is not None:
            return
        try:
            with self.place.system.open_input_stream(self.place.path, compression=None) as file:
                kind = _kind_of_bytes(file.read(16))
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self, error) from error
        if kind is not None:
            what = _REMEDIES.get(kind, "Unpack it, or compress it with gzip")
            raise TfexportError(f"{self.place.uri} is {kind}, not text in UTF-8. {what}.")


def _kind_of_bytes(start: bytes) -> str | None:
    """The format of a file that starts with these bytes; None if it may be text."""
    return next((name for magic, name in _NOT_TEXT.items() if start.startswith(magic)), None)


def format_of(name: str) -> CorpusFormat:
    """The format of a file by its name: text if the name is not of Parquet or JSON lines."""
    name = name.lower().removesuffix(compression_of(name)[0])
    if name.endswith((".parquet", ".pq")):
        return "parquet"
    return "jsonl" if name.endswith((".jsonl", ".ndjson", ".json")) else "text"


def compression_of(name: str) -> tuple[str, str | None]:
    """The suffix of a file's name for its compression, and PyArrow's name of the compression; ("", None) without one."""
    return next(((end, kind) for end, kind in COMPRESSED.items() if name.lower().endswith(end)), ("", None))


def read_shards(
    source: Input, file: int, rows: int, done: Set[Shard] = frozenset()
) -> Iterator[tuple[Shard, pa.Table]]:
    """The shards of an input that are not done, in order, and one shard without rows whose `first` is the number of rows of
    the file. That shard is the first for Parquet, whose footer has the number of rows, else the last.

    Args:
        file: the number of the input among the inputs of the run.
        rows: the largest number of rows of a shard.
        done: the shards that are done, of all inputs.

    Raises:
        TfexportError: the file cannot be read, or was changed.
    """
    source.require_unchanged()
    first, end = 0, pa.table({})
    try:
        if source.format == "parquet":
            footer = parquet.read_metadata(source.place.path, filesystem=source.place.system)
            # Row groups are what is read: another total in the footer has no effect.
            yield Shard(file, sum(footer.row_group(group).num_rows for group in range(footer.num_row_groups)), 0), end
        for table in _tables(source, rows, sorted(shard for shard in done if shard.file == file)):
            shard = Shard(file, first, table if isinstance(table, int) else len(table))
            first += shard.rows
            if isinstance(table, int) or shard in done:
                continue
            source.require_unchanged()  # after reading: so the rows are of the file at the start of the run
            yield shard, table
    except (pa.ArrowException, OSError, EOFError) as error:
        source.require_unchanged()  # a better reason
        raise _unreadable(source, error) from error
    source.require_unchanged()
    if source.format != "parquet":
        yield Shard(file, first, 0), end


def _tables(source: Input, rows: int, done: list[Shard]) -> Iterator[pa.Table | int]:
    """The table of each shard; or its number of rows if it is done and need not be read."""
    if source.format == "parquet":
        yield from _row_groups(source, rows, done)
        return
    raw = source.place.system.open_input_stream(
        source.place.path, compression=compression_of(source.place.name)[1], buffer_size=1 << 20
    )
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
                yield from _slices(file, group, rows)
            first = last


def _slices(file: Any, group: int, rows: int) -> Iterator[pa.Table]:
    """Tables of at most `rows` rows of a row group. A table ends with the step of rows that fills `MOST_BYTES`.

    Bytes are counted in memory, because a file may store a text once that many rows have. So the first step reads one row.
    Each step reads at most twice the rows of the step before, and at most as many rows as `MOST_BYTES` would hold if all
    were as long as the rows of that step. Steps do not depend on the sizes of the library's batches.
    """
    batches = file.iter_batches(batch_size=1, row_groups=[group])
    waiting: deque[pa.RecordBatch] = deque()
    slices: list[pa.RecordBatch] = []
    n_rows = n_bytes = n_waiting = 0
    step = 1
    while True:
        wanted = min(step, rows - n_rows)
        while n_waiting < wanted:
            file.reader.set_batch_size(wanted - n_waiting)  # of the next batch
            if (batch := next(batches, None)) is None:
                break
            waiting.append(batch)
            n_waiting += len(batch)
        if not n_waiting:
            break
        wanted = min(wanted, n_waiting)
        n_rows, n_waiting = n_rows + wanted, n_waiting - wanted
        rest, size = wanted, 0
        while rest:
            batch = waiting.popleft()
            slices.append(batch.slice(0, rest))
            if len(batch) > rest:
                waiting.appendleft(batch.slice(rest))
            rest -= len(slices[-1])
            size += sum(map(_bytes_of, slices[-1].columns))
        n_bytes += size
        step = max(1, min(MOST_ROWS, 2 * wanted, MOST_BYTES * wanted // max(1, size)))
        if n_rows == rows or n_bytes >= MOST_BYTES:
            yield pa.Table.from_batches(slices)
            slices = []
            n_rows = n_bytes = 0
    if slices:
        yield pa.Table.from_batches(slices)


def _bytes_of(column: pa.Array) -> int:
    """The bytes of a slice's own rows. Slices share the values of a dictionary and the buffers of views."""
    kind = column.type
    if pa.types.is_string_view(kind):
        column = column.cast(pa.binary_view())
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        column = column.cast(pa.large_binary())
    if pa.types.is_struct(kind):
        return sum(map(_bytes_of, column.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return 4 * len(column) + _bytes_of(column.flatten())
    return int((column.indices if pa.types.is_dictionary(kind) else column).nbytes)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(test(kind) for test in (*tests, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view))


def _unreadable(source: Input, error: BaseException) -> TfexportError:
    about = " ".join(str(error).split())[:300].rstrip(".")
    return TfexportError(f"cannot read {source.place.uri} as {source.format}: {about}. Repair it, or leave it out.")


def gaps(parts: Set[Shard], totals: dict[int, int]) -> list[str]:
    """The rows of input files that are in no part or in several parts, in words.

    Args:
        parts: the parts of all input files.
        totals: the number of rows of each input file.
    """
    problems = []
    for file, rows in totals.items():
        expected = 0
        for shard in sorted(part for part in parts if part.file == file):
            if shard.first != expected:
                problems.append(f"input {file} has rows {expected} and {shard.first}, which do not meet")
            expected = shard.first + shard.rows
        if expected != rows:
            problems.append(f"input {file} has {rows} rows, its parts {expected}")
    return problems
