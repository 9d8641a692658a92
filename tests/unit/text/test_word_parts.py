"""Which tokens are parts of words, whatever a vocabulary writes them with."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models

from tfexport.text.tokenizers import TextTokenizer, word_tokenizer
from tfexport.text.word_parts import kind_of


def vocabulary(*tokens: str) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def parts_of(tokenizer: TextTokenizer) -> tuple[list[str], list[str]]:
    parts = tokenizer.word_parts
    return tokenizer.tokens(parts.continuing), tokenizer.tokens(parts.unfinished)


def library(decoder: decoders.Decoder, *tokens: str) -> TextTokenizer:
    inner = Tokenizer(models.WordLevel(vocabulary(*tokens), unk_token="<unk>"))
    inner.decoder = decoder
    return TextTokenizer(inner)


def test_joins_of_subword_nmt() -> None:
    tokenizer = word_tokenizer(vocabulary("<unk>", "dog", "do@@", "ing", ".", "x@@", "@@"))
    assert parts_of(tokenizer) == ([], ["do@@", "x@@"])


def test_spaces_of_sentencepiece() -> None:
    tokenizer = library(decoders.Metaspace(), "<unk>", "▁dog", "s", "▁", ".", "▁(", "7", "é", "京")
    assert parts_of(tokenizer) == (["s", "7", "é"], [])


def test_spaces_of_bytes() -> None:
    tokenizer = library(decoders.ByteLevel(), "<unk>", "Ġdog", "s", ".", "Ġ7", "Ã©")
    assert parts_of(tokenizer) == (["s", "Ã©"], [])


def test_signs_of_wordpiece() -> None:
    tokenizer = library(decoders.WordPiece(), "[UNK]", "dog", "##s", ".", "cat")
    assert parts_of(tokenizer)[0] == ["##s"]


def test_words_have_no_parts() -> None:
    assert parts_of(word_tokenizer(vocabulary("<unk>", "dog", "cats", "7"))) == ([], [])
    assert parts_of(word_tokenizer(vocabulary("<unk>", ".", "7"))) == ([], [])  # none is a word
    assert parts_of(word_tokenizer({})) == ([], [])


@pytest.mark.parametrize(
    ("characters", "kind"),
    [("aZ9_éß一२Ж", "run"), (" \t\u3000", "space"), (".-+&%", "alone"), ("京あカก", "alone"), ("\u0301\u093f", "mark")],
)
def test_kinds_of_characters(characters: str, kind: str) -> None:
    wanted = ["alone" if character == "一" else kind for character in characters]
    assert [kind_of(character) for character in characters] == wanted
