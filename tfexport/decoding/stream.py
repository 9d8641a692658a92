"""Streams tokens as soon as they are decided, with the text that each of them adds.

In greedy search and sampling a token is decided when it is chosen. In beam search a token is decided when all hypotheses
that may still become the best output have it: the live ones, and the best finished one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from tfexport.decoding.line_reader import Reader, TargetReader
from tfexport.decoding.shortlist import Shortlist
from tfexport.decoding.translate import Result, Writer, read_window, result_of
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Runtime
from tfexport.search.search import Hypothesis, SearchOptions, Source, search_steps
from tfexport.system.json_text import json_text
from tfexport.text.tokenizers import TextTokenizer


@dataclass(frozen=True, slots=True)
class Step:
    """One token of an output."""

    id: int
    token: str
    """The token in the vocabulary; empty without a vocabulary."""
    text: str
    """The text that the token adds. Empty if it depends on later tokens, as for the first byte of a character."""
    log_prob: float


@dataclass(frozen=True, slots=True)
class Streamed:
    """A step of a line's output, or the end of the line with its `result`."""

    line: int
    """Counted from 1."""
    step: Step | None = None
    result: Result | None = None


def stream(
    runtime: Runtime, source: Source | Sequence[int], options: SearchOptions, writer: Writer
) -> Iterator[Step | Hypothesis]:
    """Decode one source (encoder ids). Yields each token as soon as it is decided, and then the whole output.

    The concatenated texts of the steps are the output's text.

    Args:
        writer: writes the text of tokens with the target vocabulary, if there is one.

    Raises:
        TfexportError: the options request more than one output, or `search` raises it.
    """
    refuse_several(options)
    searching = search_steps(runtime, [source], replace(options, scores=True, token_scores=True))
    text = StepTexts(writer)
    while True:
        try:
            decided = next(searching)
        except StopIteration as done:
            [[best]] = done.value
            break
        ids, log_probs = decided(0)
        yield from text.steps(ids.tolist(), log_probs.tolist())
    yield from text.steps(best.ids, best.token_log_probs, last=True)
    yield best if options.token_scores else replace(best, token_log_probs=())


class StepTexts:
    """Makes the steps of a growing output.

    Args:
        writer: writes the text of tokens with the target vocabulary, if there is one.
    """

    def __init__(self, writer: Writer):
        self._tokenizer, self._text = writer.tokenizer, GrowingText(writer.text, writer.tokenizer)
        self._n_steps = 0

    def steps(self, ids: Iterable[int], log_probs: Iterable[float], *, last: bool = False) -> Iterator[Step]:
        """The new steps, given all `ids` of the output so far.

        Args:
            last: the output is complete.
        """
        new = list(zip(ids, log_probs, strict=True))[self._n_steps :]
        for place, (index, log_prob) in enumerate(new):
            token = self._tokenizer.tokens([index])[0] if self._tokenizer else ""
            added = self._text.add(index, last=last and place == len(new) - 1)
            yield Step(index, token, added, log_prob)
        self._n_steps += len(new)


def refuse_several(options: SearchOptions) -> None:
    """Raises TfexportError if a search returns several outputs, because their order is known only at the end."""
    if options.nbest > 1 or options.samples > 1 or options.alternatives:
        raise TfexportError(
            "only one output per line can be streamed. Leave --nbest and --alternatives out, or give --samples 1."
        )


def stream_lines(
    runtime: Runtime,
    reader: Reader,
    lines: Iterable[bytes],
    options: SearchOptions,
    writer: Writer,
    *,
    outputs: TargetReader | None = None,
    shortlist: Shortlist | None = None,
) -> Iterator[Streamed]:
    """Decode `lines` one by one. Yields the steps of each line and then its result, which equals the result of `translate`.

    Raises:
        TfexportError: the options request more than one output per line, or the numbers of lines and prefixes differ.
    """
    refuse_several(options)
    for number, line in enumerate(reader.lines(lines, outputs), start=1):
        known, readable = read_window(runtime.capacity, reader, outputs, [(number, line)], shortlist)
        for result in known.values():
            yield Streamed(number, result=result)
        for source in readable.values():
            for step in stream(runtime, source, options, writer):
                if isinstance(step, Step):
                    yield Streamed(number, step=step)
                else:
                    yield Streamed(number, result=result_of(number, [step]))


def shown(events: Iterable[Streamed], writer: Writer, file: TextIO) -> Iterator[Result]:
    """Write `events` to `file` as they come, and yield the results of the lines.

    Text, tokens and ids become the lines that `decode` writes. `jsonl` has a line for each token, and the usual line, which
    has a `status`, at the end of an output.
    """
    begun = False
    for event in events:
        if event.step is not None:
            piece = _piece(event.line, event.step, writer)
            if piece and begun and writer.format in ("tokens", "ids"):
                piece = f" {piece}"
            begun |= bool(piece)
            file.write(piece)
        if event.result is not None:
            file.write(f"{writer.line(event.result) if writer.format == 'jsonl' else ''}\n")
            begun = False
        file.flush()
        if event.result is not None:
            yield event.result


def _piece(line: int, step: Step, writer: Writer) -> str:
    if writer.format == "jsonl":
        text = {"token": step.token, "text": step.text} if writer.tokenizer else {}
        event = {"line": line, "id": step.id, **text, "log_prob": round(step.log_prob, 6)}
        return json_text(event, ensure_ascii=False) + "\n"
    if writer.format == "ids":
        return str(step.id)
    if writer.format == "tokens":
        return "" if step.id == writer.config.eos_id else " ".join(step.token.split())
    return step.text


_UNSETTLED = re.compile(r"[\s\ufffd@]+\Z")
"""The end of a text that may change with later tokens: white space, which is not written at the end of a text; the first
bytes of a character, which decoders write as U+FFFD; and the join of BPE, `@@`."""
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")
"""A byte token in vocabularies of SentencePiece. Decoders read a run of byte tokens as a whole."""


class GrowingText:
    """The growing text of an output.

    Text that was returned never changes. So only text that no later token can change is returned.

    Args:
        text: converts the ids of an output to its text.
    """

    def __init__(self, text: Callable[[Sequence[int]], str], tokenizer: TextTokenizer | None):
        self._text, self._tokenizer = text, tokenizer
        self._ids: list[int] = []
        self._settled = 0  # ids up to the last end of a run of bytes; tokens without text do not end a run
        self._returned = ""

    def add(self, index: int, *, last: bool = False) -> str:
        """The text that one more token adds; the `last` token adds all remaining text. Empty without a vocabulary."""
        if self._tokenizer is None:
            return ""
        self._ids.append(index)
        if not _BYTE.match(self._tokenizer.tokens([index])[0]) and self._text([index]):
            self._settled = len(self._ids)
        # Decode the whole text each time: in some decoders the text of a token depends on all tokens before it.
        known = self._text(self._ids if last else self._ids[: self._settled])
        if not last:
            known = _UNSETTLED.sub("", known)
        if not known.startswith(self._returned):  # shorter than the returned text: a longer end may change now
            return ""
        added, self._returned = known[len(self._returned) :], known
        return added
