"""The parts that are put into a translation: elements and copied parts."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field

Span = tuple[int, int]


@dataclass
class Node:
    """A part that is put into a translation: an element, or a copied part."""

    before: str
    """Text before its words, such as an opening tag."""
    after: str = ""
    source: Span = (0, 0)
    """Characters of its text in the source sentence; empty for a node without text."""
    copied: str | None = None
    """Text that replaces its words."""
    literal: str = ""
    """Its text in the source sentence, if it is copied."""
    at: Span = (0, 0)
    """Its words in the translation."""
    space_before: bool = False
    """Whether the source has white space before it."""
    space_after: bool = False
    begins: bool = False
    """Whether it was open before the sentence."""
    ends: bool = False
    """Whether it stays open after the sentence."""
    cannot_begin: bool = False
    """A comment at the start of a line of Markdown would begin a block of HTML."""
    children: list[Node] = field(default_factory=list)

    @property
    def is_bare(self) -> bool:
        """Whether it is only emphasis of Markdown. Without words, its marks would be read as text, or as a code fence."""
        return self.is_emphasis and all(child.is_bare for child in self.children)

    @property
    def is_emphasis(self) -> bool:
        """Whether it is emphasis or strikethrough of Markdown, with both marks in the sentence."""
        return all(mark and not mark.strip("*_~") for mark in (self.before, self.after))


def is_letter(letter: str) -> bool:
    """Whether it is a letter, a mark on a letter, or a digit."""
    return unicodedata.category(letter)[0] in "LMN"
