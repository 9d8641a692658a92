"""Placement of the marks of a sentence in its translation, by the alignment of its words.

Each element becomes one part of the translation. The part has the most words that are aligned to the element's source, and
the fewest that are aligned to other words. Zenkel et al. (2021), "Automatic Bilingual Markup Transfer", compare such
methods. Elements keep their nesting, and none is lost.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tfexport.documents.nodes import Node, Span, is_letter

Floats = NDArray[np.float64]

_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


@dataclass(frozen=True)
class Aligned:
    """A translation whose tokens are aligned to those of its source."""

    text: str
    targets: Sequence[Span] = ()
    """The characters of `text` of each token."""
    sources: Sequence[Span] = ()
    """The characters of the source sentence of each of its tokens."""
    attention: NDArray[np.float32] | None = None
    """[targets, sources]."""
    kept: Sequence[Span] = ()
    """Characters of `text` that no copied part replaces, such as required phrases."""


def units(aligned: Aligned, source: str, nodes: Sequence[Node]) -> list[Span]:
    """The words and punctuation of a translation; in scripts without spaces, its tokens.

    A word that the source has too is cut where nodes begin or end in it.

    Args:
        source: the source sentence.
        nodes: its nodes.
    """
    starts = {start for start, _ in aligned.targets}
    edges = {place for part in _copies(aligned.text, source, nodes) for place in part}
    spans: list[Span] = []
    for word in _WORD.finditer(aligned.text):
        place = word.start()
        for cut in range(place + 1, word.end()):
            if cut in edges or (cut in starts and unicodedata.east_asian_width(aligned.text[cut]) in "WF"):
                spans.append((place, cut))
                place = cut
        spans.append((place, word.end()))
    return spans


def _copies(text: str, source: str, nodes: Sequence[Node]) -> dict[Span, Span]:
    """The characters in the source for each part of a word of `text` that the source has too, and cuts."""
    cut: dict[str, list[list[int]]] = {}
    for edges in _source_words(source, nodes):
        if len(edges) > 2:
            cut.setdefault(source[edges[0] : edges[-1]], []).append(edges)
    copies: dict[Span, Span] = {}
    for word, places in cut.items():
        for count, copy in enumerate(re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text)):
            edges = places[min(count, len(places) - 1)]
            shift = copy.start() - edges[0]
            copies |= {(start + shift, end + shift): (start, end) for start, end in pairwise(edges)}
    return copies


def _source_words(source: str, nodes: Sequence[Node]) -> Iterator[list[int]]:
    """The edges of each word of a source sentence: its start, where nodes begin or end in it, and its end."""
    edges = sorted(set(_edges(nodes)))
    for word in _WORD.finditer(source):
        start, end = word.span()
        yield [start, *edges[bisect_right(edges, start) : bisect_left(edges, end)], end]


def _edges(nodes: Sequence[Node]) -> Iterator[int]:
    for node in nodes:
        yield from node.source
        yield from _edges(node.children)


def unit_attention(aligned: Aligned, spans: Sequence[Span], length: int) -> Floats:
    """The attention of each unit, [units, characters of the source]; each row has the sum 1.

    Without attention, the words are assumed to be in the order of the source.
    """
    weights = np.zeros((len(spans), length))
    if aligned.attention is None or not len(aligned.targets) or not len(aligned.sources):
        for place in range(len(spans)):
            low, high = (length * place) // len(spans), -(-length * (place + 1) // len(spans))
            weights[place, low:high] = 1 / max(1, high - low)
        return weights
    spread = np.zeros((len(aligned.sources), length))
    for place, (start, end) in enumerate(aligned.sources):
        spread[place, start:end] = 1 / max(1, end - start)
    attention = np.asarray(aligned.attention, np.float64)
    for place, (start, end) in enumerate(spans):
        rows = [row for row, (first, last) in enumerate(aligned.targets) if first < end and last > start]
        if rows:
            weights[place] = attention[rows].sum(axis=0) @ spread
    sums = weights.sum(axis=1, keepdims=True)
    return np.divide(weights, sums, out=weights, where=sums > 0)


def place_all(nodes: Sequence[Node], aligned: Aligned, spans: Sequence[Span], source: str) -> None:
    """Set the words `at` of each of `nodes`.

    Args:
        spans: the units of the translation.
        source: the source sentence.
    """
    weights = unit_attention(aligned, spans, len(source))
    copies = _copies(aligned.text, source, nodes)
    for place, span in enumerate(spans):
        if span in copies:  # tokens may be longer than such a part, so their attention does not tell it from the others
            start, end = copies[span]
            weights[place] = 0
            weights[place, start:end] = 1 / (end - start)
    words = [part for edges in _source_words(source, nodes) for part in pairwise(edges)]
    best = np.zeros(len(spans), np.int64)
    if words and spans:
        best = np.array([weights[:, start:end].sum(axis=1) for start, end in words]).argmax(axis=0)
    texts = [aligned.text[start:end] for start, end in spans]
    kept = [any(first < end and last > start for first, last in aligned.kept) for start, end in spans]
    to = [words[index] if words else (0, 0) for index in best]
    placer = _Placer(aligned.text, source, spans, texts, weights, to, np.array(kept, bool))
    placer.place(nodes, (0, len(spans)))


@dataclass(frozen=True)
class _Placer:
    text: str
    source: str
    """The source sentence."""
    spans: Sequence[Span]
    """The characters of the units in the text."""
    units: Sequence[str]
    weights: Floats
    """The attention of each unit, [units, characters of the source]."""
    aligned: Sequence[Span]
    """The word of the source that each unit attends to most."""
    kept: NDArray[np.bool_]
    """Whether no copied part replaces each unit."""

    @cached_property
    def _starts(self) -> dict[int, int]:
        """The unit that begins at each character."""
        return {start: place for place, (start, _) in enumerate(self.spans)}

    @cached_property
    def _ends(self) -> dict[int, int]:
        """The unit that ends before each character."""
        return {end: place for place, (_, end) in enumerate(self.spans)}

    def place(self, nodes: Sequence[Node], within: Span) -> None:
        """Place nodes, and all nodes in them, among the units `within`."""
        free = np.zeros(len(self.weights), bool)
        free[within[0] : within[1]] = True
        elements = [node for node in nodes if self._has_text(node)]
        # Nodes with the most text choose first. Nodes without text are placed next to them.
        for node in sorted(nodes, key=lambda node: (node.copied is None, node.source[0] - node.source[1])):
            if not self._has_text(node):
                node.at = self._point(node, within, elements)
                self.place(node.children, node.at)
                continue
            literal = None if node.begins or node.ends else _literal(node)
            if literal:
                node.at = self._copy_of(literal, node.source, free) or self._copied_part(node, literal, within, free)
            else:
                node.at = self._part(node, within, free)
            free[node.at[0] : node.at[1]] = False
            self.place(node.children, node.at)

    def _has_text(self, node: Node) -> bool:
        """Whether it has more than white space, or is open beyond the sentence."""
        return node.begins or node.ends or bool(self.source[slice(*node.source)].strip())

    def _copy_of(self, literal: str, source: Span, free: NDArray[np.bool_]) -> Span | None:
        """The units that already contain the copied text. Of several, those with the most attention to it."""
        best, units = -1.0, None
        start = self.text.find(literal)
        while start >= 0:
            end = start + len(literal)
            first, last = self._starts.get(start, -1), self._ends.get(end, -1)
            if 0 <= first <= last and free[first : last + 1].all():
                share = float(self.weights[first : last + 1, slice(*source)].sum())
                if share > best:
                    best, units = share, (first, last + 1)
            start = self.text.find(literal, start + 1)
        return units

    def _copied_part(self, node: Node, literal: str, within: Span, free: NDArray[np.bool_]) -> Span:
        """The words that a copied text replaces. Punctuation that it does not have stays, as the full stop does."""
        free = free & ~self.kept
        is_free = [any(map(is_letter, unit)) or unit in literal for unit in self.units]
        first, last = self._part(node, within, free & np.array(is_free, bool))
        while first < last and not self._has_letters(last - 1, len(self.units)):  # the end of the sentence
            if literal.endswith(self.units[last - 1]):
                break
            last -= 1
        if self._has_letters(first, last):
            return first, last
        point = _nearest_point(within, self._share(node), free)
        return point, point

    def _has_letters(self, first: int, last: int) -> bool:
        return any(map(is_letter, "".join(self.units[first:last])))

    def _point(self, node: Node, within: Span, elements: Sequence[Node]) -> Span:
        """The place of a mark: units before it attend to the source before the mark, units after it to the source after it.

        Args:
            elements: the nodes beside it that have text. They are placed already.
        """
        low, high = within
        before = self.weights[low:high, : node.source[0]].sum(axis=1)
        after = self.weights[low:high, node.source[0] :].sum(axis=1)
        sums = np.concatenate([[0.0], np.cumsum(before - after)])
        place = low + int(sums.argmax())
        while low < place < high and self.kept[place - 1] and self.kept[place]:  # within a required phrase
            place += 1
        for other in elements:
            first, last = other.at
            # Nothing can be before an element that was open before the sentence, or after one that stays open.
            if (first < place or other.begins) and (place < last or other.ends):
                place = first if node.source[0] <= other.source[0] else last
        if node.cannot_begin and place == 0:
            place = min(high, max([1, *(other.at[1] for other in elements if other.at[0] == 0)]))
        return place, place

    def _within_letters(self, first: int, last: int) -> Span:
        """Units whose marks are read as emphasis: no punctuation at an edge touches a letter outside (CommonMark, 6.2)."""
        while first < last and not is_letter(self.units[first][0]) and self._is_letter(self.spans[first][0] - 1):
            first += 1
        while first < last and not is_letter(self.units[last - 1][-1]) and self._is_letter(self.spans[last - 1][1]):
            last -= 1
        return first, last

    def _is_letter(self, place: int) -> bool:
        return 0 <= place < len(self.text) and is_letter(self.text[place])

    def _share(self, node: Node) -> Floats:
        return self.weights[:, slice(*node.source)].sum(axis=1)

    def _part(self, node: Node, within: Span, free: NDArray[np.bool_]) -> Span:
        start, end = node.source
        share = self._share(node)
        # The word that a unit is aligned to decides. Of several such parts, the one with more attention wins.
        hits = np.array([start <= first and last <= end for first, last in self.aligned], bool)
        gains = np.where(hits, 1.0, -1.0) + 0.01 * share
        if not any(map(is_letter, self.source[start:end])):
            return _best_part(node, within, gains, share, free)
        share = np.where([any(map(is_letter, unit)) for unit in self.units], share, 0.0)
        first, last = _best_part(node, within, gains, share, free)
        if node.is_emphasis and not _has_copy(node):
            first, last = self._within_letters(first, last)
        # Punctuation alone is no emphasis of words.
        return (first, first) if node.is_bare and not self._has_letters(first, last) else (first, last)


def _literal(node: Node) -> str | None:
    """The copied text of a node that has nothing else, as a link around code; None for another node."""
    if node.copied is not None:
        return node.literal
    return next((_literal(child) for child in node.children if child.source == node.source), None)


def _has_copy(node: Node) -> bool:
    return any(child.copied is not None or _has_copy(child) for child in node.children)


def _best_part(node: Node, within: Span, gains: Floats, share: Floats, free: NDArray[np.bool_]) -> Span:
    """The free part with the largest sum of gains. If the element continues beyond `within`, the part is at that end."""
    low, high = within
    if node.begins and node.ends:
        return within
    if node.begins or node.ends:
        return _end_part(node, within, gains, free)
    best, part, total, start = 0.0, (0, 0), 0.0, low
    for place in range(low, high):
        if not free[place]:
            total, start = 0.0, place + 1
            continue
        if total <= 0:
            total, start = 0.0, place
        total += gains[place]
        if total > best:
            best, part = total, (start, place + 1)
    if best > 0:
        return part
    open_share = np.where(free, share, 0.0)
    place = int(open_share.argmax()) if len(open_share) else 0
    if _literal(node) is None and len(open_share) and open_share[place] > 0:
        return place, place + 1
    point = _nearest_point(within, share, free)
    return point, point


def _end_part(node: Node, within: Span, gains: Floats, free: NDArray[np.bool_]) -> Span:
    low, high = within
    places = range(low, high) if node.begins else range(high - 1, low - 1, -1)
    best, total, edge = 0.0, 0.0, low if node.begins else high
    for place in places:
        if not free[place]:
            break
        total += gains[place]
        if total > best:
            best, edge = total, place + 1 if node.begins else place
    return (low, edge) if node.begins else (edge, high)


def _nearest_point(within: Span, share: Floats, free: NDArray[np.bool_]) -> int:
    """The place before the unit of `within` that attends most to an element."""
    part = share[within[0] : within[1]]
    place = within[0] + int(part.argmax()) if len(part) and part.max() > 0 else within[1]
    while within[0] < place < within[1] and not free[place] and not free[place - 1]:
        place += 1
    return place
