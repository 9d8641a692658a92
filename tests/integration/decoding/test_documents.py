"""Documents through a real model: a sentence within a document has the text that it has alone."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

import tfexport
from makers.documents import is_balanced, tags
from tests.support.commands import Outcome, Run
from tfexport.errors import TfexportError

SENTENCES = [f"de{a} de{b} de{c}." for a in range(4, 12) for b in (7, 20) for c in (5, 13)]


def random_line(source: random.Random) -> str:
    line = source.choice(["", " ", "\t"])
    for _ in range(source.randrange(6)):
        line += source.choice(SENTENCES) + source.choice([" ", "  ", " \u2028", " -- \x0c"])
    return line


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> tfexport.Model:
    return tfexport.load(tiny_bundle, threads=1)


@pytest.fixture(scope="module")
def aligned(aligned_bundle: Path) -> tfexport.Model:
    return tfexport.load(aligned_bundle, threads=1)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("options", [{}, {"beam": 3}, {"beam": 2, "nbest": 2, "token_scores": True}])
def test_a_sentence_has_the_text_that_it_has_alone(model: tfexport.Model, options: dict[str, int]) -> None:
    source = random.Random(1)
    documents = ["\n".join(random_line(source) for _ in range(4)) for _ in range(20)]
    found = model.translate_document(documents, batch_size=5, **options)
    for text, one in zip(documents, found, strict=True):
        new, done = "", 0
        for sentence in one.sentences:
            assert text[sentence.start : sentence.end] == sentence.source
            alone = model.translate(sentence.source, **options)
            assert [output.text for output in sentence.translation.hypotheses] == [o.text for o in alone.hypotheses]
            assert sentence.translation.score == pytest.approx(alone.score, abs=1e-4)
            new, done = new + text[done : sentence.start] + alone.text, sentence.end
        assert one.text == str(one) == new + text[done:]


def test_what_is_too_long_is_cut_and_said(model: tfexport.Model) -> None:
    long = "de5 de6, " * 60
    found = model.translate_document(f"de7. {long}\n\nde8.")
    assert (found.status, len(found.text.split("\n"))) == ("length_limit", 3)  # this model never ends an output
    assert "was cut: " in found.message
    pieces = [one for one in found.sentences if one.is_piece]
    assert len(pieces) > 1
    assert "".join(one.source for one in pieces).replace(" ", "") == long.replace(" ", "")
    assert all(one.translation.hypotheses for one in found.sentences)
    assert model.translate(long).status == "too_long"


def test_alternatives_and_empty_texts(model: tfexport.Model) -> None:
    found = model.translate_document("de5 de9. de7!", beam=4, nbest=3)
    assert len(found.alternatives) == len(set(found.alternatives) - {found.text}) > 0
    for text in ("", " \n\t", "--", "\ufeff"):
        empty = model.translate_document(text)
        assert (empty.text, empty.status, empty.sentences) == (text, "empty", ())
    assert model.translate_document([]) == []


def test_what_cannot_be_used_is_refused(model: tfexport.Model) -> None:
    for wrong in (None, 5, b"x", [None], [["de5"]]):
        with pytest.raises(TfexportError, match="texts"):
            model.translate_document(wrong)  # type: ignore[arg-type,call-overload]
    with pytest.raises(TfexportError, match="split"):
        model.translate_document("de5", split="words")
    with pytest.raises(TfexportError, match="--alignments"):
        model.translate_document("<b>de5</b>", markup="html")
    assert model.translate_document("de5 \ud800").status == "invalid_utf8"


def test_terms_of_documents(model: tfexport.Model) -> None:
    search: dict[str, Any] = {"glossary": {"de9": "wört7 wört8"}, "beam": 4, "max_length": 12}
    found = model.translate_document("de5 de9. de7!", **search)
    assert [one.translation.text for one in found.sentences] == [
        one.text for one in model.translate(["de5 de9.", "de7!"], **search)
    ]
    assert "wört7 wört8" in found.text
    asynchronous = asyncio.run(model.translate_documents_async(["de5 de9. de7!"], **search))
    assert [one.text for one in asynchronous] == [found.text]


def test_code_replaces_no_required_phrase(aligned: tfexport.Model) -> None:
    search: dict[str, Any] = {"glossary": {"de9": "wört7 wört8"}, "beam": 4, "max_length": 12, "markup": "markdown"}
    for markdown in ("de5 de9 `a b`", "`a b` de9", "de9 `a b` de4 `c`"):
        found = aligned.translate_document(markdown, **search)
        assert "wört7 wört8" in found.text
        assert "`a b`" in found.text


def test_marked_text_is_not_split(model: tfexport.Model) -> None:
    found = model.translate_document("Er ist bei ⟦Ja! Nein. So⟧ heute. Er geht.", keep_between="⟦ ⟧", beam=2)
    assert [one.source for one in found.sentences] == ["Er ist bei ⟦Ja! Nein. So⟧ heute.", "Er geht."]


@pytest.mark.parametrize("replace_unk", [False, True])
def test_markup_goes_with_words(aligned: tfexport.Model, replace_unk: bool) -> None:
    html = "<p>de5 <b>de9 <i>de7</i></b> nothing <code>x y</code> de4.</p><ul><li>de6 <img src=a> <a href='?b'>de8</a></ul>"
    one = aligned.translate_document(html, markup="html", replace_unk=replace_unk)
    assert sorted(tags(one.text)) == sorted(tags(html))
    assert is_balanced([tag for tag in tags(one.text) if "li>" not in tag])
    assert "<code>x y</code>" in one.text
    assert one.sentences[0].source == "de5 de9 de7 nothing x y de4."
    markdown = aligned.translate_document("# de5 **de9** `a b`\n\n```\nde5\n```\n", markup="markdown")
    assert markdown.text.count("**") == 2
    assert markdown.text.endswith("\n\n```\nde5\n```\n")


def records(found: Outcome) -> list[dict[str, Any]]:
    return [json.loads(line) for line in found.lines]


TEXT = "de5 de6. de9!\n\n  de10 de12.  de7 de8.\r\n--\n\xa0\nde11\n"


def test_lines_match_and_white_space_stays(run: Run, tiny_bundle: Path, model: tfexport.Model) -> None:
    flags = ("decode", tiny_bundle, "--split", "sentences", "--language", "de", "--threads", "1")
    found = run(*flags, stdin=TEXT.encode())
    expected = model.translate_document(TEXT, language="de")
    assert found.raw.decode() == expected.text
    assert found.raw.count(b"\n") == TEXT.count("\n")
    lines = records(run(*flags, "--output-format", "jsonl", stdin=TEXT.encode()))
    assert [one["line"] for one in lines] == list(range(1, 7))
    assert "".join(f"{one['text']}\n" for one in lines) == expected.text
    for line, one in zip(TEXT.split("\n"), lines, strict=False):
        for sentence in one["sentences"]:
            assert line[sentence["start"] : sentence["end"]] == sentence["source"]
            assert sentence["hypotheses"][0]["score"] < 0


def test_odd_bytes(run: Run, tiny_bundle: Path) -> None:
    flags = ("decode", tiny_bundle, "--split", "sentences", "--language", "de", "--threads", "1")
    assert run(*flags, stdin=b"").raw == b""
    assert run(*flags, stdin=b" \t\n\n\x0c\n").raw == b" \t\n\n\x0c\n"
    assert run(*flags, stdin=b"\xef\xbb\xbf \r\n").raw == b"\xef\xbb\xbf \r\n"
    found = run(*flags, stdin=b"de5.\n\xff\xfe\nde6.")
    assert found.raw.split(b"\n")[1] == b""
    assert "line 2: invalid_utf8" in found.stderr
    spaced = run(*flags, stdin="de5.\nde6 B\xa0. de7 C\u3000.\n".encode())
    assert (spaced.code, spaced.raw.count(b"\n")) == (0, 2)
    long = run(*flags, stdin=b"de5 " * 3000)
    assert "was cut: " in long.stderr
    assert len(long.raw.split(b"\n")) == 2


def test_columns(run: Run, tiny_bundle: Path, model: tfexport.Model) -> None:
    one = model.translate("de5 de6").text
    flags = ("decode", tiny_bundle, "--threads", "1", "--column")
    found = run(*flags, "2", stdin=b"a\tde5 de6\t c\nx\n\ny\t de5 de6 \r\n")
    assert found.raw.decode() == f"a\t{one}\t c\nx\n\ny\t {one} \r\n"
    assert "line 2: missing_column" in found.stderr
    named = run(*flags, "text", stdin=b"id\ttext\n1\tde5 de6\n")
    assert named.code == 0, named.stderr
    assert named.raw.decode() == f"id\ttext\n1\t{one}\n"
    [record] = records(run(*flags, "2", "--output-format", "jsonl", stdin=b"a\tde5 de6\tc\n"))
    assert (record["sentences"][0]["start"], record["sentences"][0]["end"]) == (2, 9)
    assert "no column is called 'x'" in run(*flags, "x", stdin=b"id\ttext\n").stderr
    assert "counted from 1" in run(*flags, "0", stdin=b"a\n").stderr
    assert "no column is called '999" in run(*flags, "9" * 5000, stdin=b"id\ttext\n").stderr


def test_whole_documents(run: Run, aligned_bundle: Path, tmp_path: Path) -> None:
    html = "<p>de5 <b>de9</b>.</p>\n<script>de5</script>\n\n<!-- de6 -->"
    flags = ("decode", aligned_bundle, "--threads", "1", "--language", "de", "--markup")
    found = run(*flags, "html", stdin=html.encode()).raw.decode()
    assert tags(found) == tags(html)
    assert found.endswith("</p>\n<script>de5</script>\n\n<!-- de6 -->")
    cell = run(*flags, "html", "--column", "1", stdin=b"de5 <b>de9</b>\t<i>de5</i>\n").raw.decode()
    assert cell.endswith("\t<i>de5</i>\n")
    assert "not UTF-8" in run(*flags, "html", stdin=b"\xff").stderr
    assert "more than" in run(*flags, "html", stdin=b"a\n" * 600_000).stderr
    assert "--resume" in run(*flags, "html", "-o", tmp_path / "x", "--resume", stdin=b"").stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--prefix-column",),
        ("--stream",),
        ("--input-format", "tokens"),
        ("--output-format", "ids"),
        ("--alignments", "hard"),
        ("--beam", "2", "--nbest", "2"),
        ("--samples", "2"),
    ],
)
def test_flags_without_a_meaning_are_refused(run: Run, tiny_bundle: Path, flags: tuple[str, ...]) -> None:
    found = run("decode", tiny_bundle, "--split", "lines", *flags)
    assert found.code == 2
    assert "--split" in found.stderr


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_goes_on_after_whole_lines(run: Run, tiny_bundle: Path, tmp_path: Path, workers: int) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    random_lines = random.Random(3)
    source.write_text("".join(random_line(random_lines) + "\n" for _ in range(40)))
    flags = ("decode", tiny_bundle, source, "-o", out, "--split", "sentences", "--language", "de")
    flags += ("--batch-size", "1", "--workers", str(workers), "--threads", "1", "--output-format", "jsonl")
    assert run(*flags).code == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    for done in (0, 1, 7, 23, 40):
        out.unlink(missing_ok=True)
        # What a run leaves that is ended: the lines so far, and what they are of.
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr("tfexport.commands.decode.write_documents", ended)
            run(*flags)
        partial = tmp_path / "out.jsonl.partial"
        partial.write_bytes(b"".join(lines[:done]) + (lines[done][:9] if done < len(lines) else b""))
        assert run(*flags, "--resume").code == 0
        assert out.read_bytes() == whole


def ended(*_: object) -> None:
    raise KeyboardInterrupt
