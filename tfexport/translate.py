"""Lines in, lines out: text -> ids -> encode -> search -> text. The file to read first.

Lines stream through in windows. A window is sorted by length, cut into batches, decoded, and put back into order; so
memory depends on the window, not on the input, and every input line has its result, in its place.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from tfexport.batching import Team, decode_windows
from tfexport.bundle import Bundle
from tfexport.config import ModelConfig
from tfexport.errors import TfexportError, TokenizerError
from tfexport.runtimes.base import Capacity, Runtime
from tfexport.search import Hypothesis, SearchOptions
from tfexport.tokenizers import TextTokenizer

InputFormat = Literal["text", "tokens", "ids"]
OutputFormat = Literal["text", "tokens", "ids", "jsonl"]
Status = Literal["ok", "length_limit", "empty", "too_long", "invalid_utf8", "invalid_ids", "unknown_token"]
"""`length_limit`: decoded, but ended by the limit, not by eos. All after it: not decoded, the output line is empty."""

WINDOW_BATCHES = 16
"""Batches of a window: enough lines that those of a batch are of about one length."""


@dataclass(frozen=True)
class Result:
    """What became of one input line."""

    line: int
    """Counted from 1."""
    status: Status
    message: str
    """What is wrong, for every status but `ok` and `empty`."""
    hypotheses: tuple[Hypothesis, ...]


@dataclass(frozen=True)
class Reader:
    """Reads input lines as the encoder's ids."""

    config: ModelConfig
    tokenizer: TextTokenizer | None
    format: InputFormat

    @classmethod
    def of(cls, bundle: Bundle, format: InputFormat | None) -> Reader:
        """A reader for a bundle: of text where no format is said, of ids where there is no vocabulary.

        Raises:
            TfexportError: the format needs a vocabulary that the bundle does not have.
        """
        tokenizer = bundle.tokenizer("source")
        format = format or ("text" if tokenizer else "ids")
        if tokenizer is None and format != "ids":
            raise TfexportError(
                f"{bundle.directory} has no source vocabulary for the input format {format}. Use --input-format "
                "ids, or export again with --src-vocab."
            )
        return cls(bundle.config, tokenizer, format)

    def ids(self, raw: bytes) -> list[int]:
        """The ids of one line.

        Raises:
            Unreadable: the line has none that the model can read.
        """
        try:
            text = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise Unreadable("invalid_utf8", f"byte {error.start + 1} is not UTF-8") from None
        if not text:
            raise Unreadable("empty", "")
        ids = self._given_ids(text) if self.format == "ids" else self._encoded(text)
        if len(ids) > self.config.max_source_length:
            most = self.config.max_source_length
            raise Unreadable("too_long", f"{len(ids)} ids, the model reads at most {most}: split the line")
        pad_id = self.config.pad_id
        if pad_id in ids and pad_id not in (self.config.bos_id, self.config.eos_id, self.config.unk_id):
            # PyTorch code hides padding by its id, these graphs by length: as a real token it would be something new.
            raise Unreadable("invalid_ids", f"it has the padding id {pad_id}: leave padding out")
        return ids

    def _given_ids(self, text: str) -> list[int]:
        size = self.config.src_vocab_size
        words = text.split()
        # isascii and isdecimal: int() would also take "1_000", "+1" and digits of other scripts.
        wrong = next((w for w in words if not (w.isascii() and w.isdecimal() and len(w) < 10 and int(w) < size)), None)
        if wrong is not None:
            raise Unreadable("invalid_ids", f"{wrong[:20]!r} is not an id from 0 to {size - 1}")
        return [int(word) for word in words]

    def _encoded(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        try:
            ids = self.tokenizer.encode(text) if self.format == "text" else self.tokenizer.ids(text.split())
        except TokenizerError as error:
            raise Unreadable("unknown_token", str(error)) from None
        if not ids:
            raise Unreadable("empty", "")
        config = self.config
        ids = [*self.tokenizer.before, *ids, *self.tokenizer.after]
        return [config.bos_id] * config.source_bos + ids + [config.eos_id] * config.source_eos


class Unreadable(Exception):
    """A line that is marked instead of decoded; never leaves this module."""

    def __init__(self, status: Status, message: str):
        super().__init__(message)
        self.status: Status = status


@dataclass(frozen=True)
class Writer:
    """Writes a result as one output line, without the newline."""

    config: ModelConfig
    tokenizer: TextTokenizer | None
    format: OutputFormat

    @classmethod
    def of(cls, bundle: Bundle, format: OutputFormat | None) -> Writer:
        """A writer for a bundle: of text where no format is said, of ids where there is no vocabulary.

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
        """The hypotheses, best first, separated by tabs; an empty line where there are none. `jsonl` has all facts."""
        if self.format == "jsonl":
            return json.dumps(self._record(result), ensure_ascii=False)
        return "\t".join(self._one(hypothesis.ids) for hypothesis in result.hypotheses)

    def _one(self, ids: Sequence[int]) -> str:
        if self.format == "ids":
            return " ".join(map(str, ids))
        if self.format == "text":
            return self.text(ids)
        assert self.tokenizer is not None
        return _one_column(" ".join(self.tokenizer.tokens([index for index in ids if index != self.config.eos_id])))

    def text(self, ids: Sequence[int]) -> str:
        """Output ids as text. There must be a vocabulary."""
        assert self.tokenizer is not None
        return _one_column(self.tokenizer.decode([index for index in ids if index != self.config.eos_id]))

    def _record(self, result: Result) -> dict[str, object]:
        hypotheses = [
            {
                **({"text": self.text(hypothesis.ids)} if self.tokenizer else {}),
                **({"tokens": self.tokenizer.tokens(hypothesis.ids)} if self.tokenizer else {}),
                "ids": list(hypothesis.ids),
                "score": round(hypothesis.score, 6),
                "log_prob": round(hypothesis.log_prob, 6),
                "finished": hypothesis.finished,
            }
            for hypothesis in result.hypotheses
        ]
        message = {"message": result.message} if result.message else {}
        return {"line": result.line, "status": result.status, **message, "hypotheses": hypotheses}


def _one_column(text: str) -> str:
    """`text` without the newlines and tabs that a vocabulary may hold."""
    return " ".join(text.split())


def translate(
    runtime: Runtime[Any],
    reader: Reader,
    lines: Iterable[bytes],
    options: SearchOptions,
    *,
    batch_size: int = 32,
    window: int | None = None,
    workers: int = 1,
    done: int = 0,
) -> Iterator[Result]:
    """Decode `lines` and yield a result for each, in order.

    Args:
        batch_size: sentences decoded together, at most: long ones come in smaller batches.
        window: lines read before any is decoded; by default 16 batches a worker. 1 answers each line at once.
        workers: that search at once, as `batching.Team` has them; more than 1 only over a runtime that takes them.
        done: lines to pass over, whose results are there already.

    Raises:
        TfexportError: there are fewer lines than are `done`.
    """
    stream = enumerate(without_bom(lines), start=1)
    passed = sum(1 for _ in islice(stream, done))
    if passed < done:
        raise TfexportError(
            f"the input has {passed} lines, and {done} are done: it is another input. Begin anew without --resume."
        )
    size = window or batch_size * WINDOW_BATCHES * workers
    under_way: deque[tuple[dict[int, Result], list[int]]] = deque()  # of each window: what is known, what is decoded

    def windows() -> Iterator[list[list[int]]]:
        while chunk := list(islice(stream, size)):
            known, readable = _read(runtime.capacity, reader, chunk)
            under_way.append((known, list(readable)))
            yield list(readable.values())

    with Team(runtime, workers, options.beam) as team:
        for decoded in decode_windows(team, windows(), options, batch_size=batch_size):
            known, numbers = under_way.popleft()
            known |= {number: _result(number, found) for number, found in zip(numbers, decoded, strict=True)}
            yield from (known[number] for number in sorted(known))


def source_lengths(reader: Reader, lines: Iterable[bytes]) -> list[int]:
    """The number of ids of each line that can be decoded."""
    lengths = []
    for line in without_bom(lines):
        with suppress(Unreadable):
            lengths.append(len(reader.ids(line)))
    return lengths


def without_bom(lines: Iterable[bytes]) -> Iterator[bytes]:
    """`lines` without the byte order mark that some editors put before the first."""
    for index, line in enumerate(lines):
        yield line if index else line.removeprefix(BOM_UTF8)


def _read(
    capacity: Capacity, reader: Reader, chunk: list[tuple[int, bytes]]
) -> tuple[dict[int, Result], dict[int, list[int]]]:
    """The lines of a window by their numbers: results of those that cannot be decoded, ids of the others."""
    results: dict[int, Result] = {}
    readable: dict[int, list[int]] = {}
    for number, raw in chunk:
        try:
            readable[number] = _within(capacity, reader.ids(raw))
        except Unreadable as problem:
            results[number] = Result(number, problem.status, str(problem), ())
    return results, readable


def _within(capacity: Capacity, ids: list[int]) -> list[int]:
    """`ids`, if the runtime takes so many.

    Raises:
        Unreadable: it takes fewer, though the model would read them.
    """
    if len(ids) > capacity.source:
        most = capacity.source
        raise Unreadable(
            "too_long", f"{len(ids)} ids, this runtime takes at most {most}: build with a larger --max-source"
        )
    return ids


def _result(number: int, hypotheses: list[Hypothesis]) -> Result:
    if hypotheses[0].finished:
        return Result(number, "ok", "", tuple(hypotheses))
    message = f"ended by the limit of {len(hypotheses[0].ids)} tokens, not by the model: see --max-length"
    return Result(number, "length_limit", message, tuple(hypotheses))
