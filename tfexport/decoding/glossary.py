"""Glossaries: source phrases, and what outputs have to say, or may not say, where one occurs.

Hund <TAB> dog                        where the source has `Hund`, the output has `dog`
Handy <TAB> handy <TAB> forbidden     where the source has `Handy`, the output does not have `handy`
<TAB> basically <TAB> forbidden       no output has `basically`
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple, cast

from tfexport.decoding.line_reader import without_bom
from tfexport.decoding.request_options import GlossaryCase, InputFormat
from tfexport.errors import TfexportError
from tfexport.system.input_files import LONGEST_LINE, Lines
from tfexport.system.regular_files import open_regular
from tfexport.text.word_parts import kind_of

Words = tuple[str, ...]


class Entry(NamedTuple):
    """A line of a glossary."""

    source: str
    """Empty for what no output may say."""
    target: str
    is_forbidden: bool
    where: str
    """What errors call it."""


@dataclass(slots=True)
class Term:
    """What a glossary has for a source phrase, as text in the format of outputs."""

    required: str | None = None
    forbidden: list[str] = field(default_factory=list)


_END = ""
"""The key of the term of the words that lead to a node; no word is empty."""
_Node = dict[str, "_Node | Term"]  # type: ignore[misc]
"""Of a trie, by the next word."""


@dataclass(frozen=True)
class Glossary:
    """Terms by their source phrases.

    Args:
        terms: by the words of their source phrases.
        everywhere: what no output may say.
    """

    terms: dict[Words, Term]
    everywhere: tuple[str, ...]
    format: InputFormat
    """Of sources."""
    case: GlossaryCase
    _trie: _Node = field(default_factory=dict, init=False, repr=False, compare=False)
    """Of the words of source phrases."""

    def __post_init__(self) -> None:
        for words, term in self.terms.items():
            node = self._trie
            for word in words:
                node = cast("_Node", node.setdefault(word, {}))
            node[_END] = term

    @cached_property
    def n_characters(self) -> int:
        """Of all target phrases."""
        terms = (text for term in self.terms.values() for text in (term.required or "", *term.forbidden))
        return sum(map(len, chain(self.everywhere, terms)))

    @classmethod
    def of(cls, entries: Iterable[Entry], format: InputFormat = "text", case: GlossaryCase = "exact") -> Glossary:
        """A glossary of entries.

        Raises:
            TfexportError: two require different things of one phrase.
        """
        terms: dict[Words, Term] = {}
        everywhere: list[str] = []
        for entry in entries:
            words = words_of(entry.source, format, case)
            if not words:
                everywhere.append(entry.target)
                continue
            term = terms.setdefault(words, Term())
            if entry.is_forbidden:
                term.forbidden.append(entry.target)
            elif term.required not in (None, entry.target):
                both = f"{term.required!r} and for {entry.target!r}"
                raise TfexportError(f"{entry.where}: {entry.source!r} stands for {both}. Give one.")
            else:
                term.required = entry.target
        return cls(terms, tuple(everywhere), format, case)

    def found_in(self, text: str) -> Iterator[Term]:
        """The terms whose source phrases occur, from left to right: at each word the longest, and the next after its end.

        It takes the words of the text times those of the longest phrase at most.
        """
        words, place = words_of(text, self.format, self.case), 0
        while place < len(words):
            node, term, after = self._trie, None, place + 1
            for end in range(place, len(words)):
                following = node.get(words[end])
                if following is None:
                    break
                node = cast("_Node", following)
                if _END in node:
                    term, after = cast(Term, node[_END]), end + 1
            if term is not None:
                yield term
            place = after


def words_of(text: str, format: InputFormat, case: GlossaryCase) -> Words:
    """The words that are compared.

    Of text they are runs of letters, digits and underscores, and each other character that is not white space, after
    normalisation to NFC. Of tokens and ids they are what white space separates.
    """
    text = unicodedata.normalize("NFC", text)
    if case == "ignore":
        text = text.casefold()
    if format != "text":
        return tuple(text.split())
    words, previous = list[str](), ""
    for character in text:
        kind = kind_of(character)
        if kind in ("run", "mark") and previous == "run":
            words[-1] += character
        elif kind != "space":
            words.append(character)
        previous = previous if kind == "mark" else kind
    return tuple(words)


def read_glossary(path: Path, format: InputFormat, case: GlossaryCase = "exact") -> Glossary:
    """Read a glossary.

    Args:
        format: of the source phrases.
        case: whether `Hund` stands for `hund` too.

    Raises:
        TfexportError: it cannot be read, a line has another form, or two lines require different things of one phrase.
    """
    try:
        with open_regular(path) as file:
            glossary = Glossary.of(_entries(Lines(file, str(path)), path), format, case)
    except (OSError, UnicodeDecodeError) as error:
        raise TfexportError(f"cannot read the glossary {path}: {error}. Give a UTF-8 text file.") from error
    if not glossary.terms and not glossary.everywhere:
        raise TfexportError(f"{path} is empty. Give a glossary: a source phrase, a tab and a target phrase a line.")
    return glossary


def _entries(lines: Iterable[bytes], path: Path) -> Iterator[Entry]:
    """The entries of lines that are not empty."""
    for number, line in enumerate(without_bom(lines), start=1):
        if len(line) > LONGEST_LINE:
            raise TfexportError(f"line {number} of {path} has more than {LONGEST_LINE:,} bytes. Correct it.")
        columns: Sequence[str] = [column.strip() for column in line.decode("utf-8").split("\t")]
        if columns == [""]:
            continue
        source, target, kind = (*columns, "", "")[:3]
        if (
            len(columns) > 3
            or kind not in ("", "required", "forbidden")
            or not target
            or not (source or kind[:1] == "f")
        ):
            raise TfexportError(
                f"{path}, line {number} is no line of a glossary. Give a source phrase, a tab and a target phrase; after "
                "a second tab the word 'forbidden' for what outputs may not say, then also without a source phrase."
            )
        yield Entry(source, target, kind == "forbidden", f"{path}, line {number}")
