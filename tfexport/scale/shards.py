"""Shards: ranges of rows of an input file. Each becomes one output file, and its name tells which rows it has.

A shard ends after `rows_per_shard` rows, after `MOST_BYTES`, or with a row group of Parquet. So the shards of a file
depend on its content and on `rows_per_shard` alone, and a run that goes on meets those of the run before.
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
"""Bytes of rows after which a shard ends."""
MOST_ROWS = 64
"""Rows of Parquet that are read at once, at most."""
LONGEST_ROW = 1 << 30
"""Bytes of a line after which the file is taken for one without lines."""
RAW = "raw"
"""The column of lines that are not parsed yet."""
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
"""First bytes of files that would be read as lines of nonsense, and the formats of these files."""
_REMEDIES = {
    **{name: f"Give it a name that ends with {end}" for end, name in COMPRESSED.items()},
    "Parquet": "Give it a name that ends with .parquet",
    "UTF-16": "Write it in UTF-8",
}
"""What to do with a file of a format. Others must be unpacked."""
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
        return cls(place, format_of(place.name), stamp)

    def require_unchanged(self) -> None:
        """Raises: TfexportError: the file is another than at the start of the run."""
        if self.place.stamp() != self.stamp:
            raise TfexportError(
                f"{self.place.uri} was changed while it was read. Begin anew, in another folder, when it is complete."
            )

    def sha256(self, parts: Set[str] = frozenset()) -> str:
        """The sha256 of the file.

        Args:
            parts: those of the files that finished parts were made of.

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
        """Check the columns, each by the flag that names it.

        Raises:
            TfexportError: it is Parquet that cannot be read, or has no text in one of them.
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
        """Raises: TfexportError: the file cannot be read, or its name does not tell its compression or format."""
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
    """The name of a format that a file with this start has; None if it may be text."""
    return next((name for magic, name in _NOT_TEXT.items() if start.startswith(magic)), None)


def format_of(name: str) -> CorpusFormat:
    """The format of a file by its name; what is neither Parquet nor JSON lines is text."""
    name = name.lower().removesuffix(compression_of(name)[0])
    if name.endswith((".parquet", ".pq")):
        return "parquet"
    return "jsonl" if name.endswith((".jsonl", ".ndjson", ".json")) else "text"


def compression_of(name: str) -> tuple[str, str | None]:
    """The end of a file's name that tells its compression, and the compression as PyArrow calls it; ("", None) for none."""
    return next(((end, kind) for end, kind in COMPRESSED.items() if name.lower().endswith(end)), ("", None))


def read_shards(
    source: Input, file: int, rows: int, done: Set[Shard] = frozenset()
) -> Iterator[tuple[Shard, pa.Table]]:
    """The shards of an input that are not `done`, in order. One has no rows, and tells where the file ends: the first one
    if the file is Parquet, whose footer has the rows of its row groups, else the last one.

    Args:
        file: its number among the inputs.
        rows: of a shard, at most.

    Raises:
        TfexportError: the file cannot be read, or was changed.
    """
    source.require_unchanged()
    first, end = 0, pa.table({})
    try:
        if source.format == "parquet":
            footer = parquet.read_metadata(source.place.path, filesystem=source.place.system)
            # What is read are the row groups: another number of rows in the footer has no effect.
            yield Shard(file, sum(footer.row_group(group).num_rows for group in range(footer.num_row_groups)), 0), end
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
    if source.format != "parquet":
        yield Shard(file, first, 0), end


def _tables(source: Input, rows: int, done: list[Shard]) -> Iterator[pa.Table | int]:
    """The rows of each shard; or their number, where they need not be read."""
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
    """Tables of at most `rows` rows of a row group. One ends with the step of rows that fills `MOST_BYTES`.

    The bytes are those in memory: the file may have one copy of a long text that stands in many rows. So the first step is
    a row, and each step has at most twice the rows of the one before it, and as many as fit by its bytes. Steps do not
    depend on how the library's batches come.
    """
    batches = file.iter_batches(batch_size=1, row_groups=[group])
    waiting: deque[pa.RecordBatch] = deque()
    found: list[pa.RecordBatch] = []
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
            found.append(batch.slice(0, rest))
            if len(batch) > rest:
                waiting.appendleft(batch.slice(rest))
            rest -= len(found[-1])
            size += sum(map(_bytes_of, found[-1].columns))
        n_bytes += size
        step = max(1, min(MOST_ROWS, 2 * wanted, MOST_BYTES * wanted // max(1, size)))
        if n_rows == rows or n_bytes >= MOST_BYTES:
            yield pa.Table.from_batches(found)
            found, n_rows, n_bytes = [], 0, 0
    if found:
        yield pa.Table.from_batches(found)


def _bytes_of(column: pa.Array) -> int:
    """The bytes of the rows of a slice, without what slices share: the words of a dictionary, the text of views."""
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
