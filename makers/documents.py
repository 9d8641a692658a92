"""Random documents, and translations of their sentences without a model."""

from __future__ import annotations

import html
import random
import re
from collections.abc import Sequence

import numpy as np

from tfexport.documents.document import Document, Segment, document
from tfexport.documents.markdown_text import events, front_matter
from tfexport.documents.options import Markup, Split
from tfexport.documents.placing import Aligned

WORDS = (
    "Ein",
    "Hund",
    "läuft",
    "z. B.",
    "Dr.",
    "schnell",
    "3.5",
    "„ja“",
    '"nein"',
    "e\u0301",
    "日本語",
    "שלום",
    "a\u200bb",
    "x",
    "B",
    "Plan B\xa0.",
    "C\u202f",
    "D\u3000.",
)
ENDS = (
    ". ",
    "! ",
    "? ",
    "… ",
    ".\n",
    "。",
    ". \r\n",
    ".\n\n",
    ".\t",
    ".\x0c",
    ".\u2028",
    ".\x85",
    "\xa0. ",
    "\u202f! ",
    "\u3000. ",
    ", ",
    " -- ",
    ": ",
    "  ",
)
TAGS = ("b", "i", "a href='x?a=1&b'", "span class=y", "p", "li", "em", "code", "sup", "div")
HTML = (
    "<br>",
    "<img src=a>",
    "<!-- c. C -->",
    "&amp;",
    "&nbsp;",
    "&uuml;",
    "</b>",
    "<i>",
    "<wbr>",
    "&lt;",
    "<![CDATA[ x ]]>",
    " https://a.b/c ",
    "<a> <img src=a> </a>",
    " <span> </span>",
    "x@y.de",
)
MARKDOWN = (
    *(
        "\n\n",
        "\n# ",
        "\n- ",
        "\n> ",
        "`a b`",
        "https://a.b/c",
        "[Ein *Hund*](http://x.y 'T. U')",
        "![x](y)",
        "<b>Hund</b>",
        "\\*",
        "[Hund][]",
        "[Hund] ",
        "\n\n[hund]: http://z.y\n\n",
        "2\\*3 ",
        "\\[Hund] ",
        "<sup>1</sup> ",
        "[ ![x](y) ](http://x.y 'T. U') ",
        "**![x](y) ![x](y)** ",
        "<!-- c. C --> ",
    ),
    *(
        "\n\n```\nx. y\n```\n\n",
        "\n\n| a | b |\n|---|---|\n| Ein Hund | c |\n\n",
        "  \n",
        "&amp;",
        "*",
        "_",
        "<br>",
        "~~Ein~~",
        "\n\n---\n\n",
        "\n\n> [!NOTE]\n> ",
    ),
)


def plain_text(source: random.Random) -> str:
    """Sentences of many scripts, with white space of all kinds around them."""
    parts = [source.choice(("", "\ufeff", "  ", "\n", "\r\n"))]
    for _ in range(source.randrange(12)):
        parts += [" ".join(source.choices(WORDS, k=source.randrange(1, 6))), source.choice(ENDS)]
    return "".join(parts)


def html_text(source: random.Random, depth: int = 0) -> str:
    """Elements within elements, most of them balanced."""
    parts = []
    for _ in range(source.randrange(1, 6)):
        kind = source.randrange(5)
        if kind == 0 and depth < 4:
            tag = source.choice(TAGS)
            parts.append(f"<{tag}>{html_text(source, depth + 1)}</{tag.split()[0]}>")
        elif kind == 1:
            parts.append(source.choice(HTML))
        else:
            parts += [" ".join(source.choices(WORDS, k=source.randrange(1, 5))), source.choice(ENDS)]
    return "".join(parts)


def markdown_text(source: random.Random) -> str:
    """Marks of Markdown, wherever they come."""
    parts = []
    for _ in range(source.randrange(1, 10)):
        kind = source.randrange(4)
        words = " ".join(source.choices(WORDS, k=source.randrange(1, 5)))
        if kind == 0:
            parts.append(source.choice(MARKDOWN))
        elif kind == 1:
            mark = source.choice(("*", "**", "~~", "`", "***"))
            parts.append(f"{mark}{words}{mark} ")
        else:
            parts += [words, source.choice(ENDS)]
    return "".join(parts)


def random_document(number: int) -> tuple[str, Markup | None]:
    """The document of a number, and its markup."""
    source = random.Random(number)
    kinds: tuple[Markup | None, ...] = (None, "html", "markdown")
    markup = kinds[number % 3]
    make = {None: plain_text, "html": html_text, "markdown": markdown_text}[markup]
    return make(source), markup


def taken_apart(
    text: str, markup: Markup | None = None, *, most: int = 10**9, parts: Split = "sentences", aligned: bool = True
) -> Document:
    """A document, for a model that reads so many characters."""
    return document(
        text, parts=parts, language="de", fits=lambda part: len(part) <= most, markup=markup, is_aligned=aligned
    )


def same(segment: Segment) -> Aligned:
    """The source as its own translation."""
    words = [word.span() for word in re.finditer(r"\S+", segment.text)]
    return Aligned(segment.text, words, words, np.eye(len(words), dtype=np.float32))


def exact(segment: Segment) -> Aligned:
    """The source as its own translation, with each character as a token."""
    letters = [(place, place + 1) for place in range(len(segment.text))]
    return Aligned(segment.text, letters, letters, np.eye(len(letters), dtype=np.float32))


def backwards(segment: Segment) -> Aligned:
    """The words in the other order."""
    text = " ".join(segment.text.split()[::-1])
    targets, sources = ([word.span() for word in re.finditer(r"\S+", part)] for part in (text, segment.text))
    return Aligned(text, targets, sources, np.eye(len(targets), dtype=np.float32)[::-1])


def noise(segment: Segment, seed: int = 0) -> Aligned:
    """Some words, which attend to anything; sometimes none."""
    random_numbers = np.random.default_rng([seed, len(segment.text)])
    count = int(random_numbers.integers(0, 6))
    text = " ".join(f"w{place}," for place in range(count))
    targets, sources = ([word.span() for word in re.finditer(r"\S+", part)] for part in (text, segment.text))
    return Aligned(text, targets, sources, random_numbers.random((len(targets), len(sources))).astype(np.float32))


def gaps(document: Document) -> list[str]:
    """What stands around the segments."""
    places = [0, *(place for one in document.segments for place in (one.start, one.end)), len(document.source)]
    return [document.source[start:end] for start, end in zip(places[::2], places[1::2], strict=True)]


def seen(markdown: str) -> list[str]:
    """What a reader of Markdown sees: text without white space, and the beginnings and ends of elements."""
    found: list[str] = []
    for event, _, _ in events(markdown[front_matter(markdown) :]):
        if isinstance(event, dict) and ("Text" in event or "Code" in event):
            found += "".join("".join(event.values()).split())
        elif isinstance(event, dict) and "Html" in event:
            found += "".join(html.unescape(event["Html"]).split())
        elif isinstance(event, dict) and "Link" in str(event.get("Start")):
            link = event["Start"]["Link"]
            found.append(f"{link['dest_url']} {link['title']}".rstrip())
        elif event not in ("SoftBreak", "HardBreak"):
            found.append(repr(event))
    return found


def codes(markdown: str) -> list[str]:
    """The code spans of Markdown, with single spaces."""
    found = events(markdown[front_matter(markdown) :])
    return [" ".join(event["Code"].split()) for event, _, _ in found if isinstance(event, dict) and "Code" in event]


_TAG = re.compile(r"<(/?)([a-z]+)[^>]*>")
_VOID = {"br", "img", "wbr"}


def tags(text: str) -> list[str]:
    """The tags of HTML, as they are written."""
    return [found.group() for found in _TAG.finditer(text)]


def is_balanced(found: Sequence[str]) -> bool:
    """Whether each opening tag has its closing one, in order."""
    opened: list[str] = []
    for tag in found:
        slash, name = re.match(r"<(/?)([a-z]+)", tag).groups()  # type: ignore[union-attr]
        if name in _VOID:
            continue
        if not slash:
            opened.append(name)
        elif not opened or opened.pop() != name:
            return False
    return not opened
