"""Rows: what is marked, and what is written beside the columns of the input."""

from __future__ import annotations

import io
import json
import time
from codecs import BOM_UTF8
from types import SimpleNamespace
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install 'tfexport[ray]'")

from pyarrow import parquet  # noqa: E402

from tfexport.scale.options import CorpusFormat  # noqa: E402
from tfexport.scale.row_function import Row, RowFunction, clear_of, lines_of, marked_row  # noqa: E402
from tfexport.scale.rows import texts, written  # noqa: E402
from tfexport.scale.shards import RAW, Shard  # noqa: E402
from tfexport.scale.translator import Scored, Translator  # noqa: E402
from tfexport.search.options import SearchOptions  # noqa: E402


def ok(*said: str) -> Row:
    return Row("ok", "", tuple(Scored(text, -0.5) for text in said))


def function(*, several: bool = False) -> RowFunction:
    """A translator that has loaded nothing."""
    made = Translator.__new__(Translator)
    made.reads = ("text",)
    job: Any = SimpleNamespace(setup=SimpleNamespace(search=SearchOptions(beam=4, nbest=1 + several)))
    made._job = job
    return made


def lines(*given: bytes) -> Any:
    return pa.table({RAW: pa.array(given, pa.large_binary())})


def json_rows(table: Any, rows: list[Row], source: CorpusFormat, *, several: bool = False) -> list[Any]:
    content = written(Shard(2, 10, len(rows)), table, rows, function(several=several), source=source, output="jsonl")
    return [json.loads(line) for line in content.splitlines()]


def parquet_rows(table: Any, rows: list[Row], source: CorpusFormat) -> Any:
    content = written(Shard(2, 10, len(rows)), table, rows, function(several=True), source=source, output="parquet")
    return parquet.read_table(io.BytesIO(content))


def statuses(found: list[object]) -> list[str | None]:
    return [row.status if (row := marked_row(value)) else None for value in found]


def test_rows_are_read_as_they_are_also_the_first() -> None:
    values = [BOM_UTF8 + b"a", "\ufeffb", None, "c"]
    marked: dict[int, Row] = {}
    assert list(lines_of(values, marked)) == [BOM_UTF8 + b"a", BOM_UTF8 + b"b", b"", b"c"]
    assert list(marked) == [2]


def test_what_pandas_has_for_none_is_null() -> None:
    class NAType:
        def __eq__(self, other: object) -> Any:
            return self

        def __bool__(self) -> bool:
            raise TypeError("boolean value of NA is ambiguous")

    class NaTType: ...

    assert statuses([NAType(), NaTType(), float("nan"), ("a", NAType()), 0.5]) == [*["null"] * 4, "not_text"]


def test_texts_of_json_lines() -> None:
    table = lines(b'{"t": "a"}\n', b'{"t": null}', b'{"t": 3}', b"{}", b"[1]", b"{", b'{"t": "\xff"}', b"[" * 9999)
    found = texts(table, "jsonl", ["t"])
    assert found[0] == "a"
    bad = ["null", "not_text", "null", "invalid_json", "invalid_json", "invalid_utf8", "invalid_json"]
    assert statuses(found) == [None, *bad]


def test_the_message_tells_why_json_is_not_used() -> None:
    table = lines(b"[1]", b"{", b'{"t": "a", "n": %s}' % (b"9" * 5000), b'{"t": %s' % (b"[" * 99_999))
    found = texts(table, "jsonl", ["t"])
    assert statuses(found) == ["invalid_json"] * 4
    about = [getattr(row, "message", "") for row in found]
    assert about[:2] == ["the line is no JSON object"] * 2
    assert about[2:] == ["a number of the line has too many digits", "the line is nested too deeply"]
    assert json_rows(table, [Row("invalid_json")] * 4, "jsonl")[2]["input_json"].endswith("999}")


def test_a_number_beyond_floats_is_null() -> None:
    (found,) = json_rows(lines(b'{"n": 1e400, "m": 123456789012345678901234567890}'), [ok("X")], "jsonl")
    assert (found["n"], found["m"]) == (None, 123456789012345678901234567890)


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary", "large_binary", "binary_view"])
def test_texts_of_parquet(kind: str) -> None:
    array = pa.array(["ä", None, ""], getattr(pa, kind)())
    assert texts(pa.table({"t": array}), "parquet", ["t"]) == ["ä".encode(), None, b""]


def test_texts_of_a_dictionary_and_of_a_damaged_string() -> None:
    assert texts(pa.table({"t": pa.array(["a", "a"]).dictionary_encode()}), "parquet", ["t"]) == [b"a", b"a"]
    damaged = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    assert texts(pa.table({"t": damaged}), "parquet", ["t"]) == [b"\xff"]


def test_other_columns_are_kept() -> None:
    table = pa.table({"de": ["x", "y"], "id": [7, 8], "when": pa.array([0, 1], pa.date32()), "raw": [b"\0", None]})
    found = json_rows(table, [ok("X"), Row("empty")], "parquet")
    assert found[0] == {
        **{"id": "2:10", "text": "X", "status": "ok", "message": "", "score": -0.5},
        **{"de": "x", "input_id": 7, "when": "1970-01-01", "raw": "AA=="},
    }
    assert (found[1]["id"], found[1]["text"], found[1]["score"]) == ("2:11", "", None)
    whole = parquet_rows(table, [ok("X", "Z"), Row("empty")], "parquet")
    added = ["id", "text", "status", "message", "score", "nbest"]
    assert whole.column_names == [*added, "de", "input_id", "when", "raw"]
    assert whole["when"].type == pa.date32()
    assert [one["text"] for one in whole["nbest"][0].as_py()] == ["X", "Z"]


def test_columns_keep_what_their_schema_says_of_them() -> None:
    fields = [pa.field("text", pa.string(), False, {"lang": "de"}), pa.field("n", pa.int64(), False, {"unit": "m"})]
    table = pa.table([["x"], [1]], schema=pa.schema(fields, {"pandas": "{}", "org.apache.spark.version": "4"}))
    schema = parquet_rows(table, [ok("X")], "parquet").schema
    assert [schema.field(name).nullable for name in ("text", "input_text", "n")] == [True, False, False]
    assert schema.field("input_text").metadata == {b"lang": b"de"}
    assert schema.field("n").metadata == {b"unit": b"m"}
    assert not schema.metadata


def test_columns_and_fields_with_the_same_name_are_all_kept() -> None:
    names = ["text", "k", "k", "k_2", "k", "status", "status"]
    given = pa.table([pa.array([value]) for value in ("x", 1, 2, 3, 4, 5, 6)], names=names)
    (found,) = json_rows(given, [ok("X")], "parquet")
    assert (found["text"], found["status"], found["input_text"]) == ("X", "ok", "x")
    assert [found[name] for name in ("k", "k_3", "k_2", "k_4")] == [1, 2, 3, 4]
    assert [found[name] for name in ("input_status", "status_2")] == [5, 6]
    content = written(Shard(0, 0, 1), given, [ok("X")], function(), source="parquet", output="parquet")
    whole = parquet.ParquetFile(io.BytesIO(content)).read()  # `read_table` takes no names that come twice
    assert [column.to_pylist() for column in whole.columns[5:]] == [["x"], [1], [2], [3], [4], [5], [6]]
    twice = pa.StructArray.from_arrays([pa.array([1, None]), pa.array(["a", "b"])], ["k", "k"])
    several = pa.ListArray.from_arrays(pa.array([0, 2, 2], pa.int32()), twice)
    table = pa.table({"text": ["x", "y"], "one": twice, "several": several})
    first, second = json_rows(table, [ok("X"), ok("Y")], "parquet")
    assert (first["one"], second["one"]) == ({"k": 1, "k_2": "a"}, {"k": None, "k_2": "b"})
    assert (first["several"], second["several"]) == ([first["one"], second["one"]], [])


def test_json_lines_are_kept() -> None:
    table = lines(b'{"text": "x", "input_text": 1, "more": {"a": [2]}}\n', b"broken \xff\n")
    found = json_rows(table, [ok("X"), Row("invalid_json", "no")], "jsonl")
    assert found[0] | {"id": "", "score": 0} == {
        **{"id": "", "text": "X", "status": "ok", "message": "", "score": 0},
        **{"input_input_text": "x", "input_text": 1, "more": {"a": [2]}},
    }
    assert found[1]["input_json"] == "broken �"
    whole = parquet_rows(table, [ok("X"), Row("invalid_json", "no")], "jsonl")
    assert json.loads(whole["input_json"][0].as_py())["more"] == {"a": [2]}


def test_values_that_python_has_not_are_written_as_json() -> None:
    damaged = pa.array([b"caf\xe9", b"b"]).view(pa.string())
    days = pa.array([10_000_000, 0], pa.int32()).view(pa.date32())
    kinds = {"text": damaged, "large": damaged.view(pa.binary()).cast(pa.large_binary()).view(pa.large_string())}
    nested = pa.StructArray.from_arrays([damaged, days], ["of", "day"])
    several = pa.ListArray.from_arrays(pa.array([0, 2, 2], pa.int32()), damaged)
    coded = pa.DictionaryArray.from_arrays([0, 1], damaged)
    times = pa.array([1 << 62, 0], pa.timestamp("us"))
    table = pa.table({**kinds, "nested": nested, "several": several, "coded": coded, "time": times})
    bad, good = json_rows(table, [Row("invalid_utf8"), ok("B")], "parquet")
    assert (bad["status"], bad["input_text"], bad["large"], bad["coded"]) == ("invalid_utf8", *["caf\ufffd"] * 3)
    assert (bad["nested"], bad["several"]) == ({"of": "caf\ufffd", "day": 10_000_000}, ["caf\ufffd", "b"])
    assert (bad["time"], good["time"]) == (1 << 62, "1970-01-01 00:00:00")
    assert (good["input_text"], good["several"], good["nested"]) == ("b", [], {"of": "b", "day": "1970-01-01"})


def test_deep_values_beside_numbers_that_json_has_not_are_written() -> None:
    depth = 700
    found = json_rows(lines(b'{"x": NaN, "y": %s%s}' % (b"[" * depth, b"]" * depth)), [Row("null")], "jsonl")
    assert found[0]["x"] is None
    assert json.dumps(found[0]["y"]) == "[" * depth + "]" * depth


def test_half_a_pair_of_surrogates_is_written() -> None:
    (found,) = json_rows(lines(rb'{"text": "\ud800"}'), [Row("invalid_utf8")], "jsonl")
    assert found["input_text"] == "\ud800"


def test_text_has_a_line_for_each_row() -> None:
    table = lines(b"a\n", b"b\n", b"c\n")
    rows = [ok("A", "B"), Row("empty"), ok("C D")]
    assert written(Shard(0, 0, 3), table, rows, function(), source="text", output="text") == b"A\tB\n\nC D\n"


def test_names_stay_apart() -> None:
    assert clear_of("text", ("text", "input_text")) == "input_input_text"


def test_texts_of_two_columns() -> None:
    both = ["de", "en"]
    table = lines(b'{"de": "a", "en": "b"}\n', b'{"de": "a"}\n', b'{"de": 1, "en": "b"}\n', b"broken\n")
    found = texts(table, "jsonl", both)
    assert found[0] == ("a", "b")
    assert statuses(found) == [None, "null", "not_text", "invalid_json"]
    found = texts(lines(b"a\tb\r\n", b"a\n", b"a\tb\tc"), "text", both)
    assert found[0] == (b"a", b"b")
    assert statuses(found) == [None, "not_text", "not_text"]
    assert texts(pa.table({"en": ["b"], "de": ["a"]}), "parquet", both) == [(b"a", b"b")]


def test_lines_of_two_columns_become_columns() -> None:
    pairs, table = function(), lines(b"a\tb\n", b"c\n")
    pairs.reads = ("de", "en")
    rows = [Row("ok"), Row("not_text")]
    given: Any = (Shard(0, 0, 2), table, rows, pairs)
    found = [json.loads(line) for line in written(*given, source="text", output="jsonl").splitlines()]
    assert [(row["de"], row["en"]) for row in found] == [("a", "b"), ("c", None)]
    whole = parquet.read_table(io.BytesIO(written(*given, source="text", output="parquet")))
    assert whole.select(["de", "en"]).to_pylist() == [{"de": "a", "en": "b"}, {"de": "c", "en": None}]


def test_names_of_json_that_come_again_are_kept() -> None:
    line = b'{"text": "Ein Mann.", "k": 1, "k": {"a": 2, "a": 3}, "text": "Ein Hund."}\n'
    assert texts(lines(line), "jsonl", ("text",)) == ["Ein Mann."]
    [record] = json_rows(lines(line), [ok("A man.")], "jsonl")
    assert {name: record[name] for name in ("input_text", "k", "k_2", "text_2")} == {
        "input_text": "Ein Mann.",
        "k": 1,
        "k_2": {"a": 2, "a_2": 3},
        "text_2": "Ein Hund.",
    }


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("ns", 45_296_123_456_789, "12:34:56.123456789"),
        ("ns", 45_296_123_456_000, "12:34:56.123456"),
        ("ns", 45_296_000_000_000, "12:34:56"),
        ("ns", 1, "00:00:00.000000001"),
        ("ns", -1, -1),
        ("us", 1, "00:00:00.000001"),
        ("us", 86_400_000_000, 86_400_000_000),
        ("us", None, None),
        ("ms", 45_296_120, "12:34:56.120000"),
        ("ms", 86_400_000, 86_400_000),
        ("s", 45_296, "12:34:56"),
        ("s", -1, -1),
    ],
)
def test_times_are_written_as_json(unit: str, value: int | None, text: object) -> None:
    is_long = unit in ("us", "ns")
    numbers = pa.array([value], pa.int64() if is_long else pa.int32())
    times = numbers.view((pa.time64 if is_long else pa.time32)(unit))
    columns = {
        "flat": times,
        "list": pa.ListArray.from_arrays([0, 1], times),
        "record": pa.StructArray.from_arrays([times], ["x"]),
        "map": pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["k"]), times),
        "dictionary": pa.DictionaryArray.from_arrays([0], times),
    }
    [row] = json_rows(pa.table({"text": ["a"], **columns}), [ok("x")], "parquet")
    found = [row["flat"], row["list"], row["record"], row["map"], row["dictionary"]]
    assert found == [text, [text], {"x": text}, [["k", text]], text]


def test_names_that_come_many_times_are_numbered_in_linear_time() -> None:
    line = b'{"text": "Ein Hund.", "a_7": 0, %s}\n' % b", ".join([b'"a": 1'] * 60_000)
    began = time.process_time()
    [row] = json_rows(lines(line), [ok("x")], "jsonl")
    assert time.process_time() - began < 10
    assert row.keys() >= {"a", "a_2", "a_6", "a_8", "a_60001"}
    assert row["a_7"] == 0


def test_maps_have_one_shape_also_beside_a_damaged_value() -> None:
    kind = pa.map_(pa.string(), pa.string())
    items = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    maps = pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["k", "l"]), items)
    assert maps.type == kind
    table = pa.table({"text": ["a", "b"], "m": maps})
    assert [row["m"] for row in json_rows(table, [ok("x")] * 2, "parquet")] == [[["k", "a"]], [["l", "\ufffd"]]]
