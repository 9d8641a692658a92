"""Lines in, lines out: text -> ids -> encode -> search -> text. The file to read first.

Lines are read in windows. A window is sorted by length, split into batches, decoded, and put back into order. So memory
depends on the window, not on the input, and every input line has its result at its place.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

from tfexport.bundle.reader import Bundle
from tfexport.config import ModelConfig
from tfexport.decoding.alignments import NO_ALIGNER, Aligner, AlignmentFormat, Replacement
from tfexport.decoding.batches import decode_windows
from tfexport.decoding.line_reader import Line, Reader, Status, TargetReader, Unreadable, ids_in
from tfexport.decoding.read_ahead import ReadAhead
from tfexport.decoding.request_options import AlignmentOptions, InputFormat, OutputFormat
from tfexport.decoding.shortlist import Shortlist
from tfexport.decoding.workers import WorkerPool
from tfexport.errors import TfexportError, TokenizerError
from tfexport.runtimes.base import Capacity, Runtime
from tfexport.search.search import Hypothesis, SearchOptions, Source
from tfexport.system.input_files import EndlessLine
from tfexport.system.json_text import json_text
from tfexport.text.tokenizer_parts import PanicError
from tfexport.text.tokenizers import TextTokenizer

Item = TypeVar("Item")

WINDOW_BATCHES = 16
"""Batches in a window: enough for the lines of a batch to have similar lengths."""


@dataclass(frozen=True)
class Result:
    """The result of one input line."""

    line: int
    """Counted from 1."""
    status: Status
    message: str
    """The problem, for every status except `ok` and `empty`."""
    hypotheses: tuple[Hypothesis, ...]
    source: Source | None = None
    """The source that was decoded."""


@dataclass(frozen=True)
class Writer:
    """Writes a result as one output line, without the newline."""

    config: ModelConfig
    tokenizer: TextTokenizer | None
    format: OutputFormat
    aligner: Aligner = NO_ALIGNER
    """Writes the alignments of outputs."""

    @classmethod
    def of(cls, bundle: Bundle, format: OutputFormat | None) -> Writer:
        """A writer for a bundle. The default format is text, or ids if the bundle has no vocabulary.

        Raises:
            TfexportError: the format needs a vocabulary that the bundle does not have.
        """
        tokenizer = bundle.tokenizer("target")
        format = format or ("text" if tokenizer else "ids")
        if tokenizer is None and format in ("text", "tokens"):
            raise TfexportError(
                f"{bundle.directory} has no target vocabulary for the output format {format}. Use --output-format "
                "ids or jsonl, or export again with --tgt-vocab."
            )
        return cls(bundle.config, tokenizer, format)

    def line(self, result: Result) -> str:
        """The hypotheses, best first, separated by tabs; an empty line if there are none. `jsonl` has all fields.

        If the tokenizer cannot write them, log a warning and return the line of a result without hypotheses.
        """
        try:
            return self._line(result)
        except PanicError as error:
            logging.getLogger(__name__).warning("warning: line %d: tokenizer_error: %s", result.line, error)
            return self._line(Result(result.line, "tokenizer_error", str(error), ()))

    def _line(self, result: Result) -> str:
        if self.format == "jsonl":
            return json_text(self.record(result), ensure_ascii=False)
        return "\t".join(self._output(hypothesis, result.source) for hypothesis in result.hypotheses)

    def _output(self, hypothesis: Hypothesis, source: Source | None) -> str:
        words = self.aligner.words(hypothesis, source)
        if self.format == "ids":
            line = " ".join(map(str, hypothesis.ids))
        elif self.format == "text":
            line = self.text(hypothesis.ids, words)
        else:
            tokens, eos = self.tokens(hypothesis.ids, words), self.config.eos_id
            line = _one_column(" ".join(t for t, index in zip(tokens, hypothesis.ids, strict=True) if index != eos))
        return line + self.aligner.after(hypothesis, source)

    def tokens(self, ids: Sequence[int], words: Mapping[int, str]) -> list[str]:
        """The tokens of output ids, with `words` at some places. There must be a vocabulary."""
        assert self.tokenizer is not None
        return [words.get(place, token) for place, token in enumerate(self.tokenizer.tokens(ids))]

    def reader(self, *, whole: bool = False, lines: Iterable[bytes] | None = None) -> TargetReader:
        """A reader of outputs in this writer's format; for jsonl, in text or ids. See `TargetReader`."""
        format: InputFormat = self.format if self.format != "jsonl" else "text" if self.tokenizer else "ids"
        return TargetReader(self.config, self.tokenizer, format, whole, lines)

    def token_ids(self, words: str) -> tuple[int, ...]:
        """The ids of tokens of the vocabulary, separated by spaces; of ids if the format is ids.

        Raises:
            TfexportError: the vocabulary lacks one of them.
        """
        format: InputFormat = "tokens" if self.tokenizer and self.format != "ids" else "ids"
        try:
            if self.tokenizer is not None and format == "tokens":
                self.tokenizer.require(words.split())  # the unknown token would change the meaning
            return tuple(ids_in(words, format, self.tokenizer, self.config.tgt_vocab_size)) if words.split() else ()
        except (Unreadable, TokenizerError) as problem:
            raise TfexportError(f"{words!r} are not {format} of the target vocabulary: {problem}. Change it.") from None

    def text(self, ids: Sequence[int], words: Mapping[int, str] | None = None) -> str:
        """Output ids as text, with `words` at some places, separated by spaces. There must be a vocabulary."""
        assert self.tokenizer is not None
        if not words:
            return self.tokenizer.decode_line([index for index in ids if index != self.config.eos_id])
        parts, start = [], 0
        for place in (*sorted(words), len(ids)):
            run = [index for index in ids[start:place] if index != self.config.eos_id]
            parts += [self.tokenizer.decode(run), words.get(place, "")]
            start = place + 1
        return _one_column(" ".join(parts))

    def has_unknown(self, result: Result) -> bool:
        """Whether an output contains the vocabulary's unknown token."""
        unknown = self.tokenizer.unknown_id if self.tokenizer else None
        return any(unknown in hypothesis.ids for hypothesis in result.hypotheses)

    def score_record(self, result: Result) -> dict[str, object]:
        """The record of a line in `tfexport score --json`."""
        record = self.record(result)
        del record["hypotheses"]
        for output in result.hypotheses:
            tokens = {"tokens": self.tokenizer.tokens(output.ids)} if self.tokenizer else {}
            steps = [round(step, 6) for step in output.token_log_probs]
            record |= {"log_prob": round(output.log_prob, 6), **tokens}
            record |= {"ids": list(output.ids), "token_log_probs": steps}
        return record

    def record(self, result: Result) -> dict[str, object]:
        """The record of a line in `jsonl`."""
        words = [self.aligner.words(hypothesis, result.source) for hypothesis in result.hypotheses]
        hypotheses = [
            {
                **({"text": self.text(hypothesis.ids, new)} if self.tokenizer else {}),
                **({"tokens": self.tokens(hypothesis.ids, new)} if self.tokenizer else {}),
                "ids": list(hypothesis.ids),
                "score": round(hypothesis.score, 6),
                "log_prob": round(hypothesis.log_prob, 6),
                "finished": hypothesis.finished,
                **_unless_empty("token_log_probs", [round(step, 6) for step in hypothesis.token_log_probs]),
                **_unless_empty("missing", [phrase.text for phrase in hypothesis.missing]),
                **self.aligner.record(hypothesis, result.source),
            }
            for hypothesis, new in zip(result.hypotheses, words, strict=True)
        ]
        message = {"message": result.message} if result.message else {}
        about = {"line": result.line, "status": result.status, **message, **self.aligner.source_record(result.source)}
        return {**about, "hypotheses": hypotheses}


def with_alignments(options: AlignmentOptions, reader: Reader, writer: Writer) -> tuple[Reader, Writer]:
    """The reader and the writer, extended for alignments and the replacement of unknown words.

    Raises:
        TfexportError: the format of alignments is unknown, or there is no vocabulary or unknown token for replacements.
    """
    if not options:
        return reader, writer
    if options.replace_unk and writer.tokenizer is None:
        raise TfexportError("the bundle has no target vocabulary to write words in. Leave --replace-unk out.")
    aligned = AlignmentFormat.parse(options.alignments) if options.alignments is not None else None
    replacement = Replacement.of(writer.config, options.unk_dictionary) if options.replace_unk else None
    aligner = Aligner(writer.config.eos_id, aligned, replacement)
    return replace(reader, tells_tokens=True), replace(writer, aligner=aligner)


def _unless_empty(name: str, values: list[Any]) -> dict[str, list[Any]]:
    """The field `name` of a JSON record; no field without values."""
    return {name: values} if values else {}


def _one_column(text: str) -> str:
    """`text` without newlines and tabs, which tokens of a vocabulary may contain."""
    return " ".join(text.split())


def window_size(batch_size: int, workers: int) -> int:
    """The number of lines that are read before the first is decoded."""
    return batch_size * WINDOW_BATCHES * workers


def translate(
    runtime: Runtime,
    reader: Reader,
    lines: Iterable[bytes],
    options: SearchOptions,
    *,
    batch_size: int = 32,
    max_batch_tokens: int | None = None,
    window: int | None = None,
    workers: int = 1,
    done: int = 0,
    outputs: TargetReader | None = None,
    shortlist: Shortlist | None = None,
    live: bool = False,
) -> Iterator[Result]:
    """Decode `lines` and yield a result for each, in order.

    Args:
        batch_size: the largest number of sentences decoded together; long sentences have smaller batches.
        max_batch_tokens: the largest number of source ids in a batch, padding included.
        window: lines read before the first is decoded; by default `window_size`. 1 answers each line at once.
        workers: concurrent searches, see `workers.WorkerPool`; more than 1 needs a runtime that supports it.
        done: lines to skip, because their results exist already.
        outputs: reads the prefixes of outputs.
        shortlist: the words that outputs may contain; by default all.
        live: return each result without waiting for later lines. A thread reads the lines, and a window has those that
            have arrived.

    Raises:
        TfexportError: there are fewer lines than `done`, or the numbers of lines and prefixes differ.
    """
    stream = enumerate(reader.lines(lines, outputs), start=1)
    pass_over(stream, done)
    failed: list[Exception] = []
    readable_lines = until_failure(stream, failed, Exception if live else EndlessLine)
    size = window or window_size(batch_size, workers)
    # For each window: the results that are known without decoding, and the sources to decode.
    under_way: deque[tuple[dict[int, Result], dict[int, Source]]] = deque()

    ahead: ReadAhead[tuple[int, Line]] | None = None

    def windows() -> Iterator[list[Source] | None]:
        while True:
            if ahead is not None and under_way and not ahead.has_news():
                yield None
                continue
            chunk = islice(readable_lines, size) if ahead is None else ahead.window(size)
            known, readable = read_window(runtime.capacity, reader, outputs, chunk, shortlist)
            if not known and not readable:
                break
            under_way.append((known, readable))
            yield list(readable.values())

    with ExitStack() as stack:
        pool = stack.enter_context(WorkerPool(runtime, workers, options))
        if live:
            pool.begin()  # fork while there is no other thread
            ahead = stack.enter_context(ReadAhead(readable_lines, size))
        batches = decode_windows(pool, windows(), options, batch_size=batch_size, max_batch_tokens=max_batch_tokens)
        for decoded in batches:
            known, readable = under_way.popleft()
            sources = zip(readable.items(), decoded, strict=True)
            known |= {number: result_of(number, hypotheses, source) for (number, source), hypotheses in sources}
            yield from (known[number] for number in sorted(known))
    if failed:
        raise failed[0]


def until_failure(
    lines: Iterable[Item], failed: list[Exception], kind: type[Exception] = EndlessLine
) -> Iterator[Item]:
    """`lines` up to an error of this `kind`, which is appended to `failed`: lines before the error have results."""
    try:
        yield from lines
    except kind as error:
        failed.append(error)


def pass_over(lines: Iterator[object], done: int) -> None:
    """Skip the lines whose results exist already.

    Raises:
        TfexportError: the input has fewer lines.
    """
    passed = sum(1 for _ in islice(lines, done))
    if passed < done:
        raise TfexportError(
            f"the input has {passed} lines, and {done} are done: it is another input. Begin anew without --resume."
        )


def scored(result: Result) -> Result:
    """The result of a line whose whole output was given. Its status is `ok` if the output was scored: a length limit has no
    effect on a given output."""
    return Result(result.line, "ok", "", result.hypotheses) if result.hypotheses else result


def read_window(
    capacity: Capacity,
    reader: Reader,
    outputs: TargetReader | None,
    chunk: Iterable[tuple[int, Line]],
    shortlist: Shortlist | None = None,
) -> tuple[dict[int, Result], dict[int, Source]]:
    """Read the lines of a window.

    Returns:
        By line number: results for the lines that cannot be decoded, and sources for the others.
    """
    results: dict[int, Result] = {}
    readable: dict[int, Source] = {}
    terms = reader.terms
    for number, line in chunk:
        try:
            raw, pieces = terms.divided(line.source) if terms else (line.source, ())
            ids = _within(capacity, reader.ids(raw))
            source = outputs.source(ids, line.begins, number) if outputs else Source(ids, line=number)
            source.tokens = reader.tokens(raw, ids)
            source = terms.applied(source, pieces, line.phrases) if terms else source
            readable[number] = shortlist.applied(source) if shortlist else source
        except Unreadable as problem:
            results[number] = Result(number, problem.status, str(problem), ())
    return results, readable


def _within(capacity: Capacity, ids: list[int]) -> list[int]:
    """The ids of a source, unchanged.

    Raises:
        Unreadable: the runtime accepts fewer ids, although the model would read them.
    """
    if len(ids) > capacity.source:
        most = capacity.source
        raise Unreadable(
            "too_long", f"{len(ids)} ids, this runtime takes at most {most}: build with a larger --max-source"
        )
    return ids


def result_of(number: int, hypotheses: list[Hypothesis], source: Source | None = None) -> Result:
    """The result of line `number`, with the status that its best hypothesis has."""
    if missing := hypotheses[0].missing:
        named = ", ".join(repr(phrase.text or " ".join(map(str, phrase.ids))) for phrase in missing)
        message = f"the output lacks {named}: the length limit leaves no room for it, or a rule forbids it"
        return Result(number, "phrases_missing", message, tuple(hypotheses), source)
    if hypotheses[0].finished:
        return Result(number, "ok", "", tuple(hypotheses), source)
    message = f"ended by the limit of {len(hypotheses[0].ids)} tokens, not by the model: see --max-length"
    return Result(number, "length_limit", message, tuple(hypotheses), source)
