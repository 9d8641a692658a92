"""Texts of many sentences: split into sentences, decoded in full batches, and joined again.

Each sentence is decoded as if it were alone. Sentences of many texts share the windows of `translate`, so memory depends on
the window and on the longest text, not on the input.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

from tfexport.decoding.line_reader import Reader, Unreadable, most_bytes
from tfexport.decoding.stream import GrowingText
from tfexport.decoding.translate import Result, Writer
from tfexport.documents.document import Document, Segment, document, runs_of
from tfexport.documents.nodes import Span
from tfexport.documents.options import DocumentOptions
from tfexport.documents.placing import Aligned
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Capacity
from tfexport.search.hypothesis import Hypothesis, Source
from tfexport.text.tokenizer_parts import PanicError
from tfexport.text.tokenizers import LONGEST_WORD

_FARTHEST = 40
"""The largest number of characters between two tokens of a source. A match farther away is another word with the same
letters."""


@dataclass(frozen=True)
class DocumentMaker:
    """Splits texts for a model.

    Args:
        language: the code of the source language; None if unknown.
        is_aligned: translations will have attention, so that tags can move with words.
    """

    reader: Reader
    capacity: Capacity
    options: DocumentOptions
    language: str | None
    is_aligned: bool = True

    @classmethod
    def of(
        cls, reader: Reader, capacity: Capacity, options: DocumentOptions, *, is_aligned: bool = True
    ) -> DocumentMaker:
        """A maker for a reader. Without a language in the options, it has the language of the reader's tokenizer.

        Raises:
            TfexportError: the marks of copied text are markup.
        """
        if keep := reader.terms.keep if reader.terms else None:
            marked = f"a {keep[0]}b{keep[1]} c"
            if [run.text for run in runs_of(marked, options.markup, keep)] != [marked]:
                raise TfexportError(
                    f"the marks {keep[0]!r} and {keep[1]!r} are markup in {options.markup}. Give two others, such as '⟦ ⟧'."
                )
        known = reader.tokenizer.spacy_language if reader.tokenizer else None
        return cls(reader, capacity, options, options.language or known, is_aligned)

    def document(self, text: str) -> Document:
        """Split a text.

        Raises:
            RuntimeUnavailable: a required library is not installed.
            TfexportError: the text cannot be read.
        """
        return document(
            text,
            parts=self.options.parts,
            language=self.language,
            fits=self._fits,
            markup=self.options.markup,
            is_aligned=self.is_aligned,
            keep=self.reader.terms.keep if self.reader.terms else None,
        )

    def _fits(self, text: str) -> bool:
        """Whether the model can read a text as a whole."""
        most = min(self.reader.config.max_source_length, self.capacity.source)
        tokenizer = self.reader.tokenizer
        more = 2 + (len(tokenizer.before) + len(tokenizer.after) + len(tokenizer.prefix) if tokenizer else 0)
        if text.isascii() and len(text) + more <= min(most, LONGEST_WORD):  # an id has at least one byte
            return True
        raw = text.encode("utf-8", "surrogatepass")
        if len(raw) > most_bytes(most):
            return False
        try:
            return len(self.reader.ids(raw)) <= most
        except Unreadable as problem:
            return problem.status != "too_long"


@dataclass(frozen=True)
class Unit:
    """The input of one output: a line, or a whole document."""

    line: int
    """The line of the input where the unit begins, from 1."""
    document: Document
    before: str = ""
    """Text before the document in the output, such as other columns."""
    after: str = ""
    status: str = "ok"
    """`ok`, or the problem of a unit that is not translated."""
    message: str = ""

    @property
    def lines(self) -> list[bytes]:
        """The segments as lines. Without segments this is an empty line, so that every unit has a result in order."""
        return [segment.text.encode("utf-8", "surrogatepass") for segment in self.document.segments] or [b""]


@dataclass(frozen=True)
class SentenceResult:
    """The result of a segment."""

    segment: Segment
    result: Result


@dataclass(frozen=True)
class DocumentResult:
    """The result of a unit."""

    line: int
    status: str
    """The first status of a sentence that is not `ok`. Without one, `cut` if a sentence was longer than the model reads."""
    message: str
    text: str
    """The output with the text around the document."""
    sentences: tuple[SentenceResult, ...]
    offset: int = 0
    """The number of characters before the document. Spans of segments count from there."""
    alternatives: tuple[str, ...] = ()
    """`text` with the next outputs of the sentences, if they have several; without duplicates."""


Decode = Callable[[Iterable[bytes], int], Iterator[Result]]
"""Takes lines and the number of lines that are done. Yields a result for each other line, as `translate` does."""


def translate_units(
    units: Iterable[Unit], decode: Decode, writer: Writer, *, window: int = 1, done: int = 0, is_aligned: bool = False
) -> Iterator[DocumentResult]:
    """Decode the segments of units, and yield a result for each unit, in order.

    Args:
        window: segments that are decoded together. A continued run begins with a whole window, so that its segments are in
            the same batches as without the interruption.
        done: units whose results exist already.
        is_aligned: put tags into translations.

    Raises:
        TfexportError: there are fewer units than `done`.
    """
    stream = iter(units)
    passed: deque[bytes] = deque(maxlen=window)
    count = before = 0
    for unit in islice(stream, done):
        lines = unit.lines
        passed.extend(lines)
        count, before = count + 1, before + len(lines)
    if count < done:
        raise TfexportError(
            f"the input has {count} lines, and {done} are done: it is another input. Begin anew without --resume."
        )
    again = before % window
    waiting: deque[tuple[Unit, int]] = deque()

    def lines_of_units() -> Iterator[bytes]:
        for unit in stream:
            lines = unit.lines
            waiting.append((unit, len(lines)))
            yield from lines

    begun = list(passed)[len(passed) - again :]
    results = decode(chain(repeat(b"", before - again), begun, lines_of_units()), before - again)
    of_unit: list[Result] = []
    for result in islice(results, again, None):
        of_unit.append(result)
        unit, size = waiting[0]
        if len(of_unit) == size:
            waiting.popleft()
            yield result_of_unit(unit, of_unit, writer, is_aligned=is_aligned)
            of_unit = []


def result_of_unit(unit: Unit, results: Sequence[Result], writer: Writer, *, is_aligned: bool) -> DocumentResult:
    """The result of a unit, from the results of its segments."""
    pairs = list(zip(unit.document.segments, results, strict=bool(unit.document.segments)))
    ranks = max((len(result.hypotheses) for _, result in pairs), default=1)
    versions = [
        [aligned_of(result, writer, segment.text, is_aligned=is_aligned, rank=rank) for segment, result in pairs]
        for rank in range(max(1, ranks))
    ]
    texts = [unit.before + unit.document.text(version) + unit.after for version in versions]
    sentences = tuple(SentenceResult(segment, result) for segment, result in pairs)
    status, message = (unit.status, unit.message) if unit.message else _status(sentences, versions[0])
    others = tuple(dict.fromkeys(text for text in texts[1:] if text != texts[0]))
    return DocumentResult(unit.line, status, message, texts[0], sentences, len(unit.before), others)


def _status(sentences: Sequence[SentenceResult], translations: Sequence[Aligned | None]) -> tuple[str, str]:
    pairs = list(zip(sentences, translations, strict=True))
    failed = [sentence for sentence, translation in pairs if translation is None]
    if failed:
        first, more = failed[0].result, f"; {len(failed)} sentences" if len(failed) > 1 else ""
        status = "tokenizer_error" if first.hypotheses else first.status
        return status, f"{_shown(failed[0].segment)} is left unchanged{more}: {first.message or status}"
    cut = [sentence for sentence in sentences if sentence.segment.is_piece]
    pieces = (
        f"text that is too long for the model was cut: {len(cut)} pieces, the first is {_shown(cut[0].segment)}"
        if cut
        else ""
    )
    limited = [sentence for sentence in sentences if sentence.result.status != "ok"]
    if limited:
        message = f"{_shown(limited[0].segment)}: {limited[0].result.message}"
        return limited[0].result.status, f"{message}; {pieces}" if cut else message
    if cut:
        return "cut", pieces
    return ("ok", "") if sentences else ("empty", "")


def _shown(segment: Segment) -> str:
    text = segment.text if len(segment.text) <= 30 else f"{segment.text[:30]}..."
    return f"{text!r} (characters {segment.start} to {segment.end})"


def aligned_of(result: Result, writer: Writer, text: str, *, is_aligned: bool, rank: int = 0) -> Aligned | None:
    """An output of a result as text. With `is_aligned`, also its tokens and their attention to the source `text`.

    None if there is no output, or the tokenizer cannot write it.

    Args:
        rank: the rank of the output, from 0. If there are fewer outputs, the last one.
    """
    if not result.hypotheses:
        return None
    best, source = result.hypotheses[min(rank, len(result.hypotheses) - 1)], result.source
    words = writer.aligner.words(best, source)
    try:
        written = writer.text(best.ids, words)
        if not is_aligned or best.attention is None or source is None or source.tokens is None:
            return Aligned(written)
        growing = GrowingText(
            lambda ids: writer.text(ids, {place: word for place, word in words.items() if place < len(ids)}),
            writer.tokenizer,
        )
        targets, start = [], 0
        for place, index in enumerate(best.ids, start=1):
            end = start + len(growing.add(index, last=place == len(best.ids)))
            targets.append((start, end))
            start = end
    except PanicError as error:
        logging.getLogger(__name__).warning("warning: %r: tokenizer_error: %s", text[:30], error)
        return None
    own = slice(source.tokens.start, source.tokens.end)
    sources = _spans_of(source.tokens.words[own], text)
    return Aligned(
        written, targets, sources, best.attention[: len(targets), own], _required_spans(best, source, targets)
    )


def _required_spans(output: Hypothesis, source: Source, targets: Sequence[Span]) -> list[Span]:
    """The characters of the required phrases in an output.

    Args:
        targets: the characters of each of its tokens.
    """
    spans = []
    for ids in {tuple(phrase.ids) for phrase in source.required}:
        for place in range(len(targets) - len(ids) + 1):
            if tuple(output.ids[place : place + len(ids)]) == ids:
                spans.append((targets[place][0], targets[place + len(ids) - 1][1]))
    return spans


def _spans_of(words: Sequence[str], text: str) -> list[tuple[int, int]]:
    """The span of `text` for each token; empty for a token that is spelled differently."""
    spans, done = [], 0
    folded = text.lower()
    if len(folded) != len(text):
        folded = text
    for word in words:
        plain = word.strip("\u2581\u0120 ").removesuffix("@@")
        for shape, within in ((plain, text), (plain.lower(), folded)):
            start = within.find(shape, done, done + len(shape) + _FARTHEST) if shape else -1
            if start >= 0:
                done = start + len(shape)
                break
        spans.append((done if start < 0 else start, done))
    return spans


def document_record(result: DocumentResult, writer: Writer) -> dict[str, Any]:
    """The record of a unit in `jsonl`."""
    sentences = []
    for sentence in result.sentences:
        segment, record = sentence.segment, writer.record(sentence.result)
        del record["line"]
        span = {"start": segment.start + result.offset, "end": segment.end + result.offset}
        piece = {"piece": True} if segment.is_piece else {}
        sentences.append({**span, "source": segment.text, **piece, **record})
    message = {"message": result.message} if result.message else {}
    return {"line": result.line, "status": result.status, **message, "text": result.text, "sentences": sentences}
