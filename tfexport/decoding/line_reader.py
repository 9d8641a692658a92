"""Reads lines of text, tokens or ids as ids, or reports the problem of a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple, Protocol

from tfexport.bundle.reader import Bundle
from tfexport.config import ModelConfig
from tfexport.decoding.request_options import InputFormat
from tfexport.errors import TfexportError, TokenizerError
from tfexport.search.hypothesis import Source, SourceTokens
from tfexport.system.input_files import LONGEST_LINE
from tfexport.text.tokenizer_parts import PanicError
from tfexport.text.tokenizers import TextTokenizer, WordTooLong

Status = Literal[
    "ok",
    "length_limit",
    "phrases_missing",
    "empty",
    "too_long",
    "invalid_utf8",
    "invalid_ids",
    "invalid_phrases",
    "unknown_token",
    "tokenizer_error",
]
"""`length_limit`: decoded, but ended by the limit, not by eos. `phrases_missing`: decoded, but the output lacks a required
phrase. Lines with any status after these two are not decoded, and their output line is empty."""


BYTES_PER_ID = 32
"""The largest number of bytes of a line for each id that the model reads: several times what any language needs. Longer
lines are not tokenised, because some tokenisers take minutes for a line of a megabyte."""

SHORTEST_LIMIT = 8192
"""The smallest limit of bytes per line, even for models that read few ids."""


def most_bytes(ids: int) -> int:
    """The largest number of bytes of a line for a model that reads or writes at most `ids` ids."""
    return min(LONGEST_LINE // 2, max(SHORTEST_LIMIT, BYTES_PER_ID * ids))


class Unreadable(Exception):
    """A line that cannot be decoded: its result has this status and message."""

    def __init__(self, status: Status, message: str):
        super().__init__(message)
        self.status: Status = status


class Line(NamedTuple):
    """A line of the input, with requirements on its output."""

    source: bytes
    begins: bytes = b""
    """The prefix of the output."""
    phrases: Sequence[bytes] = ()
    """Phrases that the output must contain."""


class Piece(NamedTuple):
    """A part of a source."""

    text: str
    is_kept: bool
    """The part is copied."""


class LineTerms(Protocol):
    """Reads the phrases of lines; see `terminology.Terminology`."""

    @property
    def keep(self) -> tuple[str, str] | None:
        """The marks before and after text that is copied."""
        ...

    @property
    def most_bytes(self) -> int:
        """The largest number of bytes of the phrases that are read in addition to the lines, if known."""
        ...

    def require_readable(self) -> None:
        """Raises: TfexportError: a phrase that is forbidden in all outputs cannot be read."""
        ...

    def lines(self, pairs: Iterable[tuple[bytes, bytes]], *, has_prefixes: bool) -> Iterator[Line]:
        """The lines of an input, from pairs of a source and an output prefix. The prefix may also be in the input."""
        ...

    def divided(self, raw: bytes) -> tuple[bytes, list[Piece]]:
        """A source without its marks, and its pieces.

        Raises:
            Unreadable: an opening or closing mark has no counterpart.
        """
        ...

    def applied(self, source: Source, pieces: Iterable[Piece], phrases: Iterable[bytes]) -> Source:
        """A source whose outputs must contain its phrases.

        Raises:
            Unreadable: the model cannot generate one of the phrases.
        """
        ...


@dataclass(frozen=True)
class Reader:
    """Reads input lines as the encoder's ids."""

    config: ModelConfig
    tokenizer: TextTokenizer | None
    format: InputFormat
    tells_tokens: bool = False
    """Also return the tokens of sources."""
    terms: LineTerms | None = field(default=None, compare=False)
    """The required and forbidden phrases of outputs."""

    @classmethod
    def of(cls, bundle: Bundle, format: InputFormat | None) -> Reader:
        """A reader for a bundle. The default format is text, or ids if the bundle has no vocabulary.

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
            Unreadable: the model cannot read the line.
        """
        most = self.config.max_source_length
        if len(raw) > most_bytes(most):
            message = f"more than {most_bytes(most):,} bytes, the model reads at most {most} ids: split the line"
            raise Unreadable("too_long", message)
        try:
            text = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise Unreadable("invalid_utf8", f"byte {error.start + 1} is not UTF-8") from None
        if not text:
            raise Unreadable("empty", "")
        ids = ids_in(text, self.format, self.tokenizer, self.config.src_vocab_size)
        if self.tokenizer is not None and self.format != "ids":
            config, ids = self.config, [*self.tokenizer.before, *ids, *self.tokenizer.after]
            ids = [config.bos_id] * config.source_bos + ids + [config.eos_id] * config.source_eos
            if max(ids) >= config.src_vocab_size:  # of a vocabulary of another model
                last = config.src_vocab_size - 1
                raise Unreadable(
                    "invalid_ids", f"it has the id {max(ids)}, the model's last is {last}: give its vocabulary"
                )
        if len(ids) > most:
            raise Unreadable("too_long", f"{len(ids)} ids, the model reads at most {most}: split the line")
        pad_id = self.config.pad_id
        if pad_id in ids and pad_id not in (self.config.bos_id, self.config.eos_id, self.config.unk_id):
            # PyTorch code masks padding by its id, these graphs by length. A model has never seen padding as a token.
            raise Unreadable("invalid_ids", f"it has the padding id {pad_id}: leave padding out")
        return ids

    def lines(self, raw: Iterable[bytes], outputs: TargetReader | None) -> Iterator[Line]:
        """The lines of an input, with the prefixes of outputs and their required phrases.

        Raises:
            TfexportError: the numbers of lines differ.
        """
        pairs = outputs.pairs(raw) if outputs else ((line, b"") for line in raw)
        if self.terms is None:
            return (Line(*pair) for pair in pairs)
        return self.terms.lines(pairs, has_prefixes=outputs is not None and outputs.lines is None)

    def tokens(self, raw: bytes, ids: list[int]) -> SourceTokens | None:
        """The tokens of a line with these `ids`; None if the reader does not return tokens."""
        if not self.tells_tokens:
            return None
        text, own = raw.decode("utf-8").strip(), None
        if self.tokenizer is not None and self.format != "ids":
            own = self.tokenizer.written(text) if self.format == "text" else text.split()
        return SourceTokens.of(ids, self.config, self.tokenizer, own)


@dataclass(frozen=True)
class TargetReader:
    """Reads prefixes of outputs, or whole outputs, as ids without bos. A forced first token is optional.

    Args:
        whole: lines are whole outputs. Text and tokens get an eos; ids must already have theirs. Nothing is generated.
        lines: the lines of outputs, one for each line of the input; None if they are in the input, after a tab.
    """

    config: ModelConfig
    tokenizer: TextTokenizer | None
    format: InputFormat
    whole: bool = False
    lines: Iterable[bytes] | None = None

    def source(self, ids: list[int], raw: bytes, line: int) -> Source:
        """The source `ids` with the prefix of its output.

        Raises:
            Unreadable: `raw` cannot be read, or is longer than the model's outputs.
        """
        config, output = self.config, self.ids(raw)
        most = config.max_target_length
        if self.whole and self.format != "ids":
            output = [*output, config.eos_id]
        if not output and self.whole:
            raise Unreadable("empty", "")
        # The search adds a forced first token by itself. An output contains it if its format can express it.
        forced = config.forced_first_id >= 0
        if forced and output[:1] == [config.forced_first_id]:
            output = output[1:]
        length = len(output) + forced
        if config.eos_id in output[: -1 if self.whole else None]:
            raise Unreadable("invalid_ids", f"the output's part continues after the end, id {config.eos_id}")
        if length > most:
            raise Unreadable("too_long", f"{length} ids of output, the model writes at most {most}")
        return Source(ids, tuple(output), length if self.whole else None, line=line)

    def ids(self, raw: bytes, part: str = "the output's part", *, before: str = "") -> list[int]:
        """The ids of a part of an output; empty for an empty part.

        Args:
            part: the name of the part in errors.
            before: other text before the part.

        Raises:
            Unreadable: the part cannot be read, or has a word that the vocabulary lacks.
        """
        config = self.config
        most = most_bytes(config.max_target_length)
        if len(raw) > most:
            message = f"more than {most:,} bytes of output, the model writes at most {config.max_target_length} ids"
            raise Unreadable("too_long", message)
        try:
            text = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise Unreadable("invalid_utf8", f"byte {error.start + 1} of {part} is not UTF-8") from None
        size = config.tgt_vocab_size
        ids = ids_in(text, self.format, self.tokenizer, size, before=before) if text else []
        if not self.whole and self.tokenizer is not None and self.format != "ids":
            # Whole outputs may come from any system. A prefix is text that the user wants in the output, and <unk> is not.
            unknown = self.tokenizer.unknown_id
            if unknown is not None and unknown in ids and self.tokenizer.tokens([unknown])[0] not in text.split():
                message = f"{part} has words that the target vocabulary lacks: write them as the model would"
                raise Unreadable("unknown_token", message)
        return ids

    def pairs(self, lines: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Each input line with the prefix of its output.

        Raises:
            TfexportError: the numbers of lines differ.
        """
        if self.lines is None:
            for line in lines:
                source, _, target = line.partition(b"\t")
                yield source, target
            return
        for line, target in zip_longest(lines, self.lines):
            if line is None or target is None:
                longer, shorter = ("input", "outputs") if target is None else ("outputs", "input")
                raise TfexportError(f"there are more lines of the {longer} than of the {shorter}. Give one for each.")
            yield line, target


def ids_in(
    text: str, format: InputFormat, tokenizer: TextTokenizer | None, size: int, *, before: str = ""
) -> list[int]:
    """The ids of a line of text, tokens or ids, of a vocabulary of `size`.

    Args:
        before: other text before the line, which decides how a vocabulary splits text.

    Raises:
        Unreadable: the line is empty, or contains something that is not an id.
    """
    if format == "ids":
        words = text.split()
        # isascii and isdecimal: int() would also take "1_000", "+1" and digits of other scripts.
        wrong = next((w for w in words if not (w.isascii() and w.isdecimal() and len(w) < 10 and int(w) < size)), None)
        if wrong is not None:
            raise Unreadable("invalid_ids", f"{wrong[:20]!r} is not an id from 0 to {size - 1}")
        return [int(word) for word in words]
    assert tokenizer is not None
    try:
        ids = tokenizer.encode_after(before, text) if format == "text" else tokenizer.ids(text.split())
    except PanicError as error:
        raise Unreadable("tokenizer_error", str(error)) from None
    except WordTooLong as error:
        raise Unreadable("too_long", f"{error}: split the line") from None
    except TokenizerError as error:
        raise Unreadable("unknown_token", str(error)) from None
    if not ids:
        raise Unreadable("empty", "")
    return ids


def source_lengths(reader: Reader, lines: Iterable[bytes]) -> list[int]:
    """The number of ids of each line that can be decoded."""
    lengths = []
    for line in lines:
        with suppress(Unreadable):
            lengths.append(len(reader.ids(line)))
    return lengths


def read_pairs(
    lines: Iterable[bytes], targets: Iterable[bytes] | None, reader: Reader, say: Callable[[str], None]
) -> tuple[list[list[int]], list[str]]:
    """The ids of the lines that can be decoded, and their targets, if there are any.

    Raises:
        TfexportError: no line can be decoded, the numbers of targets and lines differ, or a target is not UTF-8.
    """
    sources, wanted = [], []
    left_out = 0
    ends = iter(targets) if targets is not None else None
    for number, line in enumerate(lines, start=1):
        target = next(ends, None) if ends is not None else b""
        if target is None:
            raise TfexportError(f"there are {number - 1} targets and more lines of input. Give one for each line.")
        try:
            sources.append(reader.ids(line))
        except Unreadable:
            left_out += 1
            continue
        try:
            if len(target) > LONGEST_LINE:
                raise TfexportError(
                    f"target {number} has more than {LONGEST_LINE:,} bytes. Give one sentence per line."
                )
            wanted.append(target.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            raise TfexportError(f"target {number} is not UTF-8, from byte {error.start + 1} on. Convert it.") from error
    if ends is not None and next(ends, None) is not None:
        raise TfexportError("there are more targets than lines of input. Give one for each line.")
    if left_out:
        say(f"note: {left_out} lines cannot be decoded (empty, too long, ...) and are not compared")
    if not sources:
        raise TfexportError("the input has no line that can be decoded. Give real sentences.")
    return sources, wanted
