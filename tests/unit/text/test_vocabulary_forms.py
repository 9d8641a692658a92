"""Vocabularies in all forms that people have: the right ids, or an error. Never other ids."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfexport.errors import TokenizerError
from tfexport.text.vocabularies import FAIRSEQ_SPECIALS, vocabulary_words

SPECIALS = ["<unk>", "<pad>", "<s>", "</s>"]
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Zs", "Zl", "Zp", "Cc"]), min_size=1, max_size=8)


def lines(form: Callable[[int, str], str], end: str = "\n") -> Callable[[list[str]], str]:
    return lambda words: "".join(form(index, word) + end for index, word in enumerate(words))


COUNTS = (9999, 512, 77, 77, 3)
FORMS: dict[str, tuple[str, Callable[[list[str]], str]]] = {
    "list": (".json", json.dumps),
    "dict": (".json", lambda words: json.dumps({word: index for index, word in enumerate(words)})),
    "a word a line": (".txt", lines(lambda _, word: word)),
    "without the last newline": (".txt", "\n".join),
    "word, tab, id": (".txt", lines(lambda index, word: f"{word}\t{index}")),
    "id, tab, word": (".txt", lines(lambda index, word: f"{index}\t{word}")),
    "word, space, id": (".txt", lines(lambda index, word: f"{word} {index}")),
    "id, space, word": (".txt", lines(lambda index, word: f"{index} {word}")),
    "word, comma, id": (".csv", lines(lambda index, word: f"{word},{index}")),
    "dict of ids": (".json", lambda words: json.dumps(dict(enumerate(words)))),
    "itos": (".json", lambda words: json.dumps({"itos": words})),
    "word, tab, id of Windows": (".txt", lines(lambda index, word: f"{word}\t{index}", "\r\n")),
}
"""Forms that say the ids."""
OTHERS: dict[str, tuple[str, Callable[[list[str]], str]]] = {
    "word, tab, count": (".txt", lines(lambda index, word: f"{word}\t{COUNTS[index % 5]}")),
    "count, tab, word": (".txt", lines(lambda index, word: f"{COUNTS[index % 5]}\t{word}")),
    "piece, tab, score": (".vocab", lines(lambda index, word: f"{word}\t{-index}")),
    "word, tab, long number": (".txt", lines(lambda index, word: f"{word}\t{'9' * 5000}")),
    "word, comma, count": (".csv", lines(lambda index, word: f"{word},{COUNTS[index % 5]}")),
    "word, space, count": (".txt", lines(lambda index, word: f"{word} {COUNTS[index % 5]}")),
    "word, space, ids from 1": (".txt", lines(lambda index, word: f"{word} {index + 1}")),
    "entries of a dict": (".txt", lines(lambda index, word: f"  {json.dumps(word)}: {index},")),
    "JSON Lines": (".jsonl", lines(lambda index, word: json.dumps({"word": word, "id": index}))),
    "one id is missing": (".txt", lines(lambda index, word: f"{word}\t{index + (index > 2)}")),
    "one id is twice": (".txt", lines(lambda index, word: f"{word}\t{max(0, index - 1)}")),
    "ids from 1": (".txt", lines(lambda index, word: f"{word}\t{index + 1}")),
}
"""Forms that do not say the ids."""


def read(form: tuple[str, Callable[[list[str]], str]], words: list[str]) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"vocabulary{form[0]}"
        path.write_bytes(form[1](words).encode())
        return vocabulary_words(path)


@pytest.mark.parametrize("name", FORMS)
@given(more=st.lists(WORDS, max_size=12, unique=True))
@settings(max_examples=60, deadline=None)
def test_forms_with_ids_are_read(name: str, more: list[str]) -> None:
    words = [*SPECIALS, *(word for word in more if word not in SPECIALS)]
    try:
        ids = read(FORMS[name], words)
    except TokenizerError:
        assert any(word.isdigit() for word in words)  # such as a column of numbers that are words
        return
    assert ids == {word: index for index, word in enumerate(words)}


@pytest.mark.parametrize("name", OTHERS)
@given(more=st.lists(WORDS, max_size=12, unique=True))
@settings(max_examples=40, deadline=None)
def test_forms_without_ids_are_refused(name: str, more: list[str]) -> None:
    words = [*SPECIALS, *(word for word in more if word not in SPECIALS)]
    with pytest.raises(TokenizerError, match="Give "):
        read(OTHERS[name], words)


@given(more=st.lists(WORDS, min_size=1, max_size=12, unique=True))
@settings(max_examples=40, deadline=None)
def test_words_with_counts_behind_a_space_are_a_dictionary_of_fairseq(more: list[str]) -> None:
    words = [word for word in more if word not in FAIRSEQ_SPECIALS and not word.isdigit()]
    counted = (".txt", lines(lambda index, word: f"{word} {COUNTS[index % 5]}"))
    if words:
        assert read(counted, words) == {word: index for index, word in enumerate([*FAIRSEQ_SPECIALS, *words])}
