"""Which tokens are parts of words, whatever a vocabulary writes them with."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tfexport.text.tokenizers import TextTokenizer, word_tokenizer
from tfexport.text.word_parts import before_inside, kind_of


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


def test_tokens_after_which_a_word_begins() -> None:
    tokenizer = library(decoders.ByteLevel(), "<unk>", "Ġdog", "s", ".", "Ġ-", "Ġ", "Ã", "Ã©")
    assert tokenizer.tokens(sorted(tokenizer.word_parts.separating)) == ["<unk>", ".", "Ġ-", "Ġ"]


def test_signs_of_wordpiece() -> None:
    tokenizer = library(decoders.WordPiece(), "[UNK]", "dog", "##s", ".", "cat")
    assert parts_of(tokenizer)[0] == ["##s"]


def test_words_have_no_parts() -> None:
    assert parts_of(word_tokenizer(vocabulary("<unk>", "dog", "cats", "7"))) == ([], [])
    assert parts_of(word_tokenizer(vocabulary("<unk>", ".", "7"))) == ([], [])  # none is a word
    assert parts_of(word_tokenizer({})) == ([], [])


@pytest.mark.parametrize(
    ("characters", "kind"),
    [
        ("aZ9_éß一२Ж", "run"),
        (" \t\u3000", "space"),
        (".-+&%", "alone"),
        ("京あカก", "alone"),
        ("\u0301\u093f\u00ad\u200d", "mark"),
        ("\u200b", "alone"),
    ],
)
def test_kinds_of_characters(characters: str, kind: str) -> None:
    wanted = ["alone" if character == "一" else kind for character in characters]
    assert [kind_of(character) for character in characters] == wanted


def bpe(pre: pre_tokenizers.PreTokenizer, *words: str) -> TextTokenizer:
    """A vocabulary of words and their letters."""
    letters = sorted({letter for word in words for letter in word})
    steps = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys([*letters, *(a + b for a, b in steps)]))}
    inner = Tokenizer(models.BPE(vocabulary, [*dict.fromkeys(steps)]))
    inner.pre_tokenizer = pre
    return TextTokenizer(inner)


@pytest.mark.parametrize(
    ("tokenizer", "text", "inside"),
    [
        (bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), "Ġdog", "dog", "a", "!"), "dog", ["Ġdog"]),
        (bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), "Ġdog", "dog", "a", "!"), "dog dog", ["Ġdog", "Ġdog"]),
        (bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), "Ġdog", "dog", "a", "!"), "!", ["!"]),
        (bpe(pre_tokenizers.ByteLevel(), "Ġdog", "dog", "Ġa"), "dog", ["Ġdog"]),
        (bpe(pre_tokenizers.Metaspace(), "▁dog", "▁a"), "dog", ["▁dog"]),
        (bpe(pre_tokenizers.Metaspace(), "▁", ".", "京都"), "京都", ["京都"]),
        (word_tokenizer(vocabulary("<unk>", "dog", "a")), "dog", ["dog"]),
        (library(decoders.WordPiece(), "<unk>", "dog"), "dog", ["dog"]),
    ],
)
def test_text_inside_a_sentence(tokenizer: TextTokenizer, text: str, inside: list[str]) -> None:
    assert tokenizer.tokens(tokenizer.encode_after(before_inside(text), text)) == inside
