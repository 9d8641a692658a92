"""The marks of a run that move with the words of a sentence, as nodes that `placing` places in the translation."""

from __future__ import annotations

from dataclasses import replace

from tfexport.documents.nodes import Node
from tfexport.documents.runs import Mark, Run

Range = tuple[int, int]
"""The indices of the first and the last mark of an element among the marks of its run. They are -1 if the element begins
before the sentence, or the number of marks if it ends after the sentence."""


def collapsed(text: str) -> tuple[str, list[int]]:
    """Collapse white space to single spaces; returns the text, and its index for each index of `text`."""
    letters: list[str] = []
    places: list[int] = []
    for letter in text:
        if letter == " " and letters[-1:] == [" "]:
            places.append(len(letters) - 1)
            continue
        places.append(len(letters))
        letters.append(letter)
    return "".join(letters), [*places, len(letters)]


def nodes_of(source: str, run: Run, start: int, end: int) -> tuple[list[Node], list[Mark]]:
    """The marks that move with the words of `[start, end)` of a run, as a tree, and all of them in order.

    Other marks stay: those of elements around the whole sentence, and those at its ends.
    """
    touching = run.within(start, end)
    if not touching:
        return [], []
    text, at = collapsed(run.text[start:end])
    elements = [node for index in touching if (node := _element(run, index, start, end, at))]
    known = {index for element in elements for index in element}
    closing = {first: last for first, last in elements if first >= 0 and last < len(run.marks)}
    furthest = -1  # the last mark of the elements before
    chosen = list(elements)
    for index in touching:
        mark = run.marks[index]
        is_within = start <= mark.start <= mark.end <= end if mark.kind == "atom" else start < mark.start < end
        is_alone = mark.partner < 0 or _is_empty(mark, run.marks[mark.partner], start, at)
        is_enclosed = mark.kind != "atom" and furthest > index
        furthest = max(furthest, closing.get(index, -1))
        if index not in known and is_alone and (is_within or is_enclosed):
            chosen.append((index, index))
    moving = {index for pair in chosen for index in pair}
    marks = [run.marks[index] for index in touching if index in moving]
    return _tree([(pair, _node(source, run, pair, start, len(text), at)) for pair in sorted(chosen, key=_order)]), marks


def _is_empty(mark: Mark, other: Mark, start: int, at: list[int]) -> bool:
    """Whether two marks of an element have nothing between them but white space that counts as none.

    Args:
        at: `collapsed` places of the sentence, which begins at `start`.
    """
    places = [item.start - start for item in (mark, other)]
    return all(0 <= place < len(at) for place in places) and at[places[0]] == at[places[1]]


def _element(run: Run, index: int, start: int, end: int, at: list[int]) -> Range | None:
    """The element whose first mark in the sentence is at `index`, if it contains a part of the sentence."""
    mark = run.marks[index]
    if mark.partner < 0:
        return None
    other = run.marks[mark.partner]
    if mark.kind == "close":
        return (-1, index) if other.start < start < mark.start < end else None
    if not start <= mark.start < min(end, other.start):
        return None
    if other.start > end:
        return (index, len(run.marks)) if mark.start > start else None
    if _is_empty(mark, other, start, at):
        return None  # its marks move like those without an element
    return None if (mark.start, other.start) == (start, end) else (index, mark.partner)


def _order(pair: Range) -> tuple[int, int]:
    return pair[0], -pair[1]


def _node(source: str, run: Run, pair: Range, start: int, length: int, at: list[int]) -> Node:
    first, last = (run.marks[index] if 0 <= index < len(run.marks) else None for index in pair)
    if first is last and first is not None:
        raw = first.text(source)
        if first.kind == "atom":
            literal = run.text[first.start : first.end]
            node = Node("", source=(at[first.start - start], at[first.end - start]), copied=raw, literal=literal)
        else:
            place = at[first.start - start]
            # In an element without text, what is before it begins the line.
            before = run.marks[pair[0] - 1] if pair[0] else None
            is_first = before is not None and before.kind == "open" and before.source[1] == first.source[0]
            cannot_begin = run.escape is None and raw.startswith(("<!", "<?")) and not is_first
            node = Node(raw, source=(place, place), cannot_begin=cannot_begin)
        # In the document too: in `a [![b](c)](d) e`, the image has no space beside it.
        node.space_before = _is_space(run.text, first.start - 1) and _is_space(source, first.source[0] - 1)
        node.space_after = _is_space(run.text, first.end) and _is_space(source, first.source[1])
        return node
    node = Node("", source=(0, length), begins=first is None, ends=last is None)
    if first is not None:
        node = replace(node, before=first.text(source), source=(at[first.start - start], node.source[1]))
    if last is not None:
        node = replace(node, after=last.text(source), source=(node.source[0], at[last.start - start]))
    return node


def _is_space(text: str, place: int) -> bool:
    """Whether a text has white space or an end at a place."""
    return not 0 <= place < len(text) or text[place].isspace()


def _tree(elements: list[tuple[Range, Node]]) -> list[Node]:
    """Arrange nodes into a tree, with nodes under those that contain them."""
    roots: list[Node] = []
    opened: list[tuple[int, Node]] = []
    for (first, last), node in elements:
        while opened and opened[-1][0] < first:
            opened.pop()
        (opened[-1][1].children if opened else roots).append(node)
        if first != last:
            opened.append((last, node))
    return roots
