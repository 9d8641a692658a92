"""Splitting of text into sentences, and of sentences that are too long for a model into pieces."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfexport.documents.options import Split
from tfexport.system.imports import import_failure

Span = tuple[int, int]
"""Characters of a text, `[from, to)`."""
Keep = tuple[str, str] | None
"""The marks before and after text that is copied, if there are any."""

LONGEST_QUOTATION = 300
"""Maximum length of a quotation in characters. sentencex does not split between two quotation marks or brackets, so a lone
mark would make one sentence of everything up to the next mark. Longer quotations are split like other text."""

_WINDOW = 4096
"""Number of characters that sentencex gets at once, because its time is quadratic."""

LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""Characters that `str.splitlines` splits at."""

_LINE = re.compile(f"[^{LINE_BREAKS}]+")
_QUOTES = "\"'“”„‚‘’‛«»‹›「」『』()[]{}（）【】"
_WITHOUT_QUOTES = str.maketrans(dict.fromkeys(_QUOTES, " "))
_SURROGATE = re.compile("[\ud800-\udfff]")
_WIDE_SPACE = re.compile(r"[^\S\x00-\x7f]")
"""White space outside ASCII. sentencex panics at one between a capital letter and a full stop."""
_BOM = "\ufeff"

_CUTS = (
    re.compile(r"[.!?…]+[\"'”’“»)\]]*(?=\s)|[。！？؟।]+[」』”]*"),
    re.compile(r"[;:,،؛—–]+(?=\s)|[、，；：]+"),
    re.compile(r"(?=\s)"),
)
"""Patterns of places to cut a sentence, best first: at the end of an inner sentence, between clauses, between words."""

_SHORTEST = 3
"""A piece is at least a third of the longest that fits, so that a clause is not cut right after its start."""


def has_words(text: str) -> bool:
    """Whether a text has a letter. A model would invent a translation for a number, a comma or a row of dashes alone."""
    return any(map(str.isalpha, text))


def spans_between(text: str, marks: tuple[str, str]) -> list[Span]:
    """The parts of a text from an opening mark to its closing mark on the same line, with both."""
    opens, closes = marks
    spans = []
    for line in _LINE.finditer(text):
        place, last = line.span()
        while (start := text.find(opens, place, last)) >= 0:
            end = text.find(closes, start + len(opens), last)
            if end < 0:
                break
            place = end + len(closes)
            spans.append((start, place))
    return spans


def as_words(text: str, spans: Sequence[Span]) -> str:
    """A text with letters in place of some parts, so that no sentence ends there.

    The first letter is a capital, because no sentence begins with a small one.
    """
    parts, done = [], 0
    for start, end in spans:
        parts += [text[done:start], ("x" * (end - start)).capitalize()]
        done = end
    return "".join([*parts, text[done:]]) if parts else text


def sentence_spans(text: str, split: Split, language: str | None) -> list[Span]:
    """The sentences of a text, or its lines, without the white space around them.

    None contains a line break. Parts without a letter are omitted.

    Raises:
        RuntimeUnavailable: the text is split into sentences, and sentencex is not installed.
    """
    ends = _sentence_splitter(language) if split == "sentences" else lambda line: [len(line)]
    spans = []
    for line in _LINE.finditer(text):
        start = line.start()
        for end in ends(line.group()):
            first, last = trimmed(text, start, line.start() + end)
            if has_words(text[first:last]):
                spans.append((first, last))
            start = line.start() + end
    return spans


def trimmed(text: str, start: int, end: int) -> Span:
    """`[start, end)` without the white space at its ends, and without the byte order mark of the text."""
    if start == 0 and text.startswith(_BOM):
        start = 1
    part = text[start:end]
    first = start + len(part) - len(part.lstrip())
    return first, max(first, start + len(part.rstrip()))


def _sentence_splitter(language: str | None) -> Callable[[str], list[int]]:
    """A function that returns the ends of the sentences of a line, for a language.

    A line at which the splitter fails is one sentence.
    """
    try:
        import sentencex
    except ImportError as error:
        absent = (
            "sentences are split by sentencex, which is not installed: pip install 'tfexport[documents]', or split "
            "lines alone."
        )
        raise import_failure(error, "sentencex", absent) from error
    code = re.split("[-_]", language or "en")[0].lower()

    def bounds_of(part: str) -> list[int]:
        try:
            sentences: list[dict[str, Any]] = sentencex.get_sentence_boundaries(code, part)
        except BaseException as error:
            if type(error).__module__ != "pyo3_runtime":  # a panic of Rust, which is no `Exception`
                raise
            return [len(part)]
        return [sentence["end_index"] for sentence in sentences]

    def bounds(line: str) -> list[int]:
        places: list[int] = []
        start = 0
        while start < len(line):
            part = line[start : start + _WINDOW]
            ends = bounds_of(part)
            if start + _WINDOW < len(line):
                ends = ends[:-1]  # the last sentence may continue after the window
            places += [start + end for end in ends]
            start = places[-1] if ends else start + (part.rfind(" ") + 1 or len(part))
        return places

    def ends(line: str) -> list[int]:
        plain, start = _WIDE_SPACE.sub(" ", _SURROGATE.sub("\ufffd", line)), 0
        cuts: list[int] = []
        for end in bounds(plain):
            if end - start > LONGEST_QUOTATION:
                cuts += _within_quotation(plain, start, bounds(plain[start:end].translate(_WITHOUT_QUOTES)))
            cuts.append(end)
            start = end
        return cuts

    return ends


def _within_quotation(line: str, start: int, ends: Sequence[int]) -> Iterator[int]:
    """Ends of sentences in a part of a line that starts at `start`. An opening quotation mark belongs to what follows."""
    last = start
    for end in ends[:-1]:
        place = start + end
        while place > last and not line[place - 1].isspace():
            place -= 1
        if place > last:
            yield place
            last = place


def pieces(text: str, start: int, end: int, fits: Callable[[int, int], bool], whole: Sequence[Span] = ()) -> list[Span]:
    """Cut `[start, end)` of a text into pieces that fit. A single character is a piece even if it does not fit.

    Args:
        fits: function that returns whether a part is short enough for the model.
        whole: parts that are not cut, in order. A part that is too long becomes a piece of its own.
    """
    spans, guess = [], 0
    while start < end:
        longest = _longest(start, end, guess, fits)
        if longest < end:
            guess = longest - start
            longest = _cut(text, start, longest)
            for first, last in whole:
                if first < longest < last:
                    longest = first if first > start else last
        first, last = trimmed(text, start, longest)
        if first < last:
            spans.append((first, last))
        start = longest
    return spans


def _longest(start: int, end: int, guess: int, fits: Callable[[int, int], bool]) -> int:
    """The end of the longest part from `start` that fits; at least one character."""
    # Pieces have similar lengths. Longer parts are tried one after the other, so that not all of the rest is read each time.
    low, high = start + 1, start + 2 * guess if guess else end
    while high < end and fits(start, high):
        low, high = high, start + 2 * (high - start)
    if high >= end:
        if fits(start, end):
            return end
        high = end
    place = start + guess
    while high - low > 1:
        if not low < place < high:
            place = min(start + 2 * (low - start), (low + high) // 2)
        if fits(start, place):
            low = place
        else:
            high = place
        place = 0
    return low


def _cut(text: str, start: int, longest: int) -> int:
    """The best place to cut a text, not after `longest`."""
    shortest = start + max(1, (longest - start) // _SHORTEST)
    for pattern in _CUTS:
        places = [match.end() for match in pattern.finditer(text, shortest, longest + 1) if match.end() <= longest]
        if places:
            return places[-1]
    place = longest
    while place > shortest and place < len(text) and unicodedata.combining(text[place]):
        place -= 1
    return place
