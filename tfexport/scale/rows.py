"""Rows of a shard: their texts, and what is written of them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tfexport.scale.options import CorpusFormat
from tfexport.scale.shards import RAW, Shard
from tfexport.scale.translator import Row, arrow_type, clear_of, columns
from tfexport.system.json_text import json_text

ADDED = ("id", "text", "status", "message", "score", "nbest")
"""What is written of each row beside the columns of the input."""
WHOLE = "input_json"
"""In Parquet the column that has a row of JSON lines as it is: these have no schema."""


def texts(table: pa.Table, format: CorpusFormat, column: str) -> list[object]:
    """The texts of a shard as `Translator.translate` takes them; a `Row` for one that cannot be had."""
    if format == "parquet":
        return _column(table, column)
    raw: list[bytes] = table[RAW].to_pylist()
    return [_stripped(line) for line in raw] if format == "text" else [_json_text(line, column) for line in raw]


def _column(table: pa.Table, name: str) -> list[object]:
    found = table[name]
    if pa.types.is_dictionary(found.type):
        found = found.cast(found.type.value_type)
    if pa.types.is_null(found.type):
        return [None] * len(found)
    # As bytes: damaged files have strings that are not UTF-8. Each kind of strings has its own kind of bytes.
    kinds = {pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view(), pa.string(): pa.binary()}
    return list(found.cast(kinds.get(found.type, found.type)).to_pylist())


def _stripped(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r")


def _json_text(line: bytes, column: str) -> object:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return Row("invalid_utf8", f"byte {error.start + 1} is not UTF-8")
    record = _record(line)
    return record.get(column) if record is not None else Row("invalid_json", "the line is no JSON object")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def written(
    shard: Shard, table: pa.Table, rows: Sequence[Row], *, source: CorpusFormat, output: CorpusFormat, several: bool
) -> bytes:
    """The output file of a shard.

    Args:
        source: format of the input.
        several: rows have several hypotheses.
    """
    if output == "text":
        lines = ("\t".join(_one_line(one.text) for one in row.hypotheses) for row in rows)
        return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
    ids = [f"{shard.file}:{shard.first + number}" for number in range(shard.rows)]
    added = {"id": ids, **columns(rows, several=several)}
    return _json_lines(table, added, source) if output == "jsonl" else _parquet(table, added, source)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines()) if not text.isprintable() else text


def _json_lines(table: pa.Table, added: dict[str, list[Any]], source: CorpusFormat) -> bytes:
    lines = []
    for number, own in enumerate(_records(table, source)):
        record = {name: values[number] for name, values in added.items()}
        record |= {clear_of(name, (*ADDED, *own)) if name in ADDED else name: value for name, value in own.items()}
        lines.append(_json_bytes(record))
    return b"".join(lines)


def _records(table: pa.Table, source: CorpusFormat) -> list[dict[str, Any]]:
    if source == "parquet":
        return [_plain(record) for record in table.to_pylist()]
    raw: list[bytes] = table[RAW].to_pylist()
    if source == "text":
        return [{"text": _plain_text(line)} for line in raw]
    records = [_record(line) for line in raw]
    return [{WHOLE: _plain_text(line)} if found is None else found for line, found in zip(raw, records, strict=True)]


def _plain_text(line: bytes) -> str:
    return _stripped(line).decode("utf-8", "replace")


def _json_bytes(record: dict[str, Any]) -> bytes:
    try:
        return f"{json_text(record, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON can only write as an escape
        return f"{json_text(record)}\n".encode()


def _plain(value: Any) -> Any:
    """A value of Arrow as JSON has it: dates and decimals as text, bytes in base64."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _parquet(table: pa.Table, added: dict[str, list[Any]], source: CorpusFormat) -> bytes:
    if source != "parquet":
        raw = [_plain_text(line) for line in table[RAW].to_pylist()]
        table = pa.table({"text" if source == "text" else WHOLE: pa.array(raw, pa.large_string())})
    kept = [clear_of(name, (*ADDED, *table.column_names)) if name in ADDED else name for name in table.column_names]
    arrays = {name: pa.array(_encodable(values), arrow_type(name)) for name, values in added.items()}
    columns = [*arrays.items(), *zip(kept, table.columns, strict=True)]
    whole = pa.Table.from_arrays([array for _, array in columns], names=[name for name, _ in columns])
    sink = pa.BufferOutputStream()
    parquet.write_table(whole, sink, compression="zstd")
    return bytes(sink.getvalue())


def _encodable(values: list[Any]) -> list[Any]:
    return [value.encode("utf-8", "replace").decode() if isinstance(value, str) else value for value in values]
