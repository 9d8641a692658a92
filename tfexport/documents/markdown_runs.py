"""Runs of text in Markdown of CommonMark and GitHub, without math, found by pulldown-cmark.

Everything outside runs is copied: code blocks, link addresses, and the marks of headings, lists, quotations and alerts.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from tfexport.documents.html_runs import COMMENT, INLINE, RAISED, UNTRANSLATED, VOID, addresses, html_runs
from tfexport.documents.markdown_text import events, front_matter
from tfexport.documents.runs import Run, RunBuilder
from tfexport.documents.splitting import Keep

_ELEMENTS = frozenset({"Emphasis", "Strong", "Strikethrough", "Link"})
"""Elements with text within a sentence, and marks around the text."""

_BLOCKS = frozenset({"CodeBlock", "HtmlBlock", "MetadataBlock"})

Event = tuple[str, str, Any, int, int]
"""Kind, name of the element that it begins or ends, additional data, and the characters `[from, to)`."""

_TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9-]*)")


def markdown_runs(source: str, keep: Keep = None) -> list[Run]:
    """The runs of a document. YAML or TOML at its start is not part of a run.

    Args:
        keep: the marks before and after text that is copied.

    Raises:
        RuntimeUnavailable: pyromark is not installed.
    """
    start = front_matter(source)
    return _Runs(source, start, keep).of(events(source[start:]))


class _Runs:
    """Builds runs from events.

    Args:
        offset: number of characters of the document before those of the events.
    """

    def __init__(self, source: str, offset: int, keep: Keep):
        self._source, self._offset, self._keep = source, offset, keep
        self._found: list[Run] = []
        self._run = RunBuilder(keep)
        self._done = offset
        """End of the part of the document that was read."""
        self._label: str | None = None
        """The label of the current link, if its text is its label."""

    def of(self, events: Iterator[tuple[Any, int, int]]) -> list[Run]:
        """The runs of events, in order."""
        waiting = deque((*_named(event), start + self._offset, end + self._offset) for event, start, end in events)
        while waiting:
            kind, name, about, start, end = waiting.popleft()
            if name == "Image" and about["link_type"] == "Collapsed":
                end = self._after_brackets(end)
            done = start if kind == "Start" else end
            if kind == "Start" and name in _BLOCKS:
                self._block(name, _inner(waiting, name))
                done = end
            elif kind == "Start" and name == "Image":
                _inner(waiting, name)
                self._run.point(start, end)
                done = end
            elif kind == "Start" and name == "Link" and about["link_type"] in ("Autolink", "Email"):
                self._run.atom("".join(str(text) for _, _, text, _, _ in _inner(waiting, name)), start, end)
                done = end
            elif kind == "Start" and name in _ELEMENTS:
                if name == "Link":
                    self._label = self._label_of(about, start, end)
                is_empty = waiting[0][0] == "End"
                self._run.open(name, start, end if is_empty else self._begin(waiting[0][3]))
                done = end if is_empty else done
            elif kind == "End" and name == "Link" and self._label is not None:
                start, done = max(self._done, start), self._after_brackets(end)
                end = done
                self._run.close(name, start, end, f"{self._source[start:end].removesuffix('[]')}[{self._label}]")
            elif kind == "End" and name in _ELEMENTS:
                self._run.close(name, max(self._done, start), end)
            elif kind in ("Start", "End", "Rule", "HardBreak"):
                self._end()
            elif kind == "InlineHtml":
                done = self._tag(start, end, waiting)
            else:
                self._inline(kind, about, start, end)
            self._done = done
        self._end()
        return self._found

    def _label_of(self, about: Any, start: int, end: int) -> str | None:
        """The label of a link `[start, end)` whose text is its label; None for another link."""
        if about["link_type"] not in ("Shortcut", "Collapsed"):
            return None
        written = self._source[start + 1 : end - 1]
        return str(about["id"]) if "\n" in written else written  # lines of a quotation begin with a mark

    def _begin(self, start: int) -> int:
        """The start of text, including a backslash before it that its event omits."""
        return start - (start - 1 >= self._done and self._source[start - 1] == "\\")

    def _after_brackets(self, end: int) -> int:
        """The end of a link whose text is its label. Its event omits the brackets of `[label][]`."""
        return end + 2 * self._source.startswith("[]", end)

    def _inline(self, kind: str, about: Any, start: int, end: int) -> None:
        if kind == "Text":
            self._text(str(about), self._begin(start), start, end)
        elif kind == "SoftBreak":
            self._run.text(" ", start, end)
        elif kind == "Code":
            self._run.atom(" ".join(str(about).split()), start, end)
        else:  # the box of a task list, the number of a footnote
            self._run.point(start, end)

    def _text(self, text: str, begin: int, start: int, end: int) -> None:
        if len(text) != end - start:  # a reference, such as &amp;
            self._run.text(text, begin, end)
            return
        done = 0
        if begin < start:
            self._run.text(text[:1], begin, start + 1)
            done = 1
        for first, last in addresses(text, done, len(text), self._keep):
            self._run.text(text[done:first], start + done, start + first)
            self._run.atom(text[first:last], start + first, start + last)
            done = last
        self._run.text(text[done:], start + done, end)

    def _tag(self, start: int, end: int, waiting: deque[Event]) -> int:
        """A tag of HTML within text; returns the end of what was read, which may be an element."""
        tag = _TAG.match(self._source, start)
        name = tag[2].lower() if tag else COMMENT
        if name not in INLINE:
            self._end()
        elif tag is None or name in VOID:
            self._run.point(start, end)
        elif tag[1]:
            self._run.close(name, start, end)
        elif name in RAISED and self._is_number(name, waiting):
            waiting.popleft()
            end = waiting.popleft()[4]
            self._run.point(start, end)
        elif name in UNTRANSLATED:
            inner = []
            while waiting and waiting[0][0] not in ("Start", "End"):
                kind, _, about, _, last = waiting.popleft()
                end = last
                if kind == "InlineHtml" and self._source[last - len(name) - 3 : last].lower() == f"</{name}>":
                    break
                inner.append(str(about or " "))
            self._run.atom(" ".join("".join(inner).split()), start, end)
        else:
            self._run.open(name, start, end)
        return end

    def _is_number(self, name: str, waiting: deque[Event]) -> bool:
        """Whether an element has only text, and that has no letters and is not within a word."""
        if len(waiting) < 3 or waiting[0][0] != "Text" or waiting[1][0] != "InlineHtml":
            return False
        end = waiting[1][4]
        is_closed = self._source[waiting[1][3] : end].lower() == f"</{name}>"
        is_within = self._source[end : end + 1].isalnum()
        return is_closed and not is_within and not any(map(str.isalpha, waiting[0][2]))

    def _block(self, name: str, inner: list[Event]) -> None:
        """A block that is not Markdown."""
        self._end()
        lines = [(start, end) for kind, _, _, start, end in inner if kind == "Html"]
        if name != "HtmlBlock" or not lines:
            return
        if all(end == start for (_, end), (start, _) in pairwise(lines)):
            lines = [(lines[0][0], lines[-1][1])]
        for start, end in lines:
            self._found += html_runs(self._source, start, end, self._keep)

    def _end(self) -> None:
        if self._run.has_text:
            self._found.append(self._run.run(None))
        self._run = RunBuilder(self._keep)


def _named(event: Any) -> tuple[str, str, Any]:
    """The kind of an event, the name of the element that it begins or ends, and additional data."""
    if isinstance(event, str):
        return event, "", None
    [(kind, about)] = event.items()
    if isinstance(about, dict) and kind in ("Start", "End"):
        [(name, about)] = about.items()
        return kind, name, about
    return kind, about if kind in ("Start", "End") else "", about


def _inner(waiting: deque[Event], name: str) -> list[Event]:
    """Remove and return the events up to the end of an element. The end is also removed."""
    inner: list[Event] = []
    depth = 1
    while waiting:
        event = waiting.popleft()
        depth += (event[1] == name) * ((event[0] == "Start") - (event[0] == "End"))
        if not depth:
            break
        inner.append(event)
    return inner
