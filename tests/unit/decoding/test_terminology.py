"""What lines say of the phrases of their outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.fakes import ScriptedRuntime, random_model, tiny_config
from tfexport.decoding.glossary import Entry, Glossary, read_glossary
from tfexport.decoding.line_reader import Piece, Reader, TargetReader
from tfexport.decoding.terminology import Terminology, phrases_in
from tfexport.decoding.translate import Result, Writer, translate
from tfexport.errors import TfexportError
from tfexport.search.hypothesis import Source
from tfexport.search.phrase_rules import PhraseRules
from tfexport.search.search import SearchOptions
from tfexport.text.tokenizers import TextTokenizer, word_tokenizer

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefgh"]
CONFIG = tiny_config(
    src_vocab_size=len(WORDS), tgt_vocab_size=len(WORDS), max_source_length=9, max_target_length=12, unk_id=3
)
VOCABULARY = word_tokenizer({word: index for index, word in enumerate(WORDS)}, lowercase=True)
TARGET = TargetReader(CONFIG, VOCABULARY, "text")
KEEP = ("[", "]")


def run(lines: list[bytes], terms: Terminology, outputs: TargetReader | None = None, **options: Any) -> list[Result]:
    reader = Reader(CONFIG, VOCABULARY, "text", terms=terms)
    runtime = ScriptedRuntime(random_model(4, len(WORDS)), CONFIG)
    search = SearchOptions(**{"beam": 3, "max_length": 10, **options})
    return list(translate(runtime, reader, lines, search, outputs=outputs, batch_size=2))


def required(result: Result) -> list[str]:
    assert result.source is not None
    return [phrase.text for phrase in result.source.required]


def has(result: Result, *ids: int) -> bool:
    best = result.hypotheses[0].ids
    return any(best[place : place + len(ids)] == ids for place in range(len(best)))


def test_columns_are_phrases() -> None:
    found = run([b"a b\tc  d\te", b"a", b"a\t\t f \t", b"\tc"], Terminology(TARGET, columns=True))
    assert [required(one) for one in found[:3]] == [["c d", "e"], [], ["f"]]
    assert found[3].status == "empty"
    assert has(found[0], 6, 7)
    assert has(found[0], 8)
    assert has(found[2], 9)


def test_columns_come_after_a_prefix() -> None:
    found = run([b"a\tg\tc", b"a\tg", b"a"], Terminology(TARGET, columns=True), TARGET)
    assert [required(one) for one in found] == [["c"], [], []]
    assert [one.source.prefix for one in found if one.source] == [(10,), (10,), ()]


def test_phrases_come_from_a_file() -> None:
    terms = Terminology(TARGET, phrases=phrases_in([b"c d\te\n", b"\n", b"f\r\n"]))
    found = run([b"a\tb", b"a", b"b"], terms)
    assert [required(one) for one in found] == [["c d", "e"], [], ["f"]]
    for lines in (1, 3):
        terms = Terminology(TARGET, phrases=phrases_in([b"c", b"d"]))
        with pytest.raises(TfexportError, match="more lines of the"):
            run([b"a"] * lines, terms)


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        (b"a\tc x", "unknown_token", "'c x' has words that the target vocabulary lacks"),
        (b"a\t</s>", "invalid_phrases", "the end of outputs"),
        (b"a\t\xff", "invalid_utf8", "is not UTF-8"),
        (b"a\t" + b"c " * 13, "invalid_phrases", "its phrases have 13 ids, the model writes at most 12"),
        (b"a\tc\t" + b"d " * 5000, "too_long", "more than 8,192 bytes"),
        (b"a [b", "invalid_phrases", "'[' has no ']' after it"),
        (b"a\tc <unk>", "invalid_phrases", "'c <unk>' has a special token, id 3"),
        (b"a\t<pad>", "invalid_phrases", "a special token, id 0"),
        (b"a\t<s>", "invalid_phrases", "a special token, id 1"),
        (b"a b]", "invalid_phrases", "']' has no '[' before it"),
        (b"a [[b] c]", "invalid_phrases", "'[' occurs again before ']'"),
        (b"a [ ] c", "invalid_phrases", "'[' and ']' have no text between them"),
        (b"a [x] c", "unknown_token", "lacks"),
        (b"a [B] c", "unknown_token", "'B' cannot be copied: the target vocabulary writes it as 'b'"),
        (b"\xff [b]", "invalid_utf8", "byte 1"),
    ],
)
def test_what_cannot_be_required_is_marked(line: bytes, status: str, message: str) -> None:
    bad, good = run([line, b"a"], Terminology(TARGET, columns=True, keep=KEEP))
    assert bad.status == status
    assert message in bad.message
    assert not bad.hypotheses
    assert good.hypotheses


def test_marked_text_is_copied_and_its_marks_are_left_out() -> None:
    found = run([b"a [b c] d [e]", b"a b c d e", b"[h]"], Terminology(TARGET, keep=KEEP))
    assert [required(one) for one in found] == [["b c", "e"], [], ["h"]]
    assert found[0].source is not None
    assert found[1].source is not None
    assert found[0].source.ids == found[1].source.ids
    assert has(found[0], 5, 6)
    assert has(found[0], 8)
    same = run([b"a |b c| d |e|"], Terminology(TARGET, keep=("|", "|")))
    assert required(same[0]) == ["b c", "e"]
    assert run([b"a |b"], Terminology(TARGET, keep=("|", "|")))[0].status == "invalid_phrases"


def test_a_glossary_does_not_look_into_marked_text(tmp_path: Path) -> None:
    path = tmp_path / "glossary"
    path.write_text("a\tf\nb\tg\nb c\th\na\td\tforbidden\n\te\tforbidden\n\tzzz\tforbidden\nc\tzzz\n")
    terms = Terminology(TARGET, columns=True, glossary=read_glossary(path, "text"), keep=KEEP)
    found = run([b"a [b] a\tc", b"b c", b"d", b"a [b]c"], terms, max_length=12)
    assert [required(one) for one in found[:3]] == [["c", "f", "b", "f"], ["h"], []]
    assert [[p.text for p in one.source.forbidden] for one in found[:3] if one.source] == [["e", "d"], ["e"], ["e"]]
    assert all(8 not in hypothesis.ids for one in found for hypothesis in one.hypotheses)
    assert not has(found[0], 7)
    assert (found[3].status, "'zzz'" in found[3].message) == ("unknown_token", True)
    with pytest.raises(TfexportError, match="the glossary has text, and the input is tokens"):
        terms.require_format("tokens")


def test_outputs_that_lack_phrases_have_a_status() -> None:
    [found] = run([b"a\tc d\te f g"], Terminology(TARGET, columns=True), max_length=3, beam=2, nbest=2)
    assert found.status == "phrases_missing"
    assert "the output lacks" in found.message
    lines = [Writer(CONFIG, VOCABULARY, format).line(found) for format in ("text", "jsonl")]
    assert len(lines[0].split("\t")) == len(found.hypotheses)
    assert '"missing": ["' in lines[1]
    assert '"status": "phrases_missing"' in lines[1]
    [met] = run([b"a\tc"], Terminology(TARGET, columns=True))
    assert "missing" not in Writer(CONFIG, VOCABULARY, "jsonl").line(met)


def test_ids_are_copied_where_both_sides_have_one_vocabulary() -> None:
    for tied, format in ((True, "ids"), (False, "tokens")):
        shared = TargetReader(CONFIG.replace(tie_source_target=tied), VOCABULARY, format)  # type: ignore[arg-type]
        Terminology(shared, keep=KEEP).require_format(format)  # type: ignore[arg-type]
    with pytest.raises(TfexportError, match="different vocabularies"):
        Terminology(TargetReader(CONFIG, VOCABULARY, "ids"), keep=KEEP).require_format("ids")


def _of_bytes(*words: str, space: bool = True) -> TextTokenizer:
    """A vocabulary of bytes.

    Args:
        space: it puts a space before a text.
    """
    letters = [*dict.fromkeys("".join(words))]
    steps = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    tokens = ["</s>", *letters, *(a + b for a, b in steps if a + b not in letters)]
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(dict.fromkeys(tokens))}, steps))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    inner.decoder = decoders.ByteLevel()
    return TextTokenizer(inner)


def _may_follow(tokenizer: TextTokenizer, forbidden: str, output: list[str]) -> bool:
    """Whether the last token of an output may follow the others where a phrase is forbidden."""
    config = tiny_config(tgt_vocab_size=tokenizer.size, pad_id=0, bos_id=0, eos_id=0)
    glossary = Glossary.of([Entry("", forbidden, True, "")])
    source = Terminology(TargetReader(config, tokenizer, "text"), glossary=glossary).applied(Source((1,)), [], [])
    *past, last = tokenizer.ids(output)
    allowed = np.ones((1, tokenizer.size), dtype=bool)
    PhraseRules([source], tokenizer.size).ban(allowed, np.array([past], dtype=np.int64).reshape(1, -1), [0])
    return bool(allowed[0, last])


@pytest.mark.parametrize(
    ("forbidden", "output", "is_allowed"),
    [
        ("over", ["Ġover"], False),
        ("over", ["Ġa", "Ġover"], False),
        ("over", ["over"], False),  # no tokenizer splits so, but a model may write it
        ("over", ["Ġa", "-", "over"], False),
        ("over", ["Ġa", "over"], True),  # a longer word
        ("over", ["Ġa", "-", "Ġa"], True),
        ("so", ["Ġa", "-", "s", "o"], False),
        ("so", ["Ġa", "s", "o"], True),
        (".", ["Ġover", "."], False),
        (".", ["Ġ.", "."], False),
        (".", ["Ġa", "Ġ."], False),
        (".", ["Ġa", "-"], True),
    ],
)
def test_forbidden_phrases_also_directly_after_other_text(forbidden: str, output: list[str], is_allowed: bool) -> None:
    tokenizer = _of_bytes("Ġover", "over", "Ġa", "Ġ.", "-", "s", "o")
    assert _may_follow(tokenizer, forbidden, output) == is_allowed


@pytest.mark.parametrize(
    ("output", "is_allowed"),
    [(["over"], False), (["Ġa", "Ġover"], False), (["Ġa", "-", "over"], False), (["Ġa", "over"], True)],
)
def test_a_vocabulary_without_a_space_at_the_start_forbids_no_longer_words(output: list[str], is_allowed: bool) -> None:
    tokenizer = _of_bytes("Ġover", "over", "Ġa", "a", "-", space=False)
    assert _may_follow(tokenizer, "over", output) == is_allowed


def test_a_required_phrase_with_a_forbidden_one_in_it_is_impossible() -> None:
    tokenizer = _of_bytes("Ġover", "over", "Ġa", "-")
    config = tiny_config(tgt_vocab_size=tokenizer.size, pad_id=0, bos_id=0, eos_id=0)
    glossary = Glossary.of([Entry("", "over", True, "")])
    source = Terminology(TargetReader(config, tokenizer, "text"), glossary=glossary).applied(Source((1,)), [], [])
    rules = PhraseRules([source], tokenizer.size)
    found = [rules.forbid(tuple(tokenizer.ids(one)), 0) for one in (["Ġa", "-", "over"], ["Ġa", "over"])]
    assert found == [True, False]


def test_phrases_are_read_as_they_stand_inside_a_sentence() -> None:
    """Of bytes: `Ġb` after another word, and `b` where a sentence begins."""
    inner = Tokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2, "Ġ": 3, "Ġa": 4, "Ġb": 5}, [("Ġ", "a"), ("Ġ", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    config = tiny_config(tgt_vocab_size=6, pad_id=0, bos_id=0, eos_id=0)
    glossary = Glossary.of([Entry("x", "b", False, ""), Entry("", "a", True, "")])
    terms = Terminology(TargetReader(config, TextTokenizer(inner), "text"), glossary=glossary)
    found = terms.applied(Source((1,)), [Piece("x", False)], [b"a b"])
    assert [phrase.ids for phrase in found.required] == [(4, 5), (5,)]
    assert [phrase.ids for phrase in found.forbidden] == [(4,), (1,)]
