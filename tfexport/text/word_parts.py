"""The boundaries of words: by characters, and by the tokens of a vocabulary."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "BOPOMOFO", "TIBETAN")
"""Unicode names of scripts without spaces between words. Each of their letters is a word."""

_ZERO_WIDTH_SPACE = "\u200b"
_PART = "\ufffd"
"""The character that decoders write for a part of a character."""

Kind = Literal["space", "mark", "run", "alone"]


def kind_of(character: str) -> Kind:
    """The role of a character: white space, a mark on the character before, part of a run, or a word of its own."""
    if character.isspace():
        return "space"
    category = unicodedata.category(character)
    if category[0] == "M" or (category == "Cf" and character != _ZERO_WIDTH_SPACE):  # such as a soft hyphen
        return "mark"
    if not (character.isalnum() or character == "_"):
        return "alone"
    return "alone" if not character.isascii() and unicodedata.name(character, "").startswith(_UNSPACED) else "run"


def before_inside(text: str) -> str:
    """Other text before `text`, as inside a sentence; empty for text that begins with a punctuation mark or symbol."""
    kind = kind_of(text[:1] or " ")
    if kind == "alone" and text[0].isalnum():
        return "."  # of a script without spaces
    return "a " if kind == "run" else ""


def attached_to(text: str) -> str:
    """Other text that `text` may directly follow: a punctuation mark before a word, otherwise a word."""
    return "-" if kind_of(text[:1] or " ") == "run" else "a"


@dataclass(frozen=True)
class WordParts:
    """The tokens of a vocabulary that are parts of words, as its decoder writes them."""

    continuing: tuple[int, ...] = ()
    """Ids whose letters or digits continue the word before, such as `ing` as opposed to `▁going`."""
    unfinished: tuple[int, ...] = ()
    """Ids whose word continues with the next token, such as `go@@`."""
    separating: frozenset[int] = frozenset()
    """Ids that end with a character that is in no word, such as `-`, or that are no text."""

    @cached_property
    def continuing_ids(self) -> NDArray[np.int64]:
        """`continuing`, sorted."""
        import numpy as np

        return np.array(sorted(self.continuing), dtype=np.int64)

    @cached_property
    def unfinished_ids(self) -> frozenset[int]:
        """`unfinished` as a set, for lookups."""
        return frozenset(self.unfinished)


Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""Function that returns the texts of several sequences of ids."""


def word_parts(decode: Decode, size: int) -> WordParts:
    """The parts of words among the ids below `size`, found by decoding each next to a token that is a word."""
    ids = range(size)
    alone = decode([[index] for index in ids])
    doubled = decode([[index, index] for index in ids])
    words = (index for index in ids if alone[index].isalpha() and doubled[index] == f"{alone[index]} {alone[index]}")
    word = next(words, None)
    if word is None:
        return WordParts()
    ends = [text[-1:] for text in alone]
    separating = (
        index for index in ids if not ends[index] or (kind_of(ends[index]) == "alone" and ends[index] != _PART)
    )
    text = alone[word]
    after, before = decode([[word, index] for index in ids]), decode([[index, word] for index in ids])
    continuing = (index for index in ids if kind_of(after[index].removeprefix(text)[:1] or " ") in ("run", "mark"))
    unfinished = (index for index in ids if kind_of(before[index].removesuffix(text)[-1:] or " ") in ("run", "mark"))
    return WordParts(tuple(continuing), tuple(unfinished), frozenset(separating))
