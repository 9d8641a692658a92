"""Vocabularies of every form give the same ids, and odd ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.text_models import vocabulary
from tfexport.errors import TokenizerError
from tfexport.text.tokenizers import word_tokenizer
from tfexport.text.vocabularies import read_vocabulary

WORDS = ["<unk>", "<pad>", "<sos>", "<eos>", "a", "dog", "runs"]


def test_every_form_of_one_vocabulary_reads_the_same(tmp_path: Path) -> None:
    by_word = {word: index for index, word in enumerate(WORDS)}
    forms: dict[str, object] = {
        "list.json": WORDS,
        "dict.json": by_word,
        "shuffled.json": dict(sorted(by_word.items(), reverse=True)),
        "lines.txt": "\n".join(WORDS) + "\n",
        "no-final-newline.txt": "\n".join(WORDS),
        "crlf.txt": "\r\n".join(WORDS) + "\r\n",
        "word-id.tsv": "".join(f"{word}\t{index}\n" for index, word in reversed([*enumerate(WORDS)])),
        "id-word.tsv": "".join(f"{index}\t{word}\n" for index, word in enumerate(WORDS)),
        "word-id.txt": "".join(f"{word} {index}\r\n" for index, word in enumerate(WORDS)),
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
        ("v.txt", "Hund\t4711\nKatze\t1200\n", r"two columns \('Hund\\t4711'\).*may be counts"),
        ("v.txt", "a\t0\na\t1\n", "two columns"),
        ("v.vocab", "<unk>\t0\n\u2581Hund\t-4.2\n", "a file that ends in .model"),
        ("vocabulary", b"PK\x03\x04\x00\xff", "vocabulary of torchtext"),
        ("v.pkl", b"\x80\x04\x95\xff", "a pickle"),
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


def test_the_unknown_word_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("UNKNOWN\na\n")
    assert read_vocabulary(tmp_path / "words.txt", unk_id=0).encode("a b") == [1, 0]
