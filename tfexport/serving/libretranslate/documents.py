"""Texts of any length as sentences, and back: lines of plain text, and text between the tags of HTML.

Line breaks, blank lines, lines without letters and digits, and white space around a line stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sentence:
    """What is translated at once."""

    text: str
    place: str
    """Where it is, for errors."""


class Document(Protocol):
    """A text that was taken apart."""

    @property
    def sentences(self) -> Sequence[Sentence]:
        """What there is to translate, in order."""
        ...

    def text(self, translations: Sequence[str]) -> str:
        """The document with these in the place of its sentences."""
        ...


class PlainText:
    """Lines, each a sentence.

    Args:
        place: what errors call the text, before the number of the line.
    """

    def __init__(self, text: str, place: str = ""):
        self._lines = text.splitlines(keepends=True)
        self.sentences = [
            Sentence(line.strip(), f"{place}line {number}")
            for number, line in enumerate(self._lines, start=1)
            if _has_words(line)
        ]

    def text(self, translations: Sequence[str]) -> str:
        """The lines with these in the place of their sentences."""
        waiting = iter(translations)
        return "".join(_in_place_of(line, waiting) for line in self._lines)


def _in_place_of(line: str, translations: Iterator[str]) -> str:
    if not _has_words(line):
        return line
    sentence = line.strip()
    before, _, after = line.partition(sentence)
    return before + next(translations) + after


def _has_words(line: str) -> bool:
    """Whether there is a letter or a digit. A model would make something up for a lone comma between two tags."""
    return any(letter.isalnum() for letter in line)
