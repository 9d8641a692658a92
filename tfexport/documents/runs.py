"""Runs: the text between two block boundaries, as a reader sees it, and the tags within it.

<p>Ein <b>Hund</b> läuft.</p>   has the run  Ein Hund läuft.  with the marks <b> before 4 and </b> before 8.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tfexport.documents.splitting import Keep, as_words

Kind = Literal["open", "close", "point", "atom"]

DEEPEST = 100
"""Elements that may be open around another one. The tags of those further inside move one by one: placing elements takes a
Python frame for each level."""


@dataclass(frozen=True)
class Mark:
    """A part of a run that is not translated."""

    kind: Kind
    start: int
    """Start, in characters of the run. A tag is before this character."""
    end: int
    """End. The text of an atom is `[start, end)` of the run; a tag has the same `start` and `end`."""
    source: tuple[int, int]
    """Its characters in the document."""
    partner: int = -1
    """Index of the closing mark for an opening mark, and of the opening mark for a closing one; -1 for none."""
    written: str | None = None
    """Its text beside a translation, if that is not its text in the document."""

    def text(self, source: str) -> str:
        """Its text beside a translation of its words.

        Args:
            source: the document.
        """
        return source[slice(*self.source)] if self.written is None else self.written


@dataclass
class Run:
    """Text of a document that is split into sentences.

    Args:
        origins: characters of the document for each character of the run; None if the run is the document's text.
        marks: marks in the order of the document.
    """

    text: str
    origins: Sequence[tuple[int, int]] | None = None
    marks: list[Mark] = field(default_factory=list)
    escape: Callable[[str], str] | None = str
    """Function that writes text in the format of the document. None in Markdown, where it depends on the whole document."""

    def begin(self, place: int) -> int:
        """The start in the document of the character at a place."""
        return place if self.origins is None else self.origins[place][0]

    def end(self, place: int) -> int:
        """The end in the document of the character before a place."""
        return place if self.origins is None else self.origins[place - 1][1]

    @property
    def atoms(self) -> list[tuple[int, int]]:
        """The characters that stay unchanged."""
        return [(mark.start, mark.end) for mark in self.marks if mark.kind == "atom"]

    @property
    def shape(self) -> str:
        """The text with letters in place of unchanged parts, so that no sentence ends there."""
        return as_words(self.text, self.atoms)

    def opened_at(self, place: int, begin: int, end: int) -> int:
        """The start of the first opening mark at a place, in `[begin, end)` of the document; `end` if there is none."""
        marks = (self.marks[index] for index in self.within(place, place))
        starts = (mark.source[0] for mark in marks if mark.kind == "open" and mark.start == place)
        return next((start for start in starts if begin <= start < end), end)

    def within(self, start: int, end: int) -> list[int]:
        """Indices of the marks that touch `[start, end]`."""
        first = bisect_left(self.marks, start, key=lambda mark: mark.start)
        places = []
        for place in range(max(0, first - 1), len(self.marks)):
            if self.marks[place].start > end:
                break
            if self.marks[place].end >= start:
                places.append(place)
        return places


class RunBuilder:
    """Builds a run from the text and the tags of a document, in order.

    Args:
        keep: the marks before and after text that is copied. In text that is not translated, they have no effect.
        breaks: whether line breaks of the text are visible; otherwise they are white space.
    """

    def __init__(self, keep: Keep = None, *, breaks: bool = False):
        self._keep, self._breaks = keep, breaks
        self._letters: list[str] = []
        self._origins: list[tuple[int, int]] = []
        self._marks: list[Mark] = []
        self._opened: list[tuple[str, int]] = []
        self._open: Counter[str] = Counter()

    def text(self, text: str, start: int, end: int) -> None:
        """Add text for `[start, end)` of the document, mapped character by character or as a whole."""
        if not self._breaks:
            text = "".join(" " if letter.isspace() and letter != "\xa0" else letter for letter in text)
        is_same = len(text) == end - start
        for place, letter in enumerate(text):
            self._letters.append(letter)
            self._origins.append((start + place, start + place + 1) if is_same else (start, end))

    def point(self, start: int, end: int) -> None:
        """Add a mark without text."""
        self._add("point", start, end)

    def atom(self, text: str, start: int, end: int) -> None:
        """Add text that is not translated."""
        for mark in self._keep or ():
            text = text.replace(mark, "")
        if not text:
            self.point(start, end)
            return
        place = len(self._letters)
        self._letters += [" " if letter.isspace() else letter for letter in text]
        self._origins += [(start, end)] * len(text)
        self._marks.append(Mark("atom", place, place + len(text), (start, end)))

    def open(self, name: str, start: int, end: int) -> None:
        """Add the opening tag of an element."""
        self._opened.append((name, len(self._marks)))
        self._open[name] += 1
        self._add("point", start, end)  # a point until its end is found

    def close(self, name: str, start: int, end: int, written: str | None = None) -> None:
        """Add the closing tag of an element. It becomes a point if no element of this name is open.

        Args:
            written: its text beside a translation, if that is not its text in the document.
        """
        if not self._open[name]:
            self._add("point", start, end, written=written)
            return
        while True:
            opened, place = self._opened.pop()
            self._open[opened] -= 1
            if opened == name:
                break
        if len(self._opened) >= DEEPEST:
            self._add("point", start, end, written=written)
            return
        first = self._marks[place]
        self._marks[place] = Mark("open", first.start, first.end, first.source, len(self._marks))
        self._add("close", start, end, place, written)

    def run(self, escape: Callable[[str], str] | None) -> Run:
        """The finished run."""
        return Run("".join(self._letters), self._origins, self._marks, escape)

    @property
    def has_text(self) -> bool:
        return bool(self._letters)

    def _add(self, kind: Kind, start: int, end: int, partner: int = -1, written: str | None = None) -> None:
        self._marks.append(Mark(kind, len(self._letters), len(self._letters), (start, end), partner, written))
