"""Shards: every row of a file is in one of them, whatever was done before."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import pickle
import re
import zipfile
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install 'tfexport[ray]'")

from pyarrow import parquet  # noqa: E402

from tfexport.errors import TfexportError  # noqa: E402
from tfexport.scale import shards  # noqa: E402
from tfexport.scale.shards import RAW, Input, Shard, _bytes_of, compression_of, format_of, gaps, read_shards  # noqa: E402
from tfexport.scale.storage import Place, inputs  # noqa: E402


def source(path: Path) -> Input:
    return Input.of(Place.of(str(path)))


def ranges(path: Path, rows: int = 4, done: frozenset[Shard] = frozenset()) -> list[tuple[int, int]]:
    return [(shard.first, shard.rows) for shard, _ in read_shards(source(path), 0, rows, done)]


def raw(path: Path, rows: int = 4) -> list[bytes]:
    return [line for _, table in read_shards(source(path), 0, rows) if len(table) for line in table[RAW].to_pylist()]


@pytest.mark.parametrize("shard", [Shard(0, 0, 1), Shard(123456, 10**13, 16384)])
def test_names_tell_the_rows(shard: Shard) -> None:
    assert [Shard.parse(shard.name(format)) for format in ("parquet", "jsonl", "text")] == [shard] * 3
    assert Shard.parse(f".{shard.name('text')}.1f.partial") is None


def test_lines_of_text(tmp_path: Path) -> None:
    lines = [f"line {number}\r\n".encode() for number in range(10)] + [b"\xff no newline"]
    (tmp_path / "a.txt").write_bytes(b"".join(lines))
    assert ranges(tmp_path / "a.txt") == [(0, 4), (4, 4), (8, 3), (11, 0)]
    assert raw(tmp_path / "a.txt") == lines


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_a_mark_of_the_byte_order_is_dropped_at_the_start_of_a_file_alone(tmp_path: Path, name: str) -> None:
    lines = [BOM_UTF8 + b"1\n", b"2\n", BOM_UTF8 + b"3\n", BOM_UTF8 + b"4\n"]
    content = b"".join(lines)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert raw(tmp_path / name, 2) == [b"1\n", *lines[1:]]


def test_a_mark_alone_is_an_empty_line_as_in_decode(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(BOM_UTF8)
    assert raw(tmp_path / "a.txt") == [b""]


def test_a_uri_of_a_file_here_is_its_path() -> None:
    for uri in ("file:///a%20b/c.txt", "file://localhost/a%20b/c.txt", "FILE:////a b/c.txt", "file:/a%20b/c.txt"):
        assert Place.of(uri) == Place.of("/a b/c.txt")


OPTIONS = "?region=us-east-1"


@pytest.mark.parametrize(
    ("given", "path", "uri"),
    [
        ("s3://b/x", "b/x", "s3://b/x"),
        ("s3://b/x/", "b/x", "s3://b/x"),
        ("s3://b/lang=de/a+b,c@d", "b/lang=de/a+b,c@d", "s3://b/lang=de/a+b,c@d"),
        ("s3://b/a%20b", "b/a b", "s3://b/a b"),
        ("s3://b", "b", "s3://b"),
    ],
)
def test_files_below_a_uri_with_options(given: str, path: str, uri: str) -> None:
    place = Place.of(f"{given}{OPTIONS}")
    file = place / "part=1%/a b.parquet"
    assert (place.path, place.uri) == (path, f"{uri}{OPTIONS}")
    assert (file.path, file.name) == (f"{path}/part=1%/a b.parquet", "a b.parquet")
    assert file.uri == f"{uri}/part=1%/a b.parquet{OPTIONS}"
    assert file.system.equals(place.system)
    assert (file.is_in(place), place.is_in(file), place.is_in(place)) == (True, False, False)
    assert pickle.loads(pickle.dumps(file)) == file


def test_uris_tell_the_account() -> None:
    place = Place("box/a b", "abfss://box@account.dfs.core.windows.net/x")
    assert place.uri == "abfss://box@account.dfs.core.windows.net/a b"


@pytest.mark.parametrize(
    ("name", "format", "compression"),
    [
        ("a.parquet", "parquet", None),
        ("A.PQ", "parquet", None),
        ("a.jsonl.gz", "jsonl", "gzip"),
        ("A.TXT.GZ", "text", "gzip"),
        ("a.de.zst", "text", "zstd"),
        ("a.ndjson.bz2", "jsonl", "bz2"),
        ("a.gz.txt", "text", None),
    ],
)
def test_the_name_tells_the_format(name: str, format: str, compression: str | None) -> None:
    assert (format_of(name), compression_of(name)[1]) == (format, compression)


def test_the_end_of_a_name_in_upper_case_tells_the_compression(tmp_path: Path) -> None:
    (tmp_path / "A.TXT.GZ").write_bytes(gzip.compress(b"a\nb\n"))
    assert raw(tmp_path / "A.TXT.GZ") == [b"a\n", b"b\n"]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("gzip", "Give it a name that ends with .gz"),
        ("bz2", "Give it a name that ends with .bz2"),
        ("Parquet", "Give it a name that ends with .parquet"),
        ("xz", "Unpack it"),
        ("zip", "Unpack it"),
        ("UTF-16", "Write it in UTF-8"),
        ("UTF-16-BE", "Write it in UTF-8"),
    ],
)
def test_a_file_that_is_no_text_is_an_error(tmp_path: Path, kind: str, what: str) -> None:
    path = tmp_path / "a.txt"
    if kind == "Parquet":
        parquet.write_table(pa.table({"text": ["a"]}), path)
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("a.txt", "a")
    elif kind == "UTF-16":
        path.write_bytes("\ufeffa\n".encode("utf-16-le"))
    elif kind == "UTF-16-BE":
        path.write_bytes("\ufeffa\n".encode("utf-16-be"))
    else:
        compress = {"gzip": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}[kind]
        path.write_bytes(compress(b"a\n"))
    message = f"a.txt is {kind.removesuffix('-BE')}, not text in UTF-8. {what}"
    with pytest.raises(TfexportError, match=re.escape(message)):
        source(path).require_columns({"--text-column": "text"})
    for text in (b"", b"PAR1 is a name\n", b"BZh\n", b"PK\n", "\ufeffä\n".encode()):
        path.write_bytes(text)
        source(path).require_columns({"--text-column": "text"})


def test_an_empty_file_has_no_shard_but_an_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert ranges(tmp_path / "a.txt") == [(0, 0)]


def test_all_members_of_a_gzip_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a\nb\n") + gzip.compress(b"c\n"))
    assert raw(tmp_path / "a.txt.gz") == [b"a\n", b"b\n", b"c\n"]


def test_a_cut_gzip_file_is_an_error_and_no_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(os.urandom(5000).hex().encode())[:-500])
    with pytest.raises(TfexportError, match="cannot read"):
        raw(tmp_path / "a.txt.gz")


def test_large_rows_end_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MOST_BYTES", 100)
    (tmp_path / "a.txt").write_bytes(b"x\n" * 2 + b"y" * 1000 + b"\n" + b"z\n" * 5)
    assert ranges(tmp_path / "a.txt") == [(0, 3), (3, 4), (7, 1), (8, 0)]


def test_the_bytes_of_rows_in_memory_end_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has one copy of the long text."""
    monkeypatch.setattr(shards, "MOST_BYTES", 50_000)
    monkeypatch.setattr(shards, "MOST_ROWS", 10)
    table = pa.table({"text": [*["x" * 1000] * 175, *["y"] * 325], "n": range(500)})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = [rows for shard, rows in read_shards(source(tmp_path / "a.parquet"), 0, 128) if shard.rows]
    assert [len(rows) for rows in found] == [55, 50, 50, 128, 128, 89]
    assert pa.concat_tables(found).equals(table)


@pytest.mark.parametrize("before", [0, 1000])
def test_a_long_text_that_repeats_is_read_in_small_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """The file is small, so its size tells nothing."""
    monkeypatch.setattr(shards, "MOST_BYTES", 1_000_000)
    table = pa.table({"text": [*["y"] * before, *["x" * 50_000] * 200]})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = [rows for shard, rows in read_shards(source(tmp_path / "a.parquet"), 0, 16384) if shard.rows]
    largest = sorted(rows.nbytes for rows in found)
    assert largest[-1] <= (1_000_000 + 64 * 50_100 if before else 2_000_000)
    assert largest[-2] <= 2_000_000
    assert pa.concat_tables(found).equals(table)


def test_rows_that_are_larger_than_a_shard_are_all_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MOST_BYTES", 1000)
    table = pa.table({"text": [*["x" * 5000] * 3, *["y"] * 3]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert ranges(tmp_path / "a.parquet") == [(6, 0), (0, 1), (1, 1), (2, 1), (3, 3)]


@pytest.mark.parametrize("kind", ["string", "string_view", "binary_view", "dictionary", "struct", "list", "large_list"])
def test_only_the_rows_of_a_slice_count(kind: str) -> None:
    words = pa.array([f"{number:05}" * 20 for number in range(1000)])
    if kind in {"string", "string_view", "binary_view"}:
        column = words.cast(pa.binary()).cast(pa.binary_view()) if kind == "binary_view" else words.cast(kind)
    else:
        column = words.dictionary_encode()
    if kind == "struct":
        column = pa.StructArray.from_arrays([column], ["word"])
    elif kind.endswith("list"):
        array = pa.ListArray if kind == "list" else pa.LargeListArray
        column = array.from_arrays(range(1001), column)
    assert 0 < _bytes_of(column.slice(500, 10)) < 2000
    assert _bytes_of(column) > 3000


def test_long_rows_end_a_shard_before_many_of_them_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MOST_BYTES", 50_000)
    table = pa.table({"text": [f"{number:05}" * 1000 for number in range(100)]})
    parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    found = [rows for shard, rows in read_shards(source(tmp_path / "a.parquet"), 0, 128) if shard.rows]
    assert max(map(len, found)) <= 20
    assert pa.concat_tables(found).equals(table)


def test_short_rows_are_read_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, iter_batches = list[int](), parquet.ParquetFile.iter_batches

    def counted(self: Any, **given: Any) -> Iterator[Any]:
        for batch in iter_batches(self, **given):
            sizes.append(len(batch))
            yield batch

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", counted)
    parquet.write_table(pa.table({"text": ["Ein Hund."] * 10_000}), tmp_path / "a.parquet")
    assert sum(shard.rows for shard, _ in read_shards(source(tmp_path / "a.parquet"), 0, 4000)) == 10_000
    assert len(sizes) < 250


def test_the_words_of_a_dictionary_do_not_count_for_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MOST_BYTES", 50_000)
    words = pa.array([f"{number:05}" * 10 for number in range(1000)]).dictionary_encode()
    table = pa.table({"text": ["x"] * 1000, "topic": words, "view": pa.array(["y"] * 1000, pa.string_view())})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = [rows for shard, rows in read_shards(source(tmp_path / "a.parquet"), 0, 400) if shard.rows]
    assert [len(rows) for rows in found] == [400, 400, 200]


@pytest.mark.parametrize("name", ["a.txt", "a.parquet"])
def test_what_is_done_is_passed_over(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("txt"):
        path.write_bytes(b"".join(b"%d\n" % number for number in range(14)))
        every = [(0, 4), (4, 4), (8, 4), (12, 2), (14, 0)]
    else:
        parquet.write_table(pa.table({"text": [str(number) for number in range(14)]}), path, row_group_size=6)
        every = [(14, 0), (0, 4), (4, 2), (6, 4), (10, 2), (12, 2)]
    assert ranges(path) == every
    with_rows = [one for one in every if one != (14, 0)]
    for chosen in range(2 ** len(with_rows)):
        there = [one for place, one in enumerate(with_rows) if chosen >> place & 1]
        rest = ranges(path, done=frozenset(Shard(0, *one) for one in there))
        assert rest == [one for one in every if one not in there]


def test_row_groups_give_their_rows(tmp_path: Path) -> None:
    table = pa.table({"text": [f"t{number}" for number in range(1000)], "n": range(1000)})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    found = [rows for shard, rows in read_shards(source(tmp_path / "a.parquet"), 0, 128) if shard.rows]
    assert pa.concat_tables(found).equals(table)


def test_a_file_that_is_changed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\n" * 10)
    reading = read_shards(source(tmp_path / "a.txt"), 0, 4)
    next(reading)
    with (tmp_path / "a.txt").open("ab") as file:
        file.write(b"more\n")
    with pytest.raises(TfexportError, match=r"a\.txt was changed"):
        next(reading)  # no shard of what may be another file


def test_broken_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [os.urandom(8).hex() for _ in range(5000)]}), path, use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(TfexportError, match=r"cannot read .*a\.parquet as parquet"):
        source(path).require_columns({"--text-column": "text"})
    path.write_bytes(whole[:4] + bytes(3000) + whole[3004:])
    source(path).require_columns({"--text-column": "text"})
    with pytest.raises(TfexportError, match=r"cannot read .*a\.parquet as parquet"):
        list(read_shards(source(path), 0, 100))


def test_columns_are_checked(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": ["a"], "n": [1]}), tmp_path / "a.parquet")
    source(tmp_path / "a.parquet").require_columns({"--text-column": "text"})
    for name, about in (("x", "no column 'x'"), ("n", "has int64, no text")):
        with pytest.raises(TfexportError, match=about):
            source(tmp_path / "a.parquet").require_columns({"--text-column": name})
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(TfexportError, match=r"has 2 columns 'text'\. Rename all but"):
        source(tmp_path / "b.parquet").require_columns({"--text-column": "text"})


def test_gaps_and_overlaps_are_found() -> None:
    parts = {Shard(0, 0, 4), Shard(0, 4, 2), Shard(1, 0, 3)}
    assert gaps(parts, {0: 6, 1: 3}) == []
    assert gaps(parts, {0: 7, 1: 3}) == ["input 0 has 7 rows, its parts 6"]
    assert gaps(parts - {Shard(0, 0, 4)}, {0: 6})
    assert gaps(parts | {Shard(0, 2, 2)}, {0: 6})
    assert gaps(parts, {0: 6, 1: 3, 2: 1})


def test_the_output_may_be_in_an_input(tmp_path: Path) -> None:
    for name in ("a.txt", "out/part.txt", "out/_tfexport/run.json", "out2/b.txt", "_c/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def found(given: Path, out: str) -> list[str]:
        return [Path(one.path).name for one in inputs([str(given)], without=Place.of(str(tmp_path / out)))]

    assert found(tmp_path, "out") == ["a.txt", "b.txt"]
    assert found(tmp_path / "*", "out") == ["a.txt", "b.txt"]
    assert found(tmp_path / "out" / "*", "x") == ["part.txt"]
    assert found(tmp_path / "out" / ".." / "*", "out") == ["a.txt", "b.txt"]
    assert found(tmp_path, "out2/../out") == ["a.txt", "b.txt"]
    (tmp_path / "_SUCCESS").touch()
    assert found(tmp_path / "*", "out") == ["a.txt", "b.txt"]
    assert found(tmp_path / "_S*", "out") == ["_SUCCESS"]
    with pytest.raises(TfexportError, match="has only files of the output folder"):
        found(tmp_path, ".")


def test_inputs_are_paths_globs_and_folders(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl", "below/d.txt", "_SUCCESS", ".hidden", "below/[x].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def found(*given: str) -> list[str]:
        return [Path(one.uri).name for one in inputs([str(tmp_path / name) for name in given])]

    assert found("*.txt") == ["a.txt", "b.txt"]
    assert found("c.jsonl", "a.txt") == ["c.jsonl", "a.txt"]
    assert found(".") == ["a.txt", "b.txt", "[x].txt", "d.txt", "c.jsonl"]
    assert found("below/[x].txt") == ["[x].txt"]
    assert [one.path for one in inputs([f"file://{tmp_path}/*.txt"])] == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "c d.txt").touch()
    (place,) = inputs([f"file://{tmp_path}/a%20b"])
    assert place.path == f"{tmp_path}/a b/c d.txt"
    assert (Place.of(f"file://{tmp_path}") / "a b" / "c d.txt").stamp() is not None
    for wrong, about in ((["none.txt"], "there is no file"), (["a.txt", "*.txt"], "given twice")):
        with pytest.raises(TfexportError, match=about):
            found(*wrong)


def test_one_file_by_two_names_is_given_twice(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "1.txt").touch()
    (tmp_path / "link.txt").symlink_to(tmp_path / "g" / "1.txt")
    for other in ("g/../g/1.txt", "link.txt"):
        with pytest.raises(TfexportError, match=r"is given twice\. Give each input once"):
            inputs([str(tmp_path / "g" / "1.txt"), f"{tmp_path}/{other}"])
    assert [one.path for one in inputs([f"{tmp_path}/link.txt"])] == [f"{tmp_path}/link.txt"]


def test_an_empty_input_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TfexportError, match=r"an input is empty\. Give a path, or `\.` for the current folder"):
        inputs([""])
    assert [one.name for one in inputs(["."])] == ["a.txt"]


def test_links_to_folders_are_followed_only_where_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "in" / "below" / "a.txt").touch()
    (tmp_path / "in" / "below" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "missing.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(tmp_path / "in")

    def found(given: str) -> list[str]:
        return [one.path.removeprefix(f"{tmp_path}/") for one in inputs([f"{tmp_path}/{given}"])]

    assert found("in") == found("in/**") == found("in/**/*.txt") == ["in/below/a.txt"]
    assert found("link") == found("link/**/*.txt") == ["link/below/a.txt"]
    assert found("in/below/loop/below/*.txt") == ["in/below/loop/below/a.txt"]


def test_a_pipe_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    os.mkfifo(tmp_path / "b.txt")
    assert [one.name for one in inputs([f"{tmp_path}/*.txt"])] == ["a.txt"]
    assert [one.name for one in inputs([str(tmp_path)])] == ["a.txt"]
    with pytest.raises(TfexportError, match=r"there is no file .*b\.txt\. Check the path"):
        inputs([f"{tmp_path}/b.txt"])
