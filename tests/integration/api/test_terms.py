"""Phrases that outputs have to have, from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import tfexport
from tfexport.cli import app
from tfexport.errors import TfexportError

TEXTS = ["de4 de5 de6", "de9", "de17 de20 de11 de8 de29", "de4"]


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> tfexport.Model:
    return tfexport.load(tiny_bundle, threads=1)


def test_outputs_have_the_phrases_that_they_are_told(model: tfexport.Model, tiny_bundle: Path, tmp_path: Path) -> None:
    phrases = [["wört7 wört8", "wört9"], [], ["wört30"], []]
    found = model.translate(TEXTS, constraints=phrases, beam=4, nbest=2)
    for result, required in zip(found, phrases, strict=True):
        assert all(phrase in output.text for output in result.hypotheses for phrase in required)
    assert [found[1], found[3]] == model.translate([TEXTS[1], TEXTS[3]], beam=4, nbest=2)
    assert model.translate(TEXTS[0], constraints=phrases[0], beam=4, nbest=2) == found[0]
    assert list(model.iterate(iter(TEXTS), constraints=iter(phrases), beam=4, nbest=2)) == found
    steps = model.stream(TEXTS[0], constraints=phrases[0], beam=4)
    assert "".join(step.text for step in steps) == found[0].text
    (tmp_path / "phrases").write_text("wört7 wört8\twört9\n\nwört30\n\n", encoding="utf-8")
    command = [
        "decode",
        str(tiny_bundle),
        "--beam",
        "4",
        "--nbest",
        "2",
        "--constraint-file",
        str(tmp_path / "phrases"),
    ]
    lines = CliRunner().invoke(app, command, input="".join(f"{text}\n" for text in TEXTS).encode()).stdout.splitlines()
    assert lines == ["\t".join(output.text for output in result.hypotheses) for result in found]
    [short] = model.translate(TEXTS[:1], constraints=phrases[:1], beam=2, max_length=2)
    assert short.status == "phrases_missing"
    assert short.hypotheses[0].missing


def test_glossaries_and_marks(model: tfexport.Model, tmp_path: Path) -> None:
    (tmp_path / "glossary").write_text("de9\twört9\nDE4\twört4\nde5\twört5\tforbidden\n", encoding="utf-8")
    glossary = model.read_glossary(tmp_path / "glossary", case="ignore")
    texts = ["de4 de5 ⟦de6⟧", "de9"]
    plain = model.translate(["de4 de5 de6", "de9"], beam=4)
    # The target vocabulary has no de6, so it cannot be copied.
    found = model.translate([*texts, "de9 ⟦de9"], glossary=glossary, keep_between="⟦ ⟧", beam=4)
    assert [result.status for result in found] == ["unknown_token", found[1].status, "invalid_phrases"]
    assert "wört9" in found[1].text
    assert model.translate(texts[1], glossary=glossary, beam=4) == found[1] != plain[1]
    assert model.translate(texts[1], glossary={"de9": "wört9"}, beam=4) == found[1]
    exact = model.read_glossary(tmp_path / "glossary")
    wanted, ignored = (model.translate("de4", glossary=one, beam=4).text for one in (exact, glossary))
    assert "wört4" in ignored != wanted


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"constraints": "wört7"}, "constraints is 'wört7'. Give a list of strings for each sentence"),
        ({"constraints": ["wört7"]}, "constraints is 'wört7'. Give a list of strings for each sentence"),
        ({"constraints": [[7]]}, "constraints is 7. Give a string"),
        ({"constraints": [[], []]}, "more lines of the phrases than of the input"),
        ({"glossary": "glossary.tsv"}, "glossary is 'glossary.tsv'. Give what Model.read_glossary returns"),
        ({"glossary": {"de4": 5}}, "glossary has 5. Give phrases as strings"),
        ({"glossary": {" ": "x"}}, "glossary has ' '. Give phrases as strings"),
        ({"keep_between": "⟦"}, "keep_between is '⟦'. Give two marks"),
        ({"glossary": {"de4": "\ud800"}}, "glossary has '.ud800'. Give phrases that can be written as UTF-8"),
        ({"glossary": {"\ud800": "x"}}, "glossary has '.ud800'"),
        ({"keep_between": "\ud800 x"}, "not two marks in UTF-8"),
        ({"keep_between": ("", "")}, "keep_between is .'', ''., not two marks"),
        ({"keep_between": ("a b", "c")}, "not two marks"),
        ({"constraints": [[]], "samples": 2}, "required phrases need beam search"),
        ({"constraint_order": "sorted"}, "one of ordered, unordered"),
    ],
)
def test_wrong_terms_are_named(model: tfexport.Model, given: dict, error: str) -> None:
    with pytest.raises(TfexportError, match=error):
        model.translate(TEXTS[:1], **given)
