"""Runs of text in HTML, found by Python's parser. Everything outside runs is copied."""

from __future__ import annotations

import html
import re
from collections import deque
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import accumulate

from tfexport.documents.runs import Run, RunBuilder
from tfexport.documents.splitting import Keep, Span
from tfexport.errors import TfexportError

UNTRANSLATED = frozenset({"code", "kbd", "math", "samp", "script", "style", "svg", "template", "var"})
"""Elements whose text is not translated."""

PREFORMATTED = frozenset({"pre", "textarea"})
"""Elements with visible line breaks. Elsewhere line breaks are white space, as in a browser."""

INLINE = frozenset(
    {"a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i", "img"}
    | {
        "ins",
        "kbd",
        "label",
        "mark",
        "math",
        "q",
        "rb",
        "rp",
        "rt",
        "ruby",
        "s",
        "samp",
        "small",
        "span",
        "strike",
        "strong",
    }
    | {"sub", "sup", "svg", "time", "tt", "u", "var", "wbr"}
)
"""Elements that a sentence may contain. All others end the sentence."""

RAISED = frozenset({"sup"})
"""Elements that are copied if they have no letters, such as the number of a footnote. The model would read `Park.1`."""

SYMBOLS = frozenset({"a"})
"""Elements that are copied if they have neither letters nor digits, such as the link at a heading. The model would read
`Vorwort¶`."""

VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"}
)
"""Elements that have no closing tag."""

COMMENT = "img"
"""The element that comments count as: they do not end a sentence."""

_REFERENCE = re.compile(r"&(?:#[0-9]{1,8}|#[xX][0-9a-fA-F]{1,8}|[A-Za-z][A-Za-z0-9]{0,40});?")

_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff\u3130-\u318f\u3400-\u9fff\uac00-\ud7af"
"""Letters of scripts without spaces. With them, a whole sentence would be an e-mail address."""
_WORD = rf"[^\W{_UNSPACED}]"
_ADDRESS = re.compile(
    r"(?:https?://|\bwww\.)(?:[^\s<>&]|&(?!#|(?:quot|apos|lt|gt|nbsp);))*(?<![.,;:!?'\")\]&])(?<!://)(?<!www\.)"
    rf"|(?<!{_WORD})(?<![.+-])(?<!&amp;)(?:{_WORD}|[.+-])+@(?:{_WORD}|-)+(?:\.(?:{_WORD}|-)+)+",
    re.IGNORECASE,
)
"""A web or e-mail address in text. It ends before punctuation, and before references to characters that addresses do not
have."""


def addresses(text: str, start: int, end: int, keep: Keep) -> Iterator[Span]:
    """The addresses in `[start, end)` of a text. None contains a mark of `keep`."""
    for match in _ADDRESS.finditer(text, start, end):
        ends = [place for mark in keep or () if (place := text.find(mark, *match.span())) >= 0]
        if not ends:
            yield match.span()
        elif shorter := _ADDRESS.match(text, match.start(), min(ends)):
            yield shorter.span()


def html_runs(source: str, start: int = 0, end: int | None = None, keep: Keep = None) -> list[Run]:
    """The runs of `[start, end)` of a document.

    Args:
        keep: the marks before and after text that is copied.

    Raises:
        TfexportError: the parser cannot read the document.
    """
    part = source[start:end]
    reader = _Reader(part, start)
    try:
        reader.read(part)
    except AssertionError as error:
        raise TfexportError(f"the HTML cannot be read: {error}. Correct it, or give it as text.") from error
    return _Runs(source, keep).of(reader.spans())


def escaped(text: str) -> str:
    """Text with the escapes of HTML."""
    return html.escape(text, quote=False).replace("\xa0", "&nbsp;")


def _add_text(run: RunBuilder, source: str, start: int, end: int) -> None:
    done = start
    for match in _REFERENCE.finditer(source, start, end):
        letters = html.unescape(match.group())
        if letters == match.group():
            continue
        run.text(source[done : match.start()], done, match.start())
        run.text(letters, match.start(), match.end())
        done = match.end()
    run.text(source[done:end], done, end)


Piece = tuple[str, str, int, int, bool]
"""Kind (open, close, point or text), name, `[from, to)` in the document, and whether it is marked as not translated."""


class _Reader(HTMLParser):
    """The pieces of a document, one after the other."""

    def __init__(self, part: str, offset: int):
        super().__init__(convert_charrefs=False)
        self._end = offset + len(part)
        self._lines = list(accumulate((len(line) + 1 for line in part.split("\n")), initial=offset))
        self._begun: list[tuple[str, str, int, bool]] = []
        self._endless: dict[str, int] = {}
        """The kinds of comments and sections that have no further end, with the length of the text that was searched."""

    def read(self, part: str) -> None:
        """Find the pieces.

        The part after the last `>` has no complete tag, so it is text. The parser would search an end for each `<` in it, in
        quadratic time.
        """
        end = part.rfind(">") + 1
        self.feed(part[:end])
        self.close()
        if end < len(part):
            self._begun.append(("text", "", self._end - len(part) + end, False))

    def parse_comment(self, i: int, report: bool = True) -> int:
        return self._parsed("--", super().parse_comment, i, report)

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        return self._parsed(self.rawdata[i + 3 : i + 5].lower(), super().parse_marked_section, i, report)

    def _parsed(self, kind: str, parse: Callable[[int, bool], int], i: int, report: bool) -> int:
        """The end of a comment or a section; -1 without one. If one has no end, the later ones of its kind have none either:
        to search it for each would take quadratic time."""
        if self._endless.get(kind) == len(self.rawdata):
            return -1
        end = parse(i, report)
        if end < 0:
            self._endless[kind] = len(self.rawdata)
        return end

    def _add(self, kind: str, name: str = "", *, kept: bool = False) -> None:
        line, column = self.getpos()
        self._begun.append((kind, name, self._lines[line - 1] + column, kept))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = next((value for name, value in attrs if name == "translate"), None)
        self._add("point" if tag in VOID else "open", tag, kept=(said or "").strip().lower() == "no")

    def handle_endtag(self, tag: str) -> None:
        self._add("point" if tag in VOID else "close", tag)

    def handle_data(self, data: str) -> None:
        self._add("text")

    def handle_charref(self, name: str) -> None:
        self._add("text")

    def handle_entityref(self, name: str) -> None:
        self._add("text")

    def handle_comment(self, data: str) -> None:
        self._add("point", COMMENT)

    def unknown_decl(self, data: str) -> None:
        self._add("point", COMMENT)

    def handle_decl(self, decl: str) -> None:
        self._add("point")

    def handle_pi(self, data: str) -> None:
        self._add("point")

    def spans(self) -> Iterator[Piece]:
        """All pieces with their ends. Adjacent texts are joined."""
        ends = [*(start for _, _, start, _ in self._begun[1:]), self._end]
        text = -1
        for place, ((kind, name, start, kept), end) in enumerate(zip(self._begun, ends, strict=False), start=1):
            if kind == "text":
                text = start if text < 0 else text
                if place < len(self._begun) and self._begun[place][0] == "text":
                    continue
                start, text = text, -1
            yield kind, name, start, end, kept and kind == "open"


class _Runs:
    """Builds runs from pieces."""

    def __init__(self, source: str, keep: Keep):
        self._source, self._keep_between = source, keep
        self._found: list[Run] = []
        self._preformatted = 0
        self._run = RunBuilder(keep)

    def of(self, pieces: Iterator[Piece]) -> list[Run]:
        """The runs of pieces, in order."""
        waiting = deque(pieces)
        while waiting:
            kind, name, start, end, kept = waiting.popleft()
            if kept or (kind == "open" and name in UNTRANSLATED):
                self._keep(name, start, end, waiting)
            elif kind == "open" and name in RAISED | SYMBOLS and (count := self._wordless(name, waiting)):
                for _ in range(count):
                    end = waiting.popleft()[3]
                self._run.point(start, end)
            elif kind == "text":
                self._text(start, end)
            elif name not in INLINE:
                if name in PREFORMATTED:
                    self._preformatted = max(0, self._preformatted + (1 if kind == "open" else -1))
                self._end()
            elif kind == "point":
                self._run.point(start, end)
            else:
                add = self._run.open if kind == "open" else self._run.close
                add(name, start, end)
        self._end()
        return self._found

    def _text(self, start: int, end: int) -> None:
        """Add text. References become the characters that they stand for. Addresses stay."""
        for first, last in addresses(self._source, start, end, self._keep_between):
            _add_text(self._run, self._source, start, first)
            self._run.atom(html.unescape(self._source[first:last]), first, last)
            start = last
        _add_text(self._run, self._source, start, end)

    def _wordless(self, element: str, waiting: deque[Piece]) -> int:
        """The number of pieces up to the end of an element of `RAISED` or `SYMBOLS`; 0 if it is read by the model.

        It is read if it has letters (in `SYMBOLS` also digits), or if a number is raised within a word.
        """
        is_read = str.isalpha if element in RAISED else str.isalnum
        depth = 1
        for count, (kind, name, start, end, _) in enumerate(waiting, start=1):
            # Another one ends the search, so that elements without an end are not searched again and again.
            if (kind == "open" and name == element) or (kind != "text" and name not in INLINE):
                return 0
            if kind == "text" and any(map(is_read, html.unescape(self._source[start:end]))):
                return 0
            depth += (kind == "open") - (kind == "close")
            if not depth:
                is_within = element in RAISED and self._source[end : end + 1].isalnum()
                return 0 if name != element or is_within else count
        return 0

    def _keep(self, name: str, start: int, end: int, waiting: deque[Piece]) -> None:
        """Keep an element unchanged, up to its end or the end of the document."""
        depth, inner, last = 1, end, end
        while waiting:
            kind, other, begin, last, _ = waiting.popleft()
            inner = last
            if other == name and kind in ("open", "close"):
                depth += 1 if kind == "open" else -1
                if not depth:
                    inner = begin
                    break
        if name not in INLINE:
            self._end()
            return
        text = html.unescape(re.sub(r"<[^>]*>", "", self._source[end:inner]))
        self._run.atom(" ".join(text.split()), start, last)

    def _end(self) -> None:
        if self._run.has_text:
            self._found.append(self._run.run(escaped))
        self._run = RunBuilder(self._keep_between, breaks=bool(self._preformatted))
