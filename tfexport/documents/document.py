"""Splitting of a text into segments, which are translated one by one, and its reassembly with their translations.

Segments are in the order of the text and do not overlap. Text outside segments is copied, character by character.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from tfexport.documents.html_runs import html_runs
from tfexport.documents.joining import glue
from tfexport.documents.markdown_runs import markdown_runs
from tfexport.documents.markdown_text import Part, written
from tfexport.documents.marks import collapsed, nodes_of
from tfexport.documents.nodes import Node
from tfexport.documents.options import Markup, Split
from tfexport.documents.placing import Aligned, place_all, units
from tfexport.documents.rendering import rendered
from tfexport.documents.runs import Run
from tfexport.documents.splitting import Keep, Span, as_words, has_words, pieces, sentence_spans, spans_between, trimmed


@dataclass(frozen=True)
class Segment:
    """A part of a text that is translated at once."""

    start: int
    """Start of its characters in the text, `[start, end)`."""
    end: int
    text: str
    """The input of the model, without markup."""
    is_piece: bool
    """Whether it is a part of a sentence that is too long for the model."""


@dataclass(frozen=True)
class _Place:
    """The place of a segment: `[start, end)` of a run."""

    run: Run
    start: int
    end: int
    touches: bool
    """Whether it directly follows the segment before it."""
    copied: str | None = None
    """Its text in the output, if it is only copied: it is no segment then."""


class Document:
    """A text that was split into segments; `document` makes one.

    Args:
        source: the text.
        places: places of its segments and of text that is only copied, in order.
        is_piece: whether each place is a piece of a sentence.
    """

    def __init__(self, source: str, places: Sequence[_Place], is_piece: Sequence[bool]):
        self.source = source
        self._places = places
        self._parts = [
            Segment(place.run.begin(place.start), place.run.end(place.end), _model_text(place), cut)
            for place, cut in zip(places, is_piece, strict=True)
        ]
        self.segments = [part for part, place in zip(self._parts, places, strict=True) if place.copied is None]
        self._rewritten = [
            (run.marks[mark.partner].source[0] if mark.partner >= 0 else 0, *mark.source, mark.written)
            for run in {id(place.run): place.run for place in places}.values()
            for mark in run.marks
            if mark.written is not None
        ]
        """Closing marks with another text beside a translation: the start of their element, `[start, end)`, and the text."""

    def text(self, translations: Sequence[Aligned | None]) -> str:
        """The text with its segments replaced by `translations`. Segments without a translation stay.

        In Markdown, those with an empty translation also stay: an empty `~~~~` or a tab at the start would begin code.
        """
        parts: list[Part] = []
        done, last = 0, ""
        changed: dict[Span, str] = {}
        rewritten = deque(self._rewritten)
        if len(translations) != len(self.segments):
            raise ValueError(f"{len(translations)} translations of {len(self.segments)} segments")
        rest = iter(translations)
        for number, (place, segment) in enumerate(zip(self._places, self._parts, strict=True)):
            new = next(rest) if place.copied is None else Aligned(place.copied)
            if new is None or (place.run.escape is None and not new.text.strip()):
                last = ""
                continue
            nodes, consumed = nodes_of(self.source, place.run, place.start, place.end)
            moved = dict.fromkeys((mark.source for mark in consumed), "")
            beside = self._beside(done, segment.start, rewritten)
            gap = place.run.opened_at(place.start, done, segment.start) if place.touches and last else segment.start
            parts += _copied(self.source, done, gap, beside | changed | moved)
            if place.touches and last:
                parts.append((_between(place, last, new.text), -1))
            parts += _copied(self.source, gap, segment.start, beside | changed | moved)
            parts += _with_marks(new, nodes, segment, place.run, number)
            done, last = segment.end, new.text
            changed = {at: text for at, text in moved.items() if at[0] >= done}
        parts += _copied(self.source, done, len(self.source), self._beside(done, len(self.source), rewritten) | changed)
        parts = [part for part in parts if part[0]]
        if any(place.run.escape is None for place in self._places):
            parts = list(_apart(parts))
        return written(parts)

    def _beside(self, start: int, end: int, waiting: deque[tuple[int, int, int, str]]) -> dict[Span, str]:
        """The new texts of marks in `[start, end)` whose element has a translation, which ends at `start`.

        Args:
            waiting: the marks that are not before `start`; those before `end` are removed.
        """
        texts = {}
        while waiting and waiting[0][2] <= end:
            begin, first, last, text = waiting.popleft()
            if begin < start <= first:
                texts[first, last] = text
        return texts


def document(
    source: str,
    *,
    parts: Split,
    language: str | None,
    fits: Callable[[str], bool],
    markup: Markup | None = None,
    is_aligned: bool = True,
    keep: Keep = None,
) -> Document:
    """Split a text into segments.

    Args:
        parts: the kind of segments.
        language: code of the text's language.
        fits: function that returns whether a text is short enough for the model.
        is_aligned: whether translations will be aligned, so that segments may contain tags; otherwise tags end segments.
        keep: the marks before and after text that is copied. No segment ends between them.

    Raises:
        RuntimeUnavailable: a required library is not installed.
        TfexportError: the HTML cannot be read.
    """
    places: list[_Place] = []
    is_piece: list[bool] = []
    for run in runs_of(source, markup, keep):
        kept = spans_between(run.text, keep) if keep else []
        shape = as_words(run.shape, kept)
        whole = sorted([*run.atoms, *kept])
        last = -1
        for start, end in _spans(run, shape, parts, language, is_aligned):

            def reads(first: int, to: int, run: Run = run) -> bool:
                return fits(_model_text(_Place(run, first, to, False)))

            spans = pieces(shape, start, end, reads, whole)
            for first, to in spans:
                copied = None
                if whole and not has_words(rest := _without(run.text, whole, first, to)):
                    copied = _unmarked(source, _Place(run, first, to, False), rest, keep)
                    if copied is None and not (keep and any(mark in run.text[first:to] for mark in keep)):
                        continue
                places.append(_Place(run, first, to, first == last, copied))
                is_piece.append(len(spans) > 1)
                last = to
    return Document(source, places, is_piece)


def runs_of(source: str, markup: Markup | None, keep: Keep) -> list[Run]:
    """The runs of a text; see `document`."""
    if markup is None:
        return [Run(source)]
    return html_runs(source, keep=keep) if markup == "html" else markdown_runs(source, keep)


def _spans(run: Run, shape: str, parts: Split, language: str | None, is_aligned: bool) -> list[Span]:
    spans = sentence_spans(shape, parts, language)
    if not run.marks:
        return spans
    if not is_aligned:
        return [part for span in spans for part in _between_marks(run, span)]
    return spans


def _between_marks(run: Run, span: Span) -> list[Span]:
    """The parts of a sentence between its marks."""
    start, parts = span[0], []
    for place in run.within(*span):
        mark = run.marks[place]
        parts.append((start, max(start, mark.start)))
        start = max(start, mark.end)
    return [trimmed(run.text, *part) for part in [*parts, (start, max(start, span[1]))] if part[0] < part[1]]


def _without(text: str, copied: Sequence[Span], start: int, end: int) -> str:
    """`[start, end)` of a text, without its parts that are copied."""
    parts, done = [], start
    for place in range(max(0, bisect_left(copied, start, key=itemgetter(0)) - 1), len(copied)):
        first, last = copied[place]
        if first >= end:
            break
        parts.append(text[done:first])
        done = max(done, last)
    return "".join([*parts, text[done:end]])


def _unmarked(source: str, place: _Place, rest: str, keep: Keep) -> str | None:
    """A text that is only copied, without its marks.

    None if it has no marks, marks that are not in order, or tags: the alignments of a translation tell their places.

    Args:
        rest: the text outside of the marks.
    """
    text = _model_text(place)
    spans = spans_between(text, keep) if keep else []
    if keep is None or not spans or any(mark in rest for mark in keep):
        return None
    opens, closes = map(len, keep)
    inner = [text[start + opens : end - closes] for start, end in spans]
    if (
        any(not content.strip() or keep[0] in content for content in inner)
        or nodes_of(source, place.run, place.start, place.end)[0]
    ):
        return None
    parts, done = [], 0
    for (start, end), content in zip(spans, inner, strict=True):
        parts += [text[done:start], content]
        done = end
    return "".join([*parts, text[done:]])


def _model_text(place: _Place) -> str:
    text = place.run.text[place.start : place.end]
    return text if place.run.origins is None else collapsed(text)[0]


def _copied(source: str, start: int, end: int, changed: Mapping[Span, str]) -> Iterator[Part]:
    """`[start, end)` of a text, in which some parts have another text. Parts that have moved have none."""
    for (first, last), text in sorted(changed.items()):
        if start <= first and last <= end:
            yield source[start:first], -1
            yield text, -1
            start = last
    yield source[start:end], -1


def _apart(parts: Sequence[Part]) -> Iterator[Part]:
    """The parts of Markdown with a space between two spans of code, which would be one."""
    before = ""
    for text, number in parts:
        if before.endswith("`") and text.startswith("`"):
            yield " ", -1
        yield text, number
        before = text if number < 0 else ""


def _between(place: _Place, left: str, right: str) -> str:
    """The text between two translations whose sources touch; empty if the sources are parts of one word."""
    before, after = place.run.text[place.start - 1], place.run.text[place.start]
    is_word = before.isalnum() and after.isalnum() and glue(before, after) != ""
    return "" if is_word else glue(left, right)


def _with_marks(new: Aligned, nodes: Sequence[Node], segment: Segment, run: Run, number: int) -> Iterator[Part]:
    """A translation with its marks.

    Args:
        number: the number of the segment.
    """
    parts = [(True, new.text)]
    if nodes:
        spans = units(new, segment.text, nodes)
        place_all(nodes, new, spans, segment.text)
        parts = rendered(new.text, nodes, spans)
    for is_text, group in groupby((pair for pair in parts if pair[1]), key=itemgetter(0)):
        if not is_text:
            yield from ((part, -1) for _, part in group)
            continue
        text = "".join(part for _, part in group)
        yield (text, number) if run.escape is None else (run.escape(text), -1)
