"""Markdown of CommonMark and GitHub, without math: what pulldown-cmark reads, and escapes of text."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from tfexport.system.imports import import_failure

_TO_ESCAPE = re.compile(
    r"[\\`\[\]|]|(?<!\s)[*~]|[*~](?!\s)|(?<![^\W_])_(?!(?<=\s_)\s)|(?<=[^\W_])_(?![^\W_])|<(?=[A-Za-z/!?]|$)|&(?=#?\w|$)"
    r"|^\s*\d*(?P<first>[-+*=>#.)])|(?<=\s)#(?=#*\s*$)"
)
"""Characters that may be markup, whatever is around the text. A star, a tilde or an underscore between spaces is none, nor
is an underscore within a word."""
_FRONT_MATTER = re.compile(
    r"\A\ufeff?(?:---[ \t]*\r?\n.*?^(?:---|\.\.\.)|\+\+\+[ \t]*\r?\n.*?^\+\+\+)[ \t]*\r?$", re.DOTALL | re.MULTILINE
)

Part = tuple[str, int]
"""A part of a document, and the number of the segment whose text it is; -1 for a part that is copied."""


def front_matter(text: str) -> int:
    """The end of the YAML or TOML at the start of a document; 0 if it has none."""
    front = _FRONT_MATTER.match(text)
    return front.end() if front else 0


def events(text: str) -> Iterator[tuple[Any, int, int]]:
    """The parser's events for a text, with their characters `[from, to)`.

    Raises:
        RuntimeUnavailable: pyromark is not installed.
    """
    try:
        import pyromark
    except ImportError as error:
        absent = "Markdown is read by pyromark, which is not installed: pip install 'tfexport[documents]'."
        raise import_failure(error, "pyromark", absent) from error
    read = pyromark.Options
    options = read.ENABLE_TABLES | read.ENABLE_STRIKETHROUGH | read.ENABLE_TASKLISTS | read.ENABLE_FOOTNOTES
    options |= read.ENABLE_GFM  # alerts
    parsed = pyromark.events_with_range(text, options=options)
    if text.isascii():
        yield from ((event, place["start"], place["end"]) for event, place in parsed)
        return
    starts = list(accumulate(len(letter.encode("utf-8", "surrogatepass")) for letter in text))
    for event, place in parsed:  # the place is in bytes
        yield event, bisect_right(starts, place["start"]), bisect_right(starts, place["end"])


def escaped(text: str) -> str:
    """Text with backslashes before all characters that may be markup."""
    return _TO_ESCAPE.sub(_with_backslash, text)


def _with_backslash(match: re.Match[str]) -> str:
    place = match.start("first") if match["first"] else match.start()
    return f"{match.string[match.start() : place]}\\{match.string[place : match.end()]}"


def written(parts: Sequence[Part]) -> str:
    """A document from its parts. Text that would be read as markup has escapes.

    Whether a character is markup depends on other characters of its paragraph, and on link definitions anywhere. So the
    document is read with and without escapes. Segments in which the parser sees a difference keep their escapes.

    Escapes may also change what the marks beside them mean: `***„a“ b*é*` is a star and two elements, and with a backslash
    before the first star there is one element. If there are more elements without escapes, and all text is read as text,
    nothing is escaped.
    """
    numbers = {number for _, number in parts if number >= 0}
    if not numbers:
        return "".join(text for text, _ in parts)
    plain, plain_places = _joined(parts, ())
    safe, safe_places = _joined(parts, numbers)
    if plain == safe:
        return plain
    seen, expected = _Seen(plain), _Seen(safe)
    if seen.elements > expected.elements and all(
        seen.text(*place) == "".join(text.split())
        for (text, number), place in zip(parts, plain_places, strict=True)
        if number >= 0
    ):
        return plain
    within, safe_within = _segments(parts, plain_places), _segments(parts, safe_places)
    needed = {number for number in numbers if seen.at(*within[number]) != expected.at(*safe_within[number])}
    some, _ = _joined(parts, needed)
    return some if _Seen(some).all == expected.all else safe


def _joined(parts: Sequence[Part], to_escape: Collection[int]) -> tuple[str, list[tuple[int, int]]]:
    """The document with escapes in some segments, and the characters `[from, to)` of each part."""
    texts: list[str] = []
    places: list[tuple[int, int]] = []
    length = 0
    for (text, number), (following, _) in pairwise([*parts, ("", -1)]):
        if number >= 0:
            text = escaped(text) if number in to_escape else text
            if text.endswith("!") and following.startswith("["):  # it would make an image of a link
                text = f"{text[:-1]}\\!"
            if text.startswith(":") and texts and re.fullmatch(r"\[\^.*\]", texts[-1]):  # a definition of a footnote
                text = f"\\{text}"
        texts.append(text)
        places.append((length, length + len(text)))
        length += len(text)
    return "".join(texts), places


def _segments(parts: Sequence[Part], places: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """The characters of each segment, with the marks in it."""
    segments: dict[int, tuple[int, int]] = {}
    for (_, number), (start, end) in zip(parts, places, strict=True):
        segments[number] = (segments.get(number, (start, end))[0], end)
    return segments


class _Seen:
    """The text and the events that the parser sees in a document."""

    def __init__(self, text: str):
        self.all: list[str] = []
        self.elements = 0
        self._places: list[int] = []
        offset = front_matter(text)
        for event, start, end in events(text[offset:]):
            letters = event["Text"] if isinstance(event, dict) and "Text" in event else [repr(event)]
            self.elements += isinstance(event, dict) and "Start" in event
            is_same = len(letters) == end - start
            # The event of an end has the start of its element: it counts as a part of what stands before it.
            start = max(offset + start, self._places[-1] if self._places else 0)
            self.all += letters
            self._places += [start + place * is_same for place in range(len(letters))]

    def at(self, start: int, end: int) -> list[str]:
        """The characters and events that begin in `[start, end)`."""
        return self.all[bisect_left(self._places, start) : bisect_left(self._places, end)]

    def text(self, start: int, end: int) -> str:
        """The characters of text in `[start, end)`, without white space."""
        return "".join(item for item in self.at(start, end) if len(item) == 1 and not item.isspace())
