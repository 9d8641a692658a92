"""Word alignments and replaced unknown tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase

from tests.support.fakes import (
    ATTENTION_HEADS,
    ATTENTION_LAYERS,
    ScriptedRuntime,
    attention_of,
    echo_model,
    random_model,
    tiny_config,
)
from tfexport.decoding.alignments import Aligner, AlignmentFormat, Replacement, read_dictionary
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.translate import Result, Writer, translate
from tfexport.errors import TfexportError
from tfexport.search.hypothesis import SourceTokens
from tfexport.search.search import Hypothesis, SearchOptions
from tfexport.text.tokenizers import TextTokenizer, word_tokenizer
from tfexport.training.vocabulary import train_bpe

CONFIG = tiny_config(
    src_vocab_size=8, tgt_vocab_size=8, unk_id=3, n_decoder_layers=ATTENTION_LAYERS, n_heads=ATTENTION_HEADS, d_model=6
)

UNK = 3
ATTENTION = np.array([[0.1, 0.6, 0.3, 0.0], [0.0, 0.1, 0.2, 0.7], [0.2, 0.5, 0.25, 0.05]])
SOURCE = SourceTokens(("<s>", "Haus", "Müller", "</s>"), 1, 3)
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c", "d"]
VOCABULARY = word_tokenizer({word: index for index, word in enumerate(WORDS)})


def results(lines: list[bytes], model: Any, format: Any = "text", **options: Any) -> list[Result]:
    reader = Reader(CONFIG, VOCABULARY, format, tells_tokens=True)
    options = {"attention": True, "max_length": 8, **options}
    return list(translate(ScriptedRuntime(model, CONFIG), reader, lines, SearchOptions(**options), batch_size=3))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("hard", "0-0 0-2 1-1"),  # the end has most of the second token, and is no part of it
        ("1", "0-0 0-2 1-1"),
        ("0.25", "0-0 0-2 1-0"),  # above it, as in Marian
        ("0", "0-0 0-1 0-2 1-0 1-1 1-2"),
        ("0.9", ""),
        ("soft", "0.6000,0.3000 0.1000,0.2000 0.5000,0.2500"),
    ],
)
def test_alignments_are_written_as_marian_does(given: str, text: str) -> None:
    assert AlignmentFormat.parse(given).text(ATTENTION, SOURCE) == text


@pytest.mark.parametrize("given", ["", "-0.1", "1.5", "nan", "harder"])
def test_other_formats_are_refused(given: str) -> None:
    with pytest.raises(TfexportError, match="Give hard, soft, or a threshold between 0 and 1"):
        AlignmentFormat.parse(given)


def test_a_source_without_own_tokens_aligns_nothing() -> None:
    empty = SourceTokens(("<s>", "</s>"), 1, 1)
    for given in ("hard", "0.1"):
        assert AlignmentFormat.parse(given).text(ATTENTION[:, :2], empty) == ""
    assert Replacement(UNK).words([UNK, UNK, UNK], ATTENTION[:, :2], empty) == {}
    assert AlignmentFormat.parse("hard").text(ATTENTION[:0], SOURCE) == ""  # nor does an empty output


def test_unknown_tokens_become_what_they_attended_to() -> None:
    words = Replacement(UNK).words([UNK, 5, UNK, 2], ATTENTION, SOURCE)
    assert words == {0: "Haus", 2: "Haus"}
    assert Replacement(UNK, {"Haus": "big house"}).words([4, UNK], ATTENTION, SOURCE) == {1: "Müller"}
    assert Replacement(UNK, {"Haus": "big house"}).words([UNK], ATTENTION, SOURCE) == {0: "big house"}


def test_dictionaries(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_text("\ufeffHaus\tbig house\n\nMüller\tMiller \r\nHaus\tbig house\n", encoding="utf-8")
    assert read_dictionary(path) == {"Haus": "big house", "Müller": "Miller"}
    for content, message in (
        ("Haus house\n", "line 1 of .* is not a source word, a tab and a translation"),
        ("a\tb\nHaus\t\n", "line 2 of .* is not"),
        ("a\tb\tc\n", "line 1 of .* is not"),
        ("a\tb\nc\td\na\te\n", "line 3 of .* gives 'a' a second translation"),
    ):
        path.write_text(content)
        with pytest.raises(TfexportError, match=message):
            read_dictionary(path)
    path.write_bytes(b"\xff\t\n")
    with pytest.raises(TfexportError, match="cannot read the dictionary"):
        read_dictionary(path)
    with pytest.raises(TfexportError, match="no unknown token to replace"):
        Replacement.of(CONFIG.replace(unk_id=-1), None)


def test_what_the_model_puts_around_a_text_is_not_its_own() -> None:
    framed = VOCABULARY.framed([7], [6], "")
    config = CONFIG.replace(source_bos=True)
    assert SourceTokens.of([1, 7, 4, UNK, 6, 2], config, framed, ["a", "Müller"]) == SourceTokens(
        ("<s>", "d", "a", "Müller", "c", "</s>"), 2, 4
    )
    # Ids are as they are: what looks like a frame is one.
    assert SourceTokens.of([4, UNK], config, framed) == SourceTokens(("a", "<unk>"), 0, 2)
    assert SourceTokens.of([4, 2], CONFIG, None) == SourceTokens(("4", "2"), 0, 1)
    assert SourceTokens.of([2], CONFIG, None) == SourceTokens(("2",), 0, 0)


def test_tokens_are_what_the_text_has() -> None:
    assert VOCABULARY.written("a  Müller b") == ["a", "Müller", "b"]
    inner = Tokenizer(WordLevel({"<unk>": 0, "müller": 1}, unk_token="<unk>"))
    inner.normalizer = Lowercase()
    assert TextTokenizer(inner).written("MÜLLER") == ["MÜLLER"]
    spacy = word_tokenizer({"<unk>": 0, "der": 1}, lowercase=True, spacy_language="de")
    assert spacy.written("Der Müller, nicht?") == ["Der", "Müller", ",", "nicht", "?"]
    subwords = train_bpe(["ein Hund läuft", "ein Haus"] * 20, vocab_size=275)
    text = "ein Hündchen läuft"
    written = subwords.written(text)
    assert len(written) == len(subwords.encode(text))
    assert {"ein", "läuft"} <= set(written)
    assert set("".join(written)) == set(text) - {" "}
    assert subwords.framed([], [], "2en: ").written("ein")[-1] == "ein"
    codes: Any = SimpleNamespace(split=lambda words: [part for word in words for part in (f"{word[:2]}@@", word[2:])])
    assert replace(VOCABULARY, subwords=codes).written("Müller lacht") == ["Mü", "ller", "la", "cht"]


@pytest.mark.parametrize("beam", [1, 3])
def test_each_line_has_the_alignment_of_its_own_source(beam: int) -> None:
    """Also where others cannot be decoded, and batches are sorted by length."""
    lines = [b"a b", b"", b"d", b"a b c d a b c", b"\xff", b"c Z"]
    writer = Writer(CONFIG, VOCABULARY, "text", Aligner(CONFIG.eos_id, AlignmentFormat.parse("hard")))
    for line, result in zip(lines, results(lines, random_model(3, 8), beam=beam, nbest=beam), strict=True):
        written = writer.line(result).split("\t")
        if not result.hypotheses:
            assert written == [""]
            continue
        ids = (*VOCABULARY.encode(line.decode()), 2)
        for hypothesis, one in zip(result.hypotheses, written, strict=True):
            own = [index for index in hypothesis.ids if index != 2]
            wanted = sorted(
                (int(attention_of(ids, hypothesis.ids[:t])[-1].mean(axis=0)[:-1].argmax()), t) for t in range(len(own))
            )
            assert one == f"{VOCABULARY.decode(own)} ||| {' '.join(f'{s}-{t}' for s, t in wanted)}"


def test_json_has_all_numbers_and_says_which_tokens_are_the_texts() -> None:
    writer = Writer(CONFIG, VOCABULARY, "jsonl", Aligner(CONFIG.eos_id, AlignmentFormat.parse("0.4")))
    [result] = results([b"a Z b"], random_model(3, 8))
    record = json.loads(writer.line(result))
    assert record["source_tokens"] == ["a", "Z", "b", "</s>"]
    assert record["source_text"] == [0, 3]
    [found], [hypothesis] = record["hypotheses"], result.hypotheses
    wanted = [attention_of((4, UNK, 5, 2), hypothesis.ids[:t])[-1].mean(axis=0) for t in range(len(hypothesis.ids))]
    np.testing.assert_allclose(found["attention"], wanted, atol=6e-5)
    assert len(found["attention"]) == len(found["ids"])
    assert found["alignment"] == [
        [s, t] for s in range(3) for t in range(len([i for i in hypothesis.ids if i != 2])) if wanted[t][s] > 0.4
    ]
    plain = json.loads(Writer(CONFIG, VOCABULARY, "jsonl").line(result))
    assert "source_tokens" not in plain
    assert "attention" not in plain["hypotheses"][0]


@pytest.mark.parametrize(("format", "text"), [("text", "b {0} a {1}"), ("tokens", "b {0} a {1}")])
def test_unknown_words_are_copied_from_the_line(format: Any, text: str) -> None:
    """The fake says its source, unknown words as the unknown token; what it attends to is drawn."""
    line = b"b Zwerg a Riese"
    writer = Writer(CONFIG, VOCABULARY, format, Aligner(CONFIG.eos_id, None, Replacement(UNK)))
    [result] = results([line], echo_model(8))
    ids = (5, UNK, 4, UNK, 2)
    assert result.hypotheses[0].ids == ids
    places = [int(attention_of(ids, ids[:t])[-1].mean(axis=0)[:-1].argmax()) for t in (1, 3)]
    wanted = text.format(*(line.decode().split()[place] for place in places))
    assert writer.line(result) == wanted
    record = json.loads(Writer(CONFIG, VOCABULARY, "jsonl", writer.aligner).line(result))["hypotheses"][0]
    assert (record["text"], record["ids"]) == (wanted, list(ids))
    assert record["tokens"] == [*wanted.split(), "</s>"]


def test_text_around_a_replaced_token_is_decoded_as_ever() -> None:
    writer = Writer(CONFIG, VOCABULARY, "text")
    assert writer.text([UNK, 4, 5, UNK, UNK, 2], {0: "X", 3: "New\tYork", 4: "Z"}) == "X a b New York Z"
    assert writer.text([4, UNK, 2]) == "a <unk>"
    assert Hypothesis((4,), 0.0, 0.0, True).attention is None
