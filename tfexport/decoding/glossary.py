"""Glossaries: phrases that outputs must or must not contain where a source phrase occurs.

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

from tfexport.decoding.request_options import GlossaryCase, InputFormat
from tfexport.errors import TfexportError
from tfexport.system.input_files import LONGEST_LINE, Lines
from tfexport.system.regular_files import open_regular
from tfexport.text.word_parts import kind_of

Words = tuple[str, ...]


class Entry(NamedTuple):
    """A line of a glossary."""

    source: str
    """The source phrase; empty for a phrase that is forbidden in all outputs."""
    target: str
    is_forbidden: bool
    where: str
    """The name of the line in errors."""


@dataclass(slots=True)
class Term:
    """The entries of a glossary for a source phrase, as text in the format of outputs."""

    required: str | None = None
    forbidden: list[str] = field(default_factory=list)


_END = ""
"""The key of a term in the node of its last word; no word is empty."""
_Node = dict[str, "_Node | Term"]  # type: ignore[misc]
"""A node of a trie, by the next word."""


@dataclass(frozen=True)
class Glossary:
    """The terms of a glossary by their source phrases.

    Args:
        terms: the terms by the words of their source phrases.
        everywhere: phrases that are forbidden in all outputs.
    """

    terms: dict[Words, Term]
    everywhere: tuple[str, ...]
    format: InputFormat
    """The format of sources."""
    case: GlossaryCase
    _trie: _Node = field(default_factory=dict, init=False, repr=False, compare=False)
    """A trie of the words of source phrases."""

    def __post_init__(self) -> None:
        for words, term in self.terms.items():
            node = self._trie
            for word in words:
                node = cast("_Node", node.setdefault(word, {}))
            node[_END] = term

    @cached_property
    def n_characters(self) -> int:
        """The number of characters of all target phrases."""
        terms = (text for term in self.terms.values() for text in (term.required or "", *term.forbidden))
        return sum(map(len, chain(self.everywhere, terms)))

    @classmethod
    def of(cls, entries: Iterable[Entry], format: InputFormat = "text", case: GlossaryCase = "exact") -> Glossary:
        """A glossary from entries.

        Raises:
            TfexportError: two entries require different target phrases for one source phrase.
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
        """The terms whose source phrases occur in a text, from left to right. At each word the longest phrase matches, and
        the search continues after its end.

        The time is at most proportional to the words of the text times the words of the longest phrase.
        """
        words, place = words_of(text, self.format, self.case), 0
        while place < len(words):
            node, after = self._trie, place + 1
            term: Term | None = None
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
    """The words of a text, for comparison.

    In text a word is a run of letters, digits and underscores, or one other character that is not white space, after
    normalisation to NFC. In tokens and ids, white space separates words.
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
        format: the format of the source phrases.
        case: whether `Hund` also matches `hund`.

    Raises:
        TfexportError: the file cannot be read, a line has another form, or two lines require different target phrases for
            one source phrase.
    """
    try:
        with open_regular(path) as file:
            glossary = Glossary.of(_entries(Lines(file, str(path)), path), format, case)
    except OSError as error:
        raise TfexportError(f"cannot read the glossary {path}: {error}. Give a UTF-8 text file.") from error
    if not glossary.terms and not glossary.everywhere:
        raise TfexportError(f"{path} is empty. Give a glossary: a source phrase, a tab and a target phrase a line.")
    return glossary


def _entries(lines: Iterable[bytes], path: Path) -> Iterator[Entry]:
    """The entries of the lines that are not empty."""
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST_LINE:
            raise TfexportError(f"line {number} of {path} has more than {LONGEST_LINE:,} bytes. Correct it.")
        try:
            columns: Sequence[str] = [column.strip() for column in line.decode("utf-8").split("\t")]
        except UnicodeDecodeError as error:
            raise TfexportError(
                f"line {number} of {path} is not UTF-8, from byte {error.start + 1} on. Convert the file."
            ) from error
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
                f"{path}, line {number} is not a line of a glossary. Give a source phrase, a tab and a target phrase. To "
                "forbid the target phrase, add a tab and the word 'forbidden'; the source phrase may then be empty."
            )
        yield Entry(source, target, kind == "forbidden", f"{path}, line {number}")
