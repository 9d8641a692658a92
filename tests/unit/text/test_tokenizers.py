"""Vocabularies of every form give the same ids, odd ones are refused, and text comes back as it went in."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.support.text_models import TEXTS, trained_bpe
from tfexport.errors import RuntimeUnavailable, TokenizerError
from tfexport.text.tokenizers import (
    SPECIAL_NAMES,
    SplitAt,
    TextTokenizer,
    read_vocabulary,
    word_tokenizer,
)
from tfexport.training.vocabulary import BPE_SPECIALS, train_bpe, train_words

WORDS = ["<unk>", "<pad>", "<sos>", "<eos>", "a", "dog", "runs"]


def vocabulary(folder: Path, content: object, *, name: str = "vocab.json", **options: Any) -> TextTokenizer:
    """What is read from a file of these bytes, this text, or this value as JSON."""
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8", newline="")
    return read_vocabulary(path, **options)


# --- files


def test_every_form_of_one_vocabulary_reads_the_same(tmp_path: Path) -> None:
    by_word = {word: index for index, word in enumerate(WORDS)}
    forms: dict[str, object] = {
        "list.json": WORDS,
        "dict.json": by_word,
        "shuffled.json": dict(sorted(by_word.items(), reverse=True)),
        "lines.txt": "\n".join(WORDS) + "\n",
        "no-final-newline.txt": "\n".join(WORDS),
        "crlf.txt": "\r\n".join(WORDS) + "\r\n",
        "json-by-another-name": json.dumps(WORDS, indent=1),
        "tokenizer.json": word_tokenizer(by_word).inner.to_str(),
    }
    for name, content in forms.items():
        tokenizer = vocabulary(tmp_path, content, name=name)
        assert tokenizer.encode(" a zebra  runs\ta ") == [4, 0, 6, 4], name
        assert tokenizer.tokens([3, 5, 0]) == ["<eos>", "dog", "<unk>"], name
        assert tokenizer.decode([5, 6]) == "dog runs", name
        assert tokenizer.size == len(WORDS), name


def test_ids_of_a_dict_may_have_gaps(tmp_path: Path) -> None:
    tokenizer = vocabulary(tmp_path, {"<unk>": 3, "a": 10})
    assert tokenizer.encode("a b") == [10, 3]
    assert tokenizer.size == 11
    assert tokenizer.tokens([10, 4, 99]) == ["a", "<id:4>", "<id:99>"]


def test_a_word_is_what_stands_between_newlines(tmp_path: Path) -> None:
    """Other characters at which Python's splitlines() splits may be part of a word, and would shift all ids after it."""
    tokenizer = vocabulary(tmp_path, "<unk>\nx\u2028y\nz\x0c\x1c\n[1\n", name="lines.txt")
    assert tokenizer.tokens(range(4)) == ["<unk>", "x\u2028y", "z\x0c\x1c", "[1"]


def test_a_byte_order_mark_is_not_part_of_the_first_word(tmp_path: Path) -> None:
    for name, content in (("lines.txt", "<unk>\na\n"), ("list.json", '["<unk>", "a"]')):
        assert vocabulary(tmp_path, b"\xef\xbb\xbf" + content.encode(), name=name).encode("a b") == [1, 0]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("v.json", ["a", "b", "a", "c", "c"], r"words twice: \['a', 'c'\]"),
        ("v.txt", "a\nb\na\n", r"words twice: \['a'\]"),
        ("v.json", {"a": 0, "b": 0}, "one id to several words"),
        ("v.json", '{"a": 0, "b": 1, "a": 2}', "twice"),
        ("v.json", '["a", ', "not valid JSON"),
        ("v.json", "a\nb\n", "not valid JSON"),
        ("v.json", "[" * 100_000, "not valid JSON"),
        ("v.json", "", "not valid JSON"),
        ("v.txt", "", "not a vocabulary"),
        ("v.json", [], "not a vocabulary"),
        ("v.json", {}, "not a vocabulary"),
        ("v.json", 42, "not a vocabulary"),
        ("v.json", ["a", 1], "not a vocabulary"),
        ("v.json", {"a": -1}, "not a vocabulary"),
        ("v.json", {"a": 1.0}, "not a vocabulary"),
        ("v.json", {"a": True}, "not a vocabulary"),
        ("v.json", {"a": "0"}, "not a vocabulary"),
        ("v.json", {"a": 2**32}, "not a vocabulary"),
        ("v.json", b'["\\ud800"]', "not a vocabulary"),
        ("v.json", {"model": {"type": "Nonsense"}}, "not a tokenizer"),
        ("v.txt", b"a\n\xff\n", "cannot read"),
    ],
)
def test_what_is_not_a_vocabulary_is_refused_with_its_name(
    name: str, content: object, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerError, match=problem) as caught:
        vocabulary(tmp_path, content, name=name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.txt", tmp_path):
        with pytest.raises(TokenizerError, match="cannot read the vocabulary"):
            read_vocabulary(path)


def test_a_tokenizer_with_its_own_rules_takes_no_others(tmp_path: Path) -> None:
    content = word_tokenizer({"<unk>": 0}).inner.to_str()
    for options in ({"lowercase": True}, {"spacy_language": "de"}):
        with pytest.raises(TokenizerError, match="its own normalisation"):
            vocabulary(tmp_path, content, **options)


def test_a_tokenizer_that_cuts_pads_and_adds_reads_text_whole_and_bare(tmp_path: Path) -> None:
    """Files made for training cut and pad; a decoder must see the line as it is."""
    inner = word_tokenizer({word: index for index, word in enumerate(WORDS)}).inner
    inner.enable_truncation(2)
    inner.enable_padding(length=8, pad_id=1, pad_token="<pad>")
    inner.post_processor = processors.TemplateProcessing(
        single="<sos> $A <eos>", special_tokens=[("<sos>", 2), ("<eos>", 3)]
    )
    assert vocabulary(tmp_path, inner.to_str()).encode("a dog runs a") == [4, 5, 6, 4]


# --- words


def test_lowercase_is_for_text_and_not_for_tokens(tmp_path: Path) -> None:
    tokenizer = vocabulary(tmp_path, [*WORDS, "größe"], lowercase=True)
    assert tokenizer.encode("A DOG GRÖSSE Größe") == [4, 5, 0, 7]
    assert tokenizer.ids(["A", "a"]) == [0, 4]
    assert vocabulary(tmp_path, WORDS).encode("A a") == [0, 4]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in SPECIAL_NAMES.items() for name in names])
def test_special_tokens_are_found_under_their_usual_names(kind: str, name: str) -> None:
    tokenizer = word_tokenizer({"a": 0, "b": 1, name: 2})
    assert tokenizer.special_id(kind) == 2
    assert [tokenizer.special_id(other) for other in SPECIAL_NAMES if other != kind] == [None] * 3
    assert tokenizer.tokens([2]) == [name]


def test_the_unknown_token_may_have_any_usual_name() -> None:
    for name in SPECIAL_NAMES["unk"]:
        tokenizer = word_tokenizer({"a": 0, name: 1})
        assert tokenizer.encode("a zebra") == tokenizer.ids(["a", "zebra"]) == [0, 1]


def test_without_an_unknown_token_an_unknown_word_is_an_error() -> None:
    tokenizer = word_tokenizer({"a": 0})
    assert tokenizer.encode("a a") == tokenizer.ids(["a", "a"]) == [0, 0]
    with pytest.raises(TokenizerError, match="unknown token"):
        tokenizer.encode("a zebra")
    with pytest.raises(TokenizerError, match="'zebra' is not in the vocabulary"):
        tokenizer.ids(["a", "zebra"])


def test_words_are_kept_that_are_frequent_enough() -> None:
    texts = ["a a a b b c", "b A d\td"]
    for min_frequency, words in ((1, "abcdA"), (2, "abd"), (3, "ab"), (4, "")):
        tokenizer = train_words(texts, min_frequency=min_frequency)
        assert set(tokenizer.inner.get_vocab()) == {*BPE_SPECIALS, *words}
        assert tokenizer.tokens(range(4)) == list(BPE_SPECIALS)
        assert tokenizer.size == 4 + len(words)
    assert set(train_words(texts, lowercase=True, min_frequency=4).inner.get_vocab()) == {*BPE_SPECIALS, "a"}
    assert train_words(texts, min_frequency=1, vocab_size=6).size == 6
    assert {"a", "b"} < set(train_words(texts, min_frequency=1, vocab_size=6).inner.get_vocab())


def test_trained_words_round_trip() -> None:
    tokenizer = train_words(TEXTS, min_frequency=1)
    for text in TEXTS[:3]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("zebra dog") == [0, *tokenizer.encode("dog")]


def test_words_that_spell_special_tokens_do_not_move_them() -> None:
    """A model is built for ids 0 to 3; a corpus that writes its rare words as <unk> is common."""
    tokenizer = train_words(["a <unk> b </s>", "<pad> <s> <unk> a"], min_frequency=1)
    assert tokenizer.tokens(range(4)) == list(BPE_SPECIALS)
    assert [tokenizer.special_id(kind) for kind in ("unk", "pad", "bos", "eos")] == [0, 1, 2, 3]
    assert tokenizer.encode("zebra") == [0]
    assert tokenizer.size == 6


# --- subwords


def test_bpe_learns_merges_up_to_its_size() -> None:
    bpe = trained_bpe()
    assert bpe.size == 290
    assert bpe.tokens(range(4)) == list(BPE_SPECIALS)
    assert [bpe.special_id(kind) for kind in ("unk", "pad", "bos", "eos")] == [0, 1, 2, 3]
    assert bpe.encode("the dog") == bpe.encode(" the dog")  # a word at the start is the word elsewhere
    assert len(bpe.encode("the dog")) == 2


# Characters that this Python's Unicode tables do not know yet may have a normal form in the library's.
@given(st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=30))
@settings(max_examples=200, deadline=None, derandomize=True)
@example("</s>")
@example("a </s><pad> <unk> <s>x")
@example("e\u0301 \u212b \ufb01 \U0001f469\u200d\U0001f680 \x00 \u2028 \ufeff \ufffd")
@example("  two  spaces\t\ttabs\r\nlines ")
@example("' 's n't \U0010ffff\ud7ff")
def test_bpe_gives_back_exactly_what_it_read(text: str) -> None:
    tokenizer = trained_bpe()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text).strip()
    # Text that spells a special token is text.
    assert not {0, 1, 2, 3} & set(ids)
    # What it writes as tokens it reads as tokens.
    assert tokenizer.ids(tokenizer.tokens(ids)) == ids


def test_bpe_trained_on_text_that_spells_special_tokens_does_not_learn_them() -> None:
    tokenizer = train_bpe(["</s></s> </s> <unk> <pad> <s>"] * 50, vocab_size=400)
    assert tokenizer.tokens(range(4)) == list(BPE_SPECIALS)
    assert len(set(tokenizer.tokens(range(tokenizer.size)))) == tokenizer.size
    for name in BPE_SPECIALS:
        assert min(tokenizer.encode(name)) > 3
        assert tokenizer.decode(tokenizer.encode(f"a{name}b")) == f"a{name}b"


def test_bpe_may_be_lower_case() -> None:
    tokenizer = train_bpe(TEXTS, vocab_size=270, lowercase=True)
    assert tokenizer.decode(tokenizer.encode("GRÖSSER Als")) == "grösser als"


# --- written and read


def test_a_tokenizer_survives_being_written() -> None:
    bpe = trained_bpe()
    words = word_tokenizer({word: index for index, word in enumerate(WORDS)}, lowercase=True, spacy_language="en")
    for tokenizer in (bpe, train_words(TEXTS, min_frequency=1), words):
        again = TextTokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())), where="here")
        assert again.to_dict() == tokenizer.to_dict()
        assert again.spacy_language == tokenizer.spacy_language
        assert again.size == tokenizer.size
    again = TextTokenizer.from_dict(bpe.to_dict(), where="here")
    # That special tokens are not read from text is not in the file of the library.
    for text in (*TEXTS, "a </s> b", "<unk>"):
        assert again.encode(text) == bpe.encode(text)


@pytest.mark.parametrize("fields", [{}, {"tokenizer": None}, {"tokenizer": {"model": 3}}, None, [1]])
def test_what_is_not_a_tokenizer_is_refused_with_its_place(fields: Any) -> None:
    with pytest.raises(TokenizerError, match=r"model\.safetensors is not a tokenizer"):
        TextTokenizer.from_dict(fields, where="model.safetensors")


# --- spaCy


def test_spacy_splits_words_as_the_tutorials_do() -> None:
    pytest.importorskip("spacy", reason="the spacy extra is not installed")
    words = {word: index for index, word in enumerate(["<unk>", "ein", "hund", ",", "rennt", "!", "z.b.", "don't"])}
    german = word_tokenizer(words, lowercase=True, spacy_language="de")
    assert german.encode("Ein Hund, z.B. rennt!") == [1, 2, 3, 6, 4, 5]
    assert german.decode(german.encode("Ein Hund!")) == "ein hund !"
    # To spaCy a second space is a word, so to these models it was an unknown one.
    assert german.encode("ein  hund") == [1, 0, 2]
    # Only spaCy: the words it keeps are not split again, and another language has other rules.
    assert word_tokenizer(words, lowercase=True).encode("Ein Hund, rennt!") == [1, 0, 0]
    assert word_tokenizer(words, spacy_language="en").encode("don't") == [0, 0]
    again = TextTokenizer.from_dict(german.to_dict(), where="here")
    assert again.encode("Ein Hund, z.B. rennt!") == [1, 2, 3, 6, 4, 5]


def test_spacy_says_which_language_it_does_not_have() -> None:
    pytest.importorskip("spacy", reason="the spacy extra is not installed")
    with pytest.raises(RuntimeUnavailable, match="no language 'zz9'"):
        word_tokenizer({"<unk>": 0}, spacy_language="zz9").encode("a")


def test_a_tokenizer_that_drops_what_it_does_not_know_is_read_as_it_is(tmp_path: Path) -> None:
    inner = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = vocabulary(tmp_path, inner.to_str())
    assert tokenizer.encode("ab ba z") == [2, 1, 0]
    assert tokenizer.encode("zzz") == []


def test_the_unknown_word_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("UNKNOWN\na\n")
    assert read_vocabulary(tmp_path / "words.txt", unk_id=0).encode("a b") == [1, 0]


@pytest.mark.parametrize("lowercase", [False, True])
def test_spaces_alone_may_be_what_stands_between_words(lowercase: bool) -> None:
    """What OpenNMT-py 3.5 and JoeyNMT 2.3 say: of two spaces they make an empty word, which is unknown."""
    words = {"<unk>": 0, "a": 1, "b": 2, "c": 3}
    for text, spaces, stripped, whitespace in (
        ("a  b", [1, 0, 2], [1, 0, 2], [1, 2]),
        ("a   b", [1, 0, 0, 2], [1, 0, 0, 2], [1, 2]),
        ("a\u00a0b c", [0, 3], [0, 3], [1, 2, 3]),
        ("a\u3000b", [0], [0], [1, 2]),
        ("a\tb", [0], [0], [1, 2]),
        (" a b ", [0, 1, 2], [1, 2], [1, 2]),
        ("a", [1], [1], [1]),
        ("", [], [], []),
    ):
        wanted: dict[SplitAt, list[int]] = {"spaces": spaces, "stripped spaces": stripped, "whitespace": whitespace}
        for split_at, ids in wanted.items():
            tokenizer = word_tokenizer(words, split_at=split_at, lowercase=lowercase)
            again = TextTokenizer.from_dict(tokenizer.to_dict(), where="here")
            assert tokenizer.encode(text) == again.encode(text) == ids, (text, split_at)
            assert len(tokenizer.written(text)) == len(ids)
    assert word_tokenizer(words, split_at="spaces").written("a  b d") == ["a", "", "b", "d"]
    assert word_tokenizer(words, split_at="spaces").decode([1, 2]) == "a b"
