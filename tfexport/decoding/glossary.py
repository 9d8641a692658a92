"""Glossaries: source phrases, and what outputs have to say, or may not say, where one occurs.

Hund <TAB> dog                        where the source has `Hund`, the output has `dog`
Handy <TAB> handy <TAB> forbidden     where the source has `Handy`, the output does not have `handy`
<TAB> basically <TAB> forbidden       no output has `basically`
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

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
    _longest: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    """Of the phrases that begin with a word the largest number of words."""

    def __post_init__(self) -> None:
        for words in self.terms:
            self._longest[words[0]] = max(len(words), self._longest.get(words[0], 0))

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
        """The terms whose source phrases occur, from left to right: at each word the longest, and the next after its end."""
        words, place = words_of(text, self.format, self.case), 0
        while place < len(words):
            most = min(self._longest.get(words[place], 0), len(words) - place)
            sizes = (size for size in range(most, 0, -1) if words[place : place + size] in self.terms)
            size = next(sizes, 0)
            if size:
                yield self.terms[words[place : place + size]]
            place += max(1, size)


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
