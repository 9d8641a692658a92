"""Text becomes ids of a vocabulary, and text comes back as it went in."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.support.text_models import TEXTS, trained_bpe, vocabulary
from tfexport.errors import RuntimeUnavailable, TokenizerError
from tfexport.text.tokenizers import SPECIAL_NAMES, SplitAt, TextTokenizer, word_tokenizer
from tfexport.training.vocabulary import BPE_SPECIALS, train_bpe, train_words

WORDS = ["<unk>", "<pad>", "<sos>", "<eos>", "a", "dog", "runs"]


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
