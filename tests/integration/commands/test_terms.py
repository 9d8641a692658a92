"""Required phrases on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import Run, one_error


def test_phrases_stand_after_tabs(decode: Run) -> None:
    text = "de4 de5\twört7 wört8\twört9\nde6\nde7\twört30\n".encode()
    both = [decode("--constraint-columns", "--beam", "4", "--constraint-order", o, stdin=text).lines for o in ORDERS]
    for lines in both:
        assert "wört7 wört8" in lines[0]
        assert "wört9" in lines[0]
        assert "wört30" in lines[2]
        assert lines[1] == decode("--beam", "4", stdin=b"de6\n").lines[0]
    assert both[0][0].index("wört8") < both[0][0].rindex("wört9")
    one = decode("--constraint-columns", stdin=text)  # without a beam
    assert "wört30" in one.lines[2]
    streamed = decode("--constraint-columns", "--beam", "4", "--stream", stdin=text)
    assert streamed.lines == both[1]


ORDERS = ("ordered", "unordered")


def test_a_glossary_and_marks(decode: Run, tmp_path: Path) -> None:
    glossary = tmp_path / "glossary.tsv"
    glossary.write_text("de4 de5\twört7\nde5\twört8\n", encoding="utf-8")
    lines = decode("--glossary", glossary, "--beam", "4", stdin=b"de4 de5\nde6 de5\nde6\n").lines
    assert "wört7" in lines[0]
    assert "wört8" in lines[1]
    assert lines[2] == decode("--beam", "4", stdin=b"de6\n").lines[0]
    kept = decode("--keep-between", "[ ]", "--output-format", "jsonl", stdin=b"de4 [de5]\nde6\n")
    assert json.loads(kept.lines[0])["status"] == "unknown_token"


@pytest.mark.parametrize(
    ("formats", "error"),
    [
        (("ids", "text"), "the input is ids, and the output text"),
        (("ids", "tokens"), "the input is ids, and the output tokens"),
        (("tokens", "text"), "the input is tokens, and the output text"),
        (("text", "ids"), "the input is text, and the output ids"),
        (("ids", "ids"), "have different vocabularies"),
    ],
)
def test_nothing_is_copied_into_another_vocabulary(decode: Run, formats: tuple[str, str], error: str) -> None:
    flags = ("--keep-between", "[ ]", "--input-format", formats[0], "--output-format", formats[1])
    assert error in one_error(decode(*flags, stdin=b"[ 5 6 ] 3\n"))


def test_samples_may_have_forbidden_phrases(decode: Run, tmp_path: Path) -> None:
    glossary = tmp_path / "glossary.tsv"
    glossary.write_text("de4\twört7\tforbidden\nde5\twört7\n", encoding="utf-8")
    flags = ("--glossary", glossary, "--keep-between", "[ ]", "--samples", "2")
    found = decode(*flags, stdin=b"de4\nde5\nde6 [x]\nde6\n")
    assert [bool(line) for line in found.lines] == [True, False, False, True]
    assert "line 2: invalid_phrases: required phrases need beam search; samples cannot have any" in found.stderr


def test_what_no_output_may_say_is_read_at_the_start(decode: Run, tmp_path: Path) -> None:
    glossary = tmp_path / "glossary.tsv"
    glossary.write_text("\t" + "wört7 " * 3000 + "\tforbidden\n", encoding="utf-8")
    error = one_error(decode("--glossary", glossary, stdin=b"de4\n"))
    assert "the glossary forbids 'w" in error
    assert "more than 8,192 bytes" in error


def test_prefixes_of_a_file_have_no_columns(decode: Run, tmp_path: Path) -> None:
    (tmp_path / "prefixes").write_text("wört4\twört5\n", encoding="utf-8")
    found = decode("--prefix-file", tmp_path / "prefixes", "--constraint-columns", stdin="de4\twört9\n".encode())
    assert found.lines[0].startswith("wört4 wört5")
    assert "wört9" in found.lines[0]


def test_a_glossary_holds_for_each_sentence_of_a_line(decode: Run, tmp_path: Path) -> None:
    glossary = tmp_path / "glossary.tsv"
    glossary.write_text("de4\twört7\n", encoding="utf-8")
    flags = ("--glossary", glossary, "--beam", "4")
    line = decode("--split", "lines", *flags, stdin=b"  de4 de5  \n").lines[0]
    assert line == f"  {decode(*flags, stdin=b'de4 de5').lines[0]}  "
    assert "wört7" in line
    error = one_error(decode("--split", "lines", "--constraint-columns", stdin=b"de4\n"))
    assert "--glossary" in error


def test_a_line_without_room_is_told(decode: Run) -> None:
    outcome = decode("--constraint-columns", "--max-length", "2", stdin="de4\twört7 wört8 wört9\n".encode())
    assert outcome.code == 0
    assert "line 1: phrases_missing: the output lacks" in outcome.stderr


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--constraint-columns", "--constraint-file", "x"], "both give the phrases"),
        (["--constraint-columns", "--samples", "2"], "required phrases need beam search; samples cannot"),
        (["--glossary", "nowhere"], "cannot read the glossary nowhere"),
        (["--constraint-file", "nowhere"], "cannot read nowhere"),
        (["--constraint-file", "-"], "two inputs cannot both be read from stdin"),
        (["--glossary-case", "ignore"], "glossary_case needs a glossary"),
        (["--keep-between", "[[]]"], "--keep-between is '[[]]'. Give two marks"),
        (["--constraint-columns", "--alternatives", "2"], "required phrases need beam search; alternatives cannot"),
    ],
)
def test_wrong_flags_are_named(decode: Run, flags: list[str], error: str) -> None:
    assert error in one_error(decode(*flags, stdin=b"de4\n"))
