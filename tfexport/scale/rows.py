"""The rows of a shard: reading their texts, and writing their results."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tfexport.scale.options import CorpusFormat
from tfexport.scale.row_function import ColumnType, Row, RowFunction, arrow_type, clear_of, joined, values_of
from tfexport.scale.shards import RAW, Shard
from tfexport.system.json_text import json_text

WHOLE = "input_json"
"""The column of Parquet that has the whole text of a JSON line. JSON lines have no schema."""


_NANOSECONDS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}


def texts(table: pa.Table, format: CorpusFormat, columns: Sequence[str]) -> list[object]:
    """The texts of a shard as a `RowFunction` takes them; a `Row` for a text that cannot be read."""
    if format == "parquet":
        return joined([values_of(table[column]) for column in columns])
    raw: list[bytes] = table[RAW].to_pylist()
    if format == "jsonl":
        return [_json_texts(line, columns) for line in raw]
    return [_stripped(line) if len(columns) == 1 else _split(_stripped(line), len(columns)) for line in raw]


def _split(line: bytes, columns: int) -> object:
    parts = tuple(line.split(b"\t"))
    if len(parts) == columns:
        return parts
    return Row("not_text", f"the line has {len(parts)} columns between tabs, not {columns}")


def _stripped(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r")


def _json_texts(line: bytes, columns: Sequence[str]) -> object:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return Row("invalid_utf8", f"byte {error.start + 1} is not UTF-8")
    record = _record(line)
    if isinstance(record, Row):
        return record
    return joined([[record.get(column)] for column in columns])[0]


def _record(line: bytes) -> dict[str, Any] | Row:
    """The JSON object of a line, or the `Row` of a line that cannot be read."""
    about = "the line is no JSON object"
    try:
        record = json.loads(line.decode("utf-8", "replace"), object_pairs_hook=_object)
        if isinstance(record, dict):
            return record
    except json.JSONDecodeError:
        pass
    except ValueError:  # the limit of Python for integers, 4,300 digits unless it was changed
        about = "a number of the line has too many digits"
    except RecursionError:
        about = "the line is nested too deeply"
    return Row("invalid_json", about)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Repeated names get numbers."""
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    return dict(zip(_apart([name for name, _ in pairs]), (value for _, value in pairs), strict=True))


def written(
    shard: Shard,
    table: pa.Table,
    rows: Sequence[Row],
    function: RowFunction,
    *,
    source: CorpusFormat,
    output: CorpusFormat,
) -> bytes:
    """The content of the output file of a shard.

    Parquet and JSON may repeat a name in a table or in a record. An output object then has the second value of `k` as
    `k_2` and the third as `k_3`; names that exist already are skipped.

    Args:
        table: the rows of the shard.
        rows: their results.
        function: the function that computed the results.
        source: the format of the input.
        output: the format of the output.
    """
    if output == "text":
        return "".join(f"{function.line(row)}\n" for row in rows).encode("utf-8", "replace")
    ids = [f"{shard.file}:{shard.first + number}" for number in range(shard.rows)]
    added = {"id": ids, **function.columns(rows)}
    if output == "jsonl":
        return _json_lines(added, _records(table, source, function.reads))
    if source == "text":
        lines = _text_columns(table[RAW].to_pylist(), function.reads)
        table = pa.table({name: pa.array(values, pa.large_string()) for name, values in lines.items()})
    elif source == "jsonl":
        whole = [_plain_text(line) for line in table[RAW].to_pylist()]
        table = pa.table({WHOLE: pa.array(whole, pa.large_string())})
    return _parquet(table, added, {"id": str, **function.added})


def _json_lines(added: dict[str, list[Any]], records: Sequence[dict[str, Any]]) -> bytes:
    lines = []
    for number, own in enumerate(records):
        record = {name: values[number] for name, values in added.items()}
        record |= {clear_of(name, (*added, *own)) if name in added else name: value for name, value in own.items()}
        lines.append(_json_bytes(record))
    return b"".join(lines)


def _records(table: pa.Table, source: CorpusFormat, reads: Sequence[str]) -> list[dict[str, Any]]:
    if source == "parquet":
        table = table.rename_columns(_apart(table.column_names))
        with suppress(pa.ArrowException, ValueError, OverflowError):  # of one value, which must not end the run
            if not any(_has_times(field.type) for field in table.schema):
                return [_plain(record) for record in table.to_pylist()]
        named = list(zip(table.column_names, table.columns, strict=True))
        return [{name: _value(column[row]) for name, column in named} for row in range(len(table))]
    raw: list[bytes] = table[RAW].to_pylist()
    if source == "text":
        columns = _text_columns(raw, reads)
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    records = [_record(line) for line in raw]
    return [
        {WHOLE: _plain_text(line)} if isinstance(record, Row) else record
        for line, record in zip(raw, records, strict=True)
    ]


def _has_times(kind: pa.DataType) -> bool:
    """Whether a type has times of day. Python has no nanoseconds, and no times after 24 hours."""
    if pa.types.is_dictionary(kind):
        return _has_times(kind.value_type)
    return pa.types.is_time(kind) or any(_has_times(kind.field(number).type) for number in range(kind.num_fields))


def _time(value: pa.Time32Scalar | pa.Time64Scalar) -> str | int:
    """A time of day as text; its number in Arrow if it is not within a day."""
    nanoseconds = value.value * _NANOSECONDS[value.type.unit]
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    if not 0 <= seconds < 24 * 60 * 60:
        return int(value.value)
    whole = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{whole}.{rest:09}".removesuffix("000") if rest else whole


def _apart(names: Sequence[str]) -> list[str]:
    """Different names: repeated names get numbers. In a dictionary, only the last value of a repeated name would remain."""
    before, different = set(names), dict[str, None]()
    numbers: dict[str, int] = {}
    for name in names:
        number, own = numbers.get(name, 1), name
        while own in different or (own != name and own in before):
            number += 1
            own = f"{name}_{number}"
        numbers[name] = number
        different[own] = None
    return list(different)


def _text_columns(raw: Sequence[bytes], reads: Sequence[str]) -> dict[str, list[str | None]]:
    """The columns of lines of text. A line with another number of columns than the function reads is in the first column."""
    lines = [_plain_text(line) for line in raw]
    if len(reads) == 1:
        return {"text": list(lines)}
    split = [parts if len(parts := line.split("\t")) == len(reads) else [line] for line in lines]
    return {name: [parts[n] if n < len(parts) else None for parts in split] for n, name in enumerate(reads)}


def _plain_text(line: bytes) -> str:
    return _stripped(line).decode("utf-8", "replace")


def _json_bytes(record: dict[str, Any]) -> bytes:
    try:
        return f"{json_text(record, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON can only write as an escape
        return f"{json_text(record)}\n".encode()


def _plain(value: Any) -> Any:
    """A Python value of Arrow as a JSON value: dates and decimals as text, bytes in base64."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _value(value: pa.Scalar) -> Any:
    """A scalar of Arrow as a JSON value, also if Python has no such value.

    Text that is not UTF-8 gets replacement characters. A date or time that Python cannot represent becomes its number in
    Arrow.
    """
    if not value.is_valid:
        return None
    with suppress(pa.ArrowException, ValueError, OverflowError):
        if not _has_times(value.type):
            return _plain(value.as_py())
    if isinstance(value, pa.StringScalar):
        return value.as_buffer().to_pybytes().decode("utf-8", "replace")
    if isinstance(value, pa.Time32Scalar | pa.Time64Scalar):
        return _time(value)
    if isinstance(value, pa.StructScalar):
        names = _apart([field.name for field in value.type])
        return {name: _value(value[n]) for n, name in enumerate(names)}
    if isinstance(value, pa.MapScalar):
        return [[_value(entry[0]), _value(entry[1])] for entry in value.values]
    if isinstance(value, pa.ListScalar):
        return [_value(inner) for inner in value.values]
    return _value(value.value) if isinstance(value.value, pa.Scalar) else value.value


def _parquet(table: pa.Table, added: dict[str, list[Any]], types: Mapping[str, ColumnType]) -> bytes:
    names = table.column_names
    kept = [clear_of(name, (*added, *names)) if name in added else name for name in names]
    arrays = {name: pa.array(_encodable(values), arrow_type(types[name])) for name, values in added.items()}
    fields = [pa.field(name, array.type) for name, array in arrays.items()]
    fields += [field.with_name(name) for field, name in zip(table.schema, kept, strict=True)]
    # Without the metadata of the schema: it often lists the columns of the input, and Spark and pandas read only those.
    whole = pa.Table.from_arrays([*arrays.values(), *table.columns], schema=pa.schema(fields))
    sink = pa.BufferOutputStream()
    parquet.write_table(whole, sink, compression="zstd")
    return bytes(sink.getvalue())


def _encodable(values: list[Any]) -> list[Any]:
    return [value.encode("utf-8", "replace").decode() if isinstance(value, str) else value for value in values]
