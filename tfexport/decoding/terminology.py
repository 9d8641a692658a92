"""The required and forbidden phrases of a line: its own phrases, terms of a glossary, and marked text that is copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

from tfexport.decoding.glossary import Glossary
from tfexport.decoding.line_reader import Line, Piece, TargetReader, Unreadable
from tfexport.decoding.request_options import InputFormat
from tfexport.errors import TfexportError
from tfexport.search.hypothesis import Phrase, Source
from tfexport.search.options import SearchOptions
from tfexport.search.search import NEEDS_BEAM, instead_of_beam, require_beam
from tfexport.text.word_parts import attached_to, before_inside, kind_of

MOST_SHOWN = 60
"""The largest number of characters of a phrase in an error."""


@dataclass(frozen=True)
class Terminology:
    """Reads the phrases of lines: the `terms` of a `Reader`.

    Args:
        target: reads phrases as ids.
        columns: the phrases are in the input, after tabs.
        phrases: the phrases of each line; None if they are in the input, or there are none.
        keep: the marks before and after text that is copied.
        without_beam: the option that replaces beam search, so that outputs cannot have required phrases.
    """

    target: TargetReader
    columns: bool = False
    phrases: Iterable[Sequence[bytes]] | None = None
    glossary: Glossary | None = None
    keep: tuple[str, str] | None = None
    without_beam: str = ""
    _terms: dict[str, tuple[Phrase, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Forbidden phrases of the glossary that were read; empty for a phrase that no output can contain."""

    def for_search(self, options: SearchOptions) -> Terminology:
        """The terms for a search. Without beam search, lines with required phrases are marked.

        Raises:
            TfexportError: the search is not a beam search, and lines have their own phrases.
        """
        if self.columns or self.phrases is not None:
            require_beam(options)
        return replace(self, without_beam=instead_of_beam(options))

    def require_format(self, format: InputFormat) -> None:
        """Raises: TfexportError: sources of this format do not fit the glossary or the marks."""
        if self.glossary is not None and self.glossary.format != format:
            raise TfexportError(f"the glossary has {self.glossary.format}, and the input is {format}. Give text.")
        if self.keep is not None:
            if self.target.format != format:
                both = f"the input is {format}, and the output {self.target.format}"
                raise TfexportError(f"text between marks is copied unchanged, but {both}. Give both in one format.")
            if format == "ids" and not self.target.config.tie_source_target:
                raise TfexportError(
                    "ids between marks cannot be copied: the source and the target have different vocabularies. Give "
                    "text, or phrases of each line."
                )

    def require_readable(self) -> None:
        """Raises: TfexportError: a phrase that is forbidden in all outputs cannot be read."""
        for text in self.glossary.everywhere if self.glossary else ():
            try:
                self._forbidden(text)
            except Unreadable as problem:
                raise TfexportError(f"the glossary forbids {text[:MOST_SHOWN]!r}: {problem}. Correct it.") from problem

    @property
    def most_bytes(self) -> int:
        """The approximate size of the phrases of a list and of the target phrases of the glossary."""
        phrases = self.phrases if isinstance(self.phrases, Sequence) else ()
        of_lines = sum(len(phrase) for of_line in phrases for phrase in of_line)
        return of_lines + (self.glossary.n_characters if self.glossary else 0)

    def lines(self, pairs: Iterable[tuple[bytes, bytes]], *, has_prefixes: bool) -> Iterator[Line]:
        """The lines of an input.

        Args:
            pairs: sources and prefixes of outputs. Phrases may follow them on the same line.
            has_prefixes: the prefixes of outputs are in the input too.

        Raises:
            TfexportError: the numbers of lines of the input and of phrases differ.
        """
        if self.phrases is not None:
            for pair, phrases in zip_longest(pairs, self.phrases):
                if pair is None or phrases is None:
                    longer, shorter = ("input", "phrases") if phrases is None else ("phrases", "input")
                    raise TfexportError(
                        f"there are more lines of the {longer} than of the {shorter}. Give one for each."
                    )
                source, begins = pair
                yield Line(source, begins, phrases)
        elif self.columns:
            for source, begins in pairs:
                if has_prefixes:
                    begins, *phrases = begins.split(b"\t")
                else:
                    source, *phrases = source.split(b"\t")
                yield Line(source, begins, phrases)
        else:
            yield from (Line(*pair) for pair in pairs)

    def divided(self, raw: bytes) -> tuple[bytes, list[Piece]]:
        """A source without its marks, and its pieces.

        Raises:
            Unreadable: an opening or closing mark has no counterpart.
        """
        text = raw.decode("utf-8", "replace")  # the reader of sources reports invalid UTF-8
        if self.keep is None:
            return raw, [Piece(text, False)]
        opens, closes = (mark.encode() for mark in self.keep)
        pieces, parts = list[Piece](), list[bytes]()
        rest = raw
        while rest:
            before, mark, rest = rest.partition(opens)
            if opens != closes and closes in before:
                raise Unreadable("invalid_phrases", f"{self.keep[1]!r} has no {self.keep[0]!r} before it")
            kept, end, rest = rest.partition(closes) if mark else (b"", b"", b"")
            if mark and (wrong := _wrong_with(kept, end, opens, closes)):
                raise Unreadable("invalid_phrases", wrong.format(*map(repr, self.keep)))
            parts += [before, kept]
            pieces += [Piece(before.decode("utf-8", "replace"), False)]
            pieces += [Piece(kept.decode("utf-8", "replace"), True)] * bool(mark)
        return b"".join(parts), pieces

    def applied(self, source: Source, pieces: Iterable[Piece], phrases: Iterable[bytes]) -> Source:
        """A source whose outputs must contain its phrases.

        Raises:
            Unreadable: the model cannot generate one of the phrases.
        """
        required = [self._required(phrase) for phrase in phrases if phrase.strip()]
        never: list[str] = []
        for piece in pieces:
            if piece.is_kept:
                required.append(self._copied(piece.text))
                continue
            for term in self.glossary.found_in(piece.text) if self.glossary else ():
                required += [self._whole(self._required(term.required.encode()))] if term.required is not None else []
                never += term.forbidden
        if required and self.without_beam:
            raise Unreadable("invalid_phrases", f"{NEEDS_BEAM}; {self.without_beam} cannot have any")
        forbidden = self._everywhere
        if never:
            forbidden = tuple(dict.fromkeys((*forbidden, *self._phrases_that_can_be(never))))
        length, most = sum(len(phrase.ids) for phrase in required), self.target.config.max_target_length
        if length > most:
            raise Unreadable("invalid_phrases", f"its phrases have {length} ids, the model writes at most {most}")
        tokenizer, needs_parts = self.target.tokenizer, any(phrase.is_whole for phrase in required)
        needs_parts = needs_parts or any(phrase.is_attached for phrase in forbidden)
        parts = tokenizer.word_parts if tokenizer is not None and needs_parts else None
        return replace(source, required=tuple(required), forbidden=forbidden, word_parts=parts)

    @cached_property
    def _everywhere(self) -> tuple[Phrase, ...]:
        return self._phrases_that_can_be(self.glossary.everywhere if self.glossary else ())

    def _phrases_that_can_be(self, texts: Iterable[str]) -> tuple[Phrase, ...]:
        return tuple(phrase for text in texts for phrase in self._forbidden(text))

    def _phrase(self, raw: bytes, before: str | None = None) -> Phrase:
        """A phrase as inside a sentence, or after the text `before`."""
        text = " ".join(raw.decode("utf-8", "replace").split())
        before = before_inside(text) if before is None else before
        called = f"the phrase {text[:MOST_SHOWN]!r}"
        try:
            ids = tuple(self.target.ids(raw, called, before=before))
        except Unreadable as problem:
            if problem.status != "empty":  # an empty phrase does not make the line empty
                raise
            ids = ()
        if not ids:
            raise Unreadable("invalid_phrases", f"{called} has no tokens")
        if self.target.config.eos_id in ids:
            raise Unreadable("invalid_phrases", f"{called} has the end of outputs, id {self.target.config.eos_id}")
        return Phrase(ids, text)

    def _required(self, raw: bytes) -> Phrase:
        """A phrase without special tokens, because outputs should not contain them."""
        phrase, config = self._phrase(raw), self.target.config
        special = {config.bos_id, config.pad_id, config.unk_id} & {*phrase.ids}
        if special:
            called = f"the phrase {phrase.text[:MOST_SHOWN]!r}"
            raise Unreadable("invalid_phrases", f"{called} has a special token, id {min(special)}")
        return phrase

    def _forbidden(self, text: str) -> tuple[Phrase, ...]:
        """A phrase of the glossary as the vocabulary splits it after a space, at the start of a sentence, and directly after
        another character. Empty if the vocabulary cannot write the phrase, because then no output contains it.
        """
        if text not in self._terms:
            is_word = kind_of(text[0]) == "run"
            try:
                phrases = {self._phrase(text.encode(), "a "): None}
                for before in (before_inside(text), "", attached_to(text)):
                    phrase = self._phrase(text.encode(), before)
                    if phrase not in phrases:
                        phrases[phrase._replace(is_attached=is_word)] = None
                self._terms[text] = tuple(phrases)
            except Unreadable as problem:
                if problem.status != "unknown_token":
                    raise
                self._terms[text] = ()
        return self._terms[text]

    def _whole(self, phrase: Phrase) -> Phrase:
        """A phrase that is not part of a longer word. Only text has word boundaries."""
        return phrase._replace(is_whole=self.target.format == "text")

    def _copied(self, text: str) -> Phrase:
        """Text as a phrase whose decoded text is exactly the same."""
        phrase, tokenizer = self._required(text.encode()), self.target.tokenizer
        if tokenizer is not None and self.target.format == "text":
            written = tokenizer.decode(phrase.ids)
            if "".join(written.split()) != "".join(text.split()):
                message = f"{phrase.text!r} cannot be copied: the target vocabulary writes it as {written!r}"
                raise Unreadable("unknown_token", message)
        return self._whole(phrase)


def _wrong_with(kept: bytes, end: bytes, opens: bytes, closes: bytes) -> str:
    """The problem of text between the two marks {0} and {1}; empty if there is none."""
    if opens != closes and opens in kept:
        return "{0} occurs again before {1}: text between marks cannot contain it"
    if not end:
        return "{0} has no {1} after it"
    return "" if kept.strip() else "{0} and {1} have no text between them"


def phrases_in(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The phrases of each line of a file, separated by tabs."""
    return (line.rstrip(b"\r\n").split(b"\t") for line in lines)
