"""HTML as sentences, and back: text between tags is translated, tags and attributes stay.

Beautiful Soup reads it as browsers do: it closes what was left open, and shortens white space between tags that has no text.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence

from bs4 import (
    BeautifulSoup,
    Doctype,
    MarkupResemblesLocatorWarning,
    NavigableString,
    ParserRejectedMarkup,
    Tag,
    XMLParsedAsHTMLWarning,
)
from bs4.dammit import EntitySubstitution
from bs4.formatter import HTMLFormatter

from tfexport.errors import TfexportError
from tfexport.serving.libretranslate.documents import PlainText, Sentence

UNTRANSLATED = frozenset({"code", "script", "style", "template"})
"""Elements whose text is no language."""

PREFORMATTED = frozenset({"pre", "textarea"})
"""Elements in which line breaks are seen. Elsewhere they are white space, as a browser shows them."""

_SPACE = re.compile(r"[ \t\n\f\r]+")
"""What HTML takes for white space. A space that does not break is none of it."""

# Text of a client that looks like an address or like XML is none of the operator's business.
warnings.filterwarnings("ignore", category=MarkupResemblesLocatorWarning)
warnings.filterwarnings("ignore", category=XMLParsedAsHTMLWarning)


class _AsWritten(HTMLFormatter):
    """Keeps the order of attributes, which Beautiful Soup would sort, and the reference of spaces that do not break."""

    def __init__(self) -> None:
        super().__init__(lambda text: EntitySubstitution.substitute_xml(text).replace("\xa0", "&nbsp;"))

    def attributes(self, tag: Tag) -> Iterable[tuple[str, str | None]]:
        return list(tag.attrs.items())


class Markup:
    """The text of an HTML document, or of a part of one.

    Args:
        place: what errors call the document.

    Raises:
        TfexportError: it cannot be read.
    """

    def __init__(self, html: str, place: str = ""):
        try:
            self._soup = BeautifulSoup(
                html, "html.parser", multi_valued_attributes=None, on_duplicate_attribute="ignore"
            )
        except (ParserRejectedMarkup, AssertionError) as error:  # the second is of html.parser
            raise TfexportError(f"{place}the HTML cannot be read: {error}. Correct it, or send it as text.") from error
        for doctype in self._soup.find_all(string=lambda text: isinstance(text, Doctype)):
            doctype.SUFFIX = ">"  # Beautiful Soup would add a line break
        nodes = _text_nodes(self._soup)
        self._nodes = [node for node, _ in nodes]
        self._texts = [
            PlainText(str(node) if is_preformatted else _in_one_line(str(node)), f"{place}text {number}, ")
            for number, (node, is_preformatted) in enumerate(nodes, start=1)
        ]
        self.sentences: Sequence[Sentence] = [one for text in self._texts for one in text.sentences]

    def text(self, translations: Sequence[str]) -> str:
        """The document with these in the place of its sentences."""
        start = 0
        for place, text in enumerate(self._texts):
            end = start + len(text.sentences)
            new = NavigableString(text.text(translations[start:end]))
            self._nodes[place].replace_with(new)
            self._nodes[place], start = new, end
        return str(self._soup.decode(formatter=_AsWritten()))


def _text_nodes(soup: BeautifulSoup) -> list[tuple[NavigableString, bool]]:
    """Text that a reader sees, in order, and whether its line breaks are seen.

    What `translate` says of an element holds for all that is in it, until an element there says something else.
    """
    found: list[tuple[NavigableString, bool]] = []
    kinds: dict[int, tuple[bool, bool]] = {id(soup): (True, False)}  # translated, preformatted
    for node in soup.descendants:
        is_translated, is_preformatted = kinds[id(node.parent)]
        if isinstance(node, Tag):
            said = str(node.attrs.get("translate", "")).strip().lower()
            asked = {"no": False, "yes": True}.get(said, is_translated)
            kinds[id(node)] = asked and node.name not in UNTRANSLATED, is_preformatted or node.name in PREFORMATTED
        elif is_translated and type(node) is NavigableString:  # its subclasses are comments and the like
            found.append((node, is_preformatted))
    return found


def _in_one_line(text: str) -> str:
    """Text whose line breaks are white space, as one line, with the white space around it as it was."""
    sentence = text.strip()
    before, _, after = text.partition(sentence) if sentence else (text, "", "")
    return before + _SPACE.sub(" ", sentence) + after
