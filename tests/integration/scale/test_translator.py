"""`Translator` on batches, as Ray Data gives them; Ray itself is not needed."""

from __future__ import annotations

import math
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfexport
from makers.tiny import SRC_VOCAB
from tfexport.decoding.translate import Writer
from tfexport.errors import TfexportError
from tfexport.scale import Translator
from tfexport.text.tokenizer_parts import PanicError

LINES = [" ".join(f"de{4 + (n * 7 + place * 3) % (SRC_VOCAB - 4)}" for place in range(1 + n % 9)) for n in range(40)]
SEARCH: dict[str, Any] = {"beam": 3, "max_length": 12}


@pytest.fixture(scope="module")
def wanted(tiny_bundle: Path) -> list[str]:
    return [found.text for found in tfexport.load(tiny_bundle, threads=1).translate(LINES, **SEARCH)]


@pytest.fixture(scope="module")
def translator(tiny_bundle: Path) -> Translator:
    return Translator(tiny_bundle, text_column="de", **SEARCH)


def test_dictionaries_of_arrays(translator: Translator, wanted: list[str]) -> None:
    batch = {"de": np.array(LINES, dtype=object), "n": np.arange(40), "score": np.ones(40)}
    found = translator(batch)
    assert list(found) == ["de", "n", "input_score", "text", "status", "message", "score"]
    assert found["text"].tolist() == wanted
    assert set(found["status"]) <= {"ok", "length_limit"}
    assert (found["score"] < 0).all()


def test_tables(translator: Translator, wanted: list[str]) -> None:
    pa = pytest.importorskip("pyarrow")
    found = translator(pa.table({"text": range(40), "de": LINES}))
    assert found.column_names == ["input_text", "de", "text", "status", "message", "score"]
    assert found["text"].to_pylist() == wanted


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_strings_of_tables_that_are_not_utf8_are_marked(translator: Translator, wanted: list[str], kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    given = [LINES[0].encode(), b"de4 \xff", None, LINES[1].encode()]
    damaged = pa.array(given, pa.binary()).view(pa.string())
    if kind == "dictionary":
        damaged = pa.DictionaryArray.from_arrays([0, 1, 2, 3], damaged)
    elif kind != "string":
        as_bytes = pa.large_binary() if kind == "large_string" else pa.binary_view()
        damaged = pa.array(given, as_bytes).view(getattr(pa, kind)())
    table = pa.table({"de": damaged})
    for batch in (table, table.to_batches()[0]):
        found = translator(batch)
        assert found["text"].to_pylist() == [wanted[0], "", "", wanted[1]]
        assert found["status"].to_pylist()[1:3] == ["invalid_utf8", "null"]
        assert found["de"].equals(batch["de"])


def test_data_frames(translator: Translator, wanted: list[str]) -> None:
    pandas = pytest.importorskip("pandas")
    found = translator(pandas.DataFrame({"de": [*LINES, None], "text": 1}))
    assert found["text"].tolist() == [*wanted, ""]
    assert found["status"].tolist()[-1] == "null"
    assert "input_text" in found


def test_data_frames_have_the_same_types_without_rows_and_without_numbers(tiny_bundle: Path) -> None:
    pandas = pytest.importorskip("pandas")
    translator = Translator(tiny_bundle, nbest=2, beam=2, max_length=12)
    some, none, marked = (translator(pandas.DataFrame({"text": values})) for values in (LINES[:2], [], [None]))
    kinds = {name: str(kind) for name, kind in some.dtypes.items() if name != "input_text"}
    assert list(kinds) == ["text", "status", "message", "score", "nbest"]
    assert {kinds[name] for name in ("text", "status", "message", "nbest")} <= {"object", "str"}
    assert kinds["score"] == "float64"
    for found in (none, marked):
        assert {name: str(kind) for name, kind in found.dtypes.items() if name != "input_text"} == kinds


def test_rows_of_a_shard_are_decoded_by_length(
    translator: Translator, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = translator._job.runtime
    encode, padded, read = runtime.encode, list[int](), list[int]()

    def counted(src_ids: Any, src_len: Any, **given: Any) -> Any:
        padded.append(src_ids.size)
        read.append(int(src_len.sum()))
        return encode(src_ids, src_len, **given)

    monkeypatch.setattr(runtime, "encode", counted)
    rows = list(translator.rows(LINES * 20))
    assert [row.results[0].text for row in rows] == wanted * 20
    assert len(padded) > 10
    assert sum(padded) < 1.1 * sum(read)


def test_batches_that_are_mappings(translator: Translator, wanted: list[str]) -> None:
    found = translator(UserDict({"de": [*LINES, None], "n": [1] * (len(LINES) + 1)}))
    assert list(found["text"]) == [*wanted, ""]
    assert found["n"] == [1] * (len(LINES) + 1)


def test_datasets_in_their_own_format(tiny_bundle: Path, wanted: list[str]) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"de": LINES}).map(
        Translator(tiny_bundle, text_column="de", **SEARCH), batched=True, load_from_cache_file=False
    )
    assert dataset["text"][:] == wanted


@pytest.mark.parametrize("kind", ["object", "string", "category", "Int64", "datetime64[ns]"])
def test_null_of_data_frames(translator: Translator, wanted: list[str], kind: str) -> None:
    pandas = pytest.importorskip("pandas")
    has_text = kind in ("object", "string", "category")
    column = pandas.Series([LINES[0] if has_text else None, None], dtype=kind)
    found = translator(pandas.DataFrame({"de": column}))
    assert found["text"].tolist() == [wanted[0] if has_text else "", ""]
    assert found["status"].tolist()[1] == "null"
    assert (found["status"].tolist()[0] == "null") is not has_text


@pytest.mark.parametrize("library", ["pyarrow", "pandas"])
def test_two_columns_with_the_name_that_is_read_are_an_error(translator: Translator, library: str) -> None:
    pytest.importorskip(library)
    if library == "pyarrow":
        import pyarrow as pa

        batch = pa.table([pa.array(["a", "b"]), pa.array(["c", "d"]), pa.array([1, 2])], names=["de", "de", "k"])
    else:
        import pandas

        batch = pandas.DataFrame([["a", "c", 1], ["b", "d", 2]], columns=["de", "de", "k"])
    with pytest.raises(TfexportError, match=r"there are 2 columns 'de'\. Rename all but the one to read"):
        translator(batch)


def test_bad_rows_are_marked_and_the_others_decoded(translator: Translator, wanted: list[str]) -> None:
    bad = [None, 3, b"\xff", "", "de4 " * 100_000, "\ud800", float("nan")]
    rows = list(translator.rows([*LINES[:20], *bad, *LINES[20:]]))
    marked = ["null", "not_text", "invalid_utf8", "empty", "too_long", "invalid_utf8", "null"]
    assert [row.status for row in rows[20:27]] == marked
    assert [row.results[0].text for row in (*rows[:20], *rows[27:])] == wanted


def test_row_by_row_is_the_same_and_reads_no_further(translator: Translator, wanted: list[str]) -> None:
    read = []

    class Values(list[object]):
        def __iter__(self) -> Any:
            for number, line in enumerate(LINES):
                read.append(number)
                yield line

    rows = translator.rows(Values(), singly=True)
    found = []
    for number in range(len(LINES)):
        found.append(next(rows).results[0].text)
        assert read[-1] == number
    assert found == wanted


@pytest.mark.parametrize("search", [{"max_length": 12}, SEARCH])
def test_text_alone_is_the_same_and_greedy_search_has_no_scores(tiny_bundle: Path, search: dict[str, Any]) -> None:
    plain, short = (Translator(tiny_bundle, **given) for given in (search, Translator.for_text(search)))
    rows = list(plain.rows(LINES)), list(short.rows(LINES))
    assert [plain.line(row) for row in rows[0]] == [short.line(row) for row in rows[1]]
    assert [row.status for row in rows[0]] == [row.status for row in rows[1]]
    assert all(row.results[0].score < 0 for row in rows[0])
    assert all(math.isnan(row.results[0].score) == ("beam" not in search) for row in rows[1])


def test_an_output_that_the_tokenizer_cannot_write_is_marked(
    translator: Translator, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writer.text

    def panics(writer: Writer, ids: Any, words: Any = None) -> str:
        text = write(writer, ids, words)
        if text == wanted[3]:
            raise PanicError("the output cannot be written as text")
        return text

    monkeypatch.setattr(Writer, "text", panics)
    rows = list(translator.rows(LINES))
    assert {row.status for row, text in zip(rows, wanted, strict=True) if text == wanted[3]} == {"tokenizer_error"}
    assert [row.results[0].text for row in rows if row.results] == [text for text in wanted if text != wanted[3]]


def test_samples_depend_on_the_place(tiny_bundle: Path) -> None:
    sampler = Translator(tiny_bundle, samples=2, max_length=12, seed=3)

    def drawn(place: str, **given: bool) -> list[str]:
        return [row.results[0].text for row in sampler.rows(LINES, place, **given)]

    assert drawn("0:0") == drawn("0:0") == drawn("0:0", singly=True)
    assert drawn("0:0") != drawn("0:40")
    found = sampler({"text": np.array(LINES, dtype=object)})
    assert found["text"].tolist() == sampler({"text": [line.encode() for line in LINES]})["text"].tolist()
    assert found["text"].tolist() != sampler({"text": np.array(LINES[::-1], dtype=object)})["text"].tolist()[::-1]
    assert [len(one) for one in found["nbest"]] == [2] * len(LINES)
    assert found["input_text"].tolist() == LINES


def test_what_cannot_be_used_is_an_error(translator: Translator, tiny_bundle: Path) -> None:
    with pytest.raises(TfexportError, match="no column 'de'"):
        translator({"fr": np.array(["a"])})
    pandas_like = {3: np.array(["a"]), "fr": np.array(["a"])}  # a data frame may have numbers for names
    with pytest.raises(TfexportError, match=r"no column 'de'\. Name another: there are 3, fr\."):
        translator(pandas_like)
    for column in (3, None, ["text"]):
        with pytest.raises(TfexportError, match=r"^text_column is .*\. Give the name of a column, a string\.$"):
            Translator(tiny_bundle, text_column=column)  # type: ignore[arg-type]
    for wrong in ({"beem": 4}, {"beam": 0}, {"threads": 0}, {"batch_size": "x"}, {"precision": "fp8"}, {"nbest": 9}):
        with pytest.raises(TfexportError):
            Translator(tiny_bundle, **wrong)
    for ignored in ({"token_scores": True}, {"constraint_order": "ordered"}):
        for make in (lambda: Translator(tiny_bundle, **ignored), lambda: Translator.described(tiny_bundle, ignored)):  # noqa: B023
            with pytest.raises(TfexportError, match="has no effect on a corpus"):
                make()
