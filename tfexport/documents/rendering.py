"""The text of a translation with its marks, once each has a place among its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from tfexport.documents.joining import glue
from tfexport.documents.nodes import Node, Span, is_letter

_CLOSING = frozenset(".,;:!?…)]}»”’。、，！？；：")
"""Punctuation without a space before it."""


def rendered(text: str, nodes: Sequence[Node], spans: Sequence[Span]) -> list[tuple[bool, str]]:
    """The parts of a translation with its marks, each with whether it is text.

    Args:
        spans: `units` of the text.
    """
    output = _Output()
    first, last = (spans[0][0], spans[-1][1]) if spans else (len(text), len(text))
    output.add(text[:first], is_text=True)
    _render(text, nodes, (0, len(spans)), spans, output)
    output.add(text[last:], is_text=True)
    return output.parts


@dataclass
class _Output:
    """The parts of a translation up to some place."""

    parts: list[tuple[bool, str]] = field(default_factory=list)
    opened: int = 0
    """The number of opening marks at the end. A space is written before them, since emphasis cannot begin with one."""
    node: Node | None = None
    """The copied part or mark at the end, if no text follows it."""

    def add(self, text: str, *, is_text: bool = False) -> None:
        self.parts.append((is_text, text))
        self.opened = 0
        if is_text:
            self.node = None

    def open(self, mark: str) -> None:
        self.parts.append((False, mark))
        self.opened += 1

    def space(self) -> None:
        """Write a space, unless there is white space."""
        place = len(self.parts) - self.opened
        last = next((part for _, part in islice(reversed(self.parts), self.opened, None) if part), " ")
        if not last[-1].isspace():
            self.parts.insert(place, (False, " "))

    def begin_word(self, letter: str) -> None:
        """Write the space between a node and the word after it, which begins with a letter."""
        node = self.node
        if node is None or node.at[0] < node.at[1]:  # it has the place of words, and the space beside them
            return
        is_copied = node.copied is not None
        if node.space_after and not (is_copied and letter in _CLOSING):
            self.space()
        is_emphasis = not is_copied and not node.before.strip("*_~")  # with a space after it, such a mark is text
        if (is_copied or (node.space_before and not is_emphasis)) and _space_between("x", letter):
            self.space()

    def begin_copied(self, node: Node, before: str) -> None:
        """Write the space before a copied part.

        Args:
            before: the last character of the text before it, if there is one.
        """
        if self.node is None:
            is_empty = node.at[0] == node.at[1]
            if is_empty and before and (node.space_before or _space_between(before, "x")):
                self.space()
        elif self.node.copied is not None:
            if self.node.source[1] != node.source[0]:
                self.space()
        elif self.node.space_after or node.space_before:
            self.space()


def _render(text: str, nodes: Sequence[Node], within: Span, spans: Sequence[Span], output: _Output) -> None:
    place, last = within
    has_gap = False  # whether the white space before the unit `place` is to be added

    def gap() -> None:
        nonlocal has_gap
        space = text[spans[place - 1][1] : spans[place][0]] if has_gap else ""
        if space:
            output.add(space, is_text=True)
        has_gap = False

    def words(to: int) -> None:
        """Add the units up to `to`, without the white space after the last one."""
        nonlocal place, has_gap
        while place < to:
            gap()
            start, end = spans[place]
            output.begin_word(text[start])
            output.add(text[start:end], is_text=True)
            place, has_gap = place + 1, place + 1 < last

    for node in sorted(nodes, key=lambda node: (node.at, node.source)):
        first, end = node.at
        words(first)
        is_empty = first == end
        if is_empty and node.is_bare:
            continue
        if not is_empty or node.space_before or not node.space_after:
            gap()  # otherwise the node follows the word before it, as the number of a footnote does
        before = text[spans[first - 1][1] - 1] if first > 0 else ""
        if node.copied is not None:
            output.begin_copied(node, before)
            output.add(node.copied)
            output.node = node
        elif node.source[0] == node.source[1]:
            if before and node.space_before:
                output.space()
            output.add(node.before)
            output.node = node
        else:
            opening, closing = _emphasis(node, text, spans)
            output.open(opening)
            _render(text, node.children, node.at, spans, output)
            output.add(closing)
        if not is_empty:
            place, has_gap = max(place, end), end < last
    words(last)


def _emphasis(node: Node, text: str, spans: Sequence[Span]) -> tuple[str, str]:
    """The marks of an element. In Markdown, an underscore beside a letter is no mark, so emphasis has stars there."""
    first, last = node.at
    if not node.is_emphasis or first == last:
        return node.before, node.after
    start, end = spans[first][0], spans[last - 1][1]
    if is_letter(text[start - 1 : start] or " ") or is_letter(text[end : end + 1] or " "):
        return node.before.replace("_", "*"), node.after.replace("_", "*")
    return node.before, node.after


def _space_between(left: str, right: str) -> bool:
    """Whether two words with these letters have a space between them."""
    return is_letter(left) and is_letter(right) and glue(left, right) != ""
