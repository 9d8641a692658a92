"""Tokens as they are decided, and the text that each of them adds.

In greedy search and sampling a token is decided when it is chosen. In a beam it is when all hypotheses have it that may
still become the best output: those that are live, and the best one that is finished.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from tfexport.decoding.line_reader import Reader, TargetReader
from tfexport.decoding.search import Hypothesis, SearchOptions, Source, search_steps
from tfexport.decoding.shortlist import Shortlist
from tfexport.decoding.translate import Result, Writer, read_window, result_of
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Runtime
from tfexport.system.json_text import json_text
from tfexport.text.tokenizers import TextTokenizer


@dataclass(frozen=True, slots=True)
class Step:
    """One token of an output."""

    id: int
    token: str
    """As the vocabulary writes it; empty where there is none."""
    text: str
    """What it adds to the text: nothing where that depends on what follows, as the first byte of a character does."""
    log_prob: float


@dataclass(frozen=True, slots=True)
class Streamed:
    """A step of a line's output, or with `result` the end of the line."""

    line: int
    """Counted from 1."""
    step: Step | None = None
    result: Result | None = None


def stream(
    runtime: Runtime[Any], source: Source | Sequence[int], options: SearchOptions, writer: Writer
) -> Iterator[Step | Hypothesis]:
    """Decode one source (encoder ids); its tokens, each as soon as it is decided, and after them the whole output.

    The texts of the steps, put together, are the output's text.

    Args:
        writer: has the vocabulary, if there is one.

    Raises:
        TfexportError: more than one output is asked for, or what `search` raises.
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
    """The steps of an output whose tokens come little by little.

    Args:
        writer: has the vocabulary, if there is one.
    """

    def __init__(self, writer: Writer):
        self._tokenizer, self._text, self._told = writer.tokenizer, GrowingText(writer.text, writer.tokenizer), 0

    def steps(self, ids: Iterable[int], log_probs: Iterable[float], *, last: bool = False) -> Iterator[Step]:
        """The steps that are new, of all `ids` of the output so far.

        Args:
            last: the output is complete.
        """
        new = list(zip(ids, log_probs, strict=True))[self._told :]
        for place, (index, log_prob) in enumerate(new):
            token = self._tokenizer.tokens([index])[0] if self._tokenizer else ""
            added = self._text.add(index, last=last and place == len(new) - 1)
            yield Step(index, token, added, log_prob)
        self._told += len(new)


def refuse_several(options: SearchOptions) -> None:
    """Raises TfexportError where a search gives several outputs, of which none is decided before all are."""
    if options.nbest > 1 or options.samples > 1 or options.alternatives:
        raise TfexportError(
            "one output of a line is streamed. Leave --nbest and --alternatives out, or ask for one of --samples."
        )


def stream_lines(
    runtime: Runtime[Any],
    reader: Reader,
    lines: Iterable[bytes],
    options: SearchOptions,
    writer: Writer,
    *,
    outputs: TargetReader | None = None,
    shortlist: Shortlist | None = None,
) -> Iterator[Streamed]:
    """Decode `lines` one after the other: the steps of each, and its result, which `translate` would give.

    Raises:
        TfexportError: more than one output of a line is asked for, or there are more lines than of what outputs begin with.
    """
    refuse_several(options)
    for number, line in enumerate(reader.lines(lines, outputs), start=1):
        known, readable = read_window(runtime.capacity, reader, outputs, [(number, line)], shortlist)
        for result in known.values():
            yield Streamed(number, result=result)
        for source in readable.values():
            for found in stream(runtime, source, options, writer):
                if isinstance(found, Step):
                    yield Streamed(number, step=found)
                else:
                    yield Streamed(number, result=result_of(number, [found]))


def shown(events: Iterable[Streamed], writer: Writer, file: TextIO) -> Iterator[Result]:
    """Write `events` to `file`, each at once; the results of the lines, as they end.

    Text, tokens and ids become the lines that `decode` writes. `jsonl` has a line for each token, and the usual one, which
    has a `status`, where an output ends.
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
        told = {"id": step.id, "token": step.token, "text": step.text} if writer.tokenizer else {"id": step.id}
        event = {"line": line, **told, "log_prob": round(step.log_prob, 6)}
        return json_text(event, ensure_ascii=False) + "\n"
    if writer.format == "ids":
        return str(step.id)
    if writer.format == "tokens":
        return "" if step.id == writer.config.eos_id else " ".join(step.token.split())
    return step.text


_UNSETTLED = re.compile(r"[\s\ufffd@]+\Z")
"""What may become something else when more tokens come, at the end of a text: white space, which is no text at its end; the
beginning of a character, which decoders write as U+FFFD; and the join of BPE, `@@`."""
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")
"""A token that is one byte, in vocabularies of SentencePiece: decoders read a row of them as a whole."""


class GrowingText:
    """The text of an output whose tokens come one by one.

    What is given out is never taken back: so it goes no further than to where no later token changes it.

    Args:
        text: ids of an output to its text.
    """

    def __init__(self, text: Callable[[Sequence[int]], str], tokenizer: TextTokenizer | None):
        self._text, self._tokenizer = text, tokenizer
        self._ids: list[int] = []
        self._settled = 0  # ids up to the last one that ends a row of bytes, which tokens without text do not
        self._told = ""

    def add(self, index: int, *, last: bool = False) -> str:
        """The text that one more token adds; with the `last` one, all that is left. Empty without a vocabulary."""
        if self._tokenizer is None:
            return ""
        self._ids.append(index)
        if not _BYTE.match(self._tokenizer.tokens([index])[0]) and self._text([index]):
            self._settled = len(self._ids)
        # The whole text again each time: what a token is as text depends, in one decoder or another, on all before it.
        known = self._text(self._ids if last else self._ids[: self._settled])
        if not last:
            known = _UNSETTLED.sub("", known)
        if not known.startswith(self._told):  # shorter than what was told: more of it is unsettled now
            return ""
        added, self._told = known[len(self._told) :], known
        return added
