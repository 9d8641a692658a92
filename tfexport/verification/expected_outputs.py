"""Expected outputs: what the owner's program printed for some sources, and whether a model gives the same.

A wrong setting of a checkpoint, such as another activation, gives a wrong model and no error. Outputs of the owner's own
greedy search show it. A search gives an output exactly if each of its tokens is the best one after the tokens before it. So
one pass over the output, with all of its tokens as input, is the same test as a search and much faster.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfexport.config import ModelConfig
from tfexport.decoding.line_reader import Unreadable, ids_in
from tfexport.errors import TfexportError
from tfexport.models.formats.native import Tokenizers
from tfexport.system.regular_files import read_text
from tfexport.text.tokenizers import TextTokenizer

ENOUGH = 32
"""The number of lines that is asked for. A wrong activation can keep nine of ten outputs, so a few lines show little."""

Side = str | tuple[int, ...]
"""Text, or ids."""


@dataclass(frozen=True)
class Line:
    """A line of a file of expected outputs."""

    number: int
    source: Side
    output: Side


def read_lines(path: Path) -> list[Line]:
    """Read a file with a source, a tab and the expected output in each line, or with JSON objects of `source` and `output`.

    Raises:
        TfexportError: the file cannot be read or is empty, or a line has another form. The message has its number.
    """
    try:
        content = read_text(path)
    except (OSError, ValueError) as error:
        raise TfexportError(f"cannot read the expected outputs {path}: {error}. Give a file with --expect.") from error
    numbered = [(number, text) for number, text in enumerate(content.split("\n"), 1) if text.strip()]
    if not numbered:
        raise TfexportError(
            f"{path} has no expected outputs. Write a source, a tab and the output of your own program in each line."
        )
    parse = _from_json if numbered[0][1].lstrip().startswith("{") else _from_columns
    return [parse(text.removesuffix("\r"), f"line {number} of {path}", number) for number, text in numbered]


def _from_columns(text: str, where: str, number: int) -> Line:
    columns = text.split("\t")
    if len(columns) != 2:
        raise TfexportError(
            f"{where} has {len(columns)} columns, not 2. Write a source, a tab and the output of your own program."
        )
    source, output = (column.strip() for column in columns)
    if not source:
        raise TfexportError(f"{where} has no source. Write a source, a tab and the output, or leave the line out.")
    return Line(number, source, output)


def _from_json(text: str, where: str, number: int) -> Line:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TfexportError(
            f'{where} is not JSON: {error}. Write {{"source": ..., "output": ...}} in each line.'
        ) from error
    if not isinstance(entry, dict) or not {"source", "output"} <= entry.keys():
        raise TfexportError(f'{where} has no source and output. Write {{"source": ..., "output": ...}} in each line.')
    source, output = (_json_side(entry[name], f"the {name} of {where}") for name in ("source", "output"))
    if not source:
        raise TfexportError(f"{where} has an empty source. Leave the line out.")
    return Line(number, source, output)


def _json_side(value: Any, where: str) -> Side:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    raise TfexportError(f"{where} is neither text nor a list of ids. Correct it.")


@dataclass(frozen=True)
class Difference:
    """The first token of an output that is not as expected."""

    line: int
    index: int
    expected: str
    given: str

    def __str__(self) -> str:
        return f"line {self.line}, token {self.index + 1}: {self.given} instead of {self.expected}"


@dataclass(frozen=True)
class Example:
    """A source and its expected output, as ids."""

    line: int
    source: tuple[int, ...]
    """The source; with bos and eos if `Examples.framing` says so."""
    output: tuple[int, ...]
    """The output without bos and eos."""
    ends: bool
    """Whether eos must follow. If not, the owner's limit on the length may have cut the output."""
    text: str | None = None
    """The output as text. Its ids may then be others than those of `output`: subwords can spell a word in several ways."""

    def tokens(self, eos_id: int) -> list[int]:
        """The tokens that a model must give."""
        return [*self.output, *[eos_id] * self.ends]

    def difference(self, ids: Sequence[int], eos_id: int) -> Difference | None:
        """The first difference of an output. Tokens after an output that was cut do not count."""
        expected = self.tokens(eos_id)
        index = next((i for i, token in enumerate(expected) if i >= len(ids) or ids[i] != token), None)
        if index is None:
            return None
        names = ["the end (eos)" if token == eos_id else str(token) for token in (expected[index], *ids[index:][:1])]
        return Difference(self.line, index, names[0], [*names, "nothing"][1])


@dataclass(frozen=True)
class Examples:
    """The expected outputs of a file, in the ids of a model."""

    path: Path
    rows: tuple[Example, ...]
    framing: tuple[bool, bool] | None = None
    """Whether sources begin with bos and end with eos, if the file shows it. They are complete then."""
    target: TextTokenizer | None = None
    are_ids: bool = False
    """Whether sources are ids. If `framing` is None, nothing shows whether they are complete."""

    def __len__(self) -> int:
        return len(self.rows)

    def inputs(self, rows: Sequence[Example], config: ModelConfig) -> list[list[int]]:
        """The encoder's inputs of rows."""
        begin, end = (False, False) if self.framing is not None else (config.source_bos, config.source_eos)
        return [[config.bos_id] * begin + [*row.source] + [config.eos_id] * end for row in rows]

    def completions(self, config: ModelConfig) -> list[Examples]:
        """These examples for each way to read their sources: with the model's bos and eos added, or as they are."""
        may_be_complete = self.are_ids and self.framing is None and (config.source_bos or config.source_eos)
        return [self, replace(self, framing=(False, False))] if may_be_complete else [self]

    def check_lengths(self, config: ModelConfig) -> None:
        """Raise TfexportError if an example is longer than the model's positions."""
        for row, source in zip(self.rows, self.inputs(self.rows, config), strict=True):
            for what, length, most in (
                ("source", len(source), config.max_source_length),
                ("output", len(row.output) + row.ends, config.max_target_length),
            ):
                if length > most:
                    raise TfexportError(
                        f"the {what} in line {row.line} of {self.path} has {length} ids, and the model has positions for "
                        f"{most}. Give a larger --max-length if your program has more positions, or leave the line out."
                    )

    def is_spelt(self, row: Example, ids: Sequence[int], *, begin: bool = False) -> bool:
        """Whether `ids` without eos spell the text of an output, or its beginning, with any subwords."""
        if row.text is None or self.target is None:
            return False
        expected, decoded = (" ".join(text.split()) for text in (row.text, self.target.decode_line(ids)))
        return (
            expected.startswith(decoded)
            if begin
            else decoded == expected or (not row.ends and decoded.startswith(expected))
        )


def encoded(path: Path, lines: Sequence[Line], special: ModelConfig, tokenizers: Tokenizers) -> Examples:
    """Lines in the ids of a model.

    Args:
        special: its special ids and the sizes of its vocabularies.
        tokenizers: the vocabularies. A side without one has ids, and so has a side with numbers alone that its vocabulary
            lacks.

    Raises:
        TfexportError: a line is no text of the vocabulary, or no ids of the model.
    """
    source, target = (
        None if tokenizer is None or _are_ids([getattr(line, name) for line in lines], tokenizer) else tokenizer
        for name, tokenizer in (("source", tokenizers.source), ("output", tokenizers.target))
    )
    sources = [_source(line, path, special, source) for line in lines]
    are_ids = source is None or not any(isinstance(line.source, str) for line in lines)  # text has no bos and eos
    framing = _framing(sources, special) if are_ids else None
    rows = [
        replace(_output(line, path, special, target), source=tuple(ids))
        for line, ids in zip(lines, sources, strict=True)
    ]
    return Examples(path, tuple(_with_ends(rows, special.max_target_length)), framing, target, are_ids)


def _are_ids(sides: Iterable[Side], tokenizer: TextTokenizer) -> bool:
    """Whether all of a column is ids although there is a vocabulary: numbers, some of which it lacks."""
    words = [word for side in sides for word in (side.split() if isinstance(side, str) else ())]
    numbers = all(word.isascii() and word.isdecimal() for word in words)
    return numbers and any(tokenizer.inner.token_to_id(word) is None for word in words)


def _framing(sources: Sequence[Sequence[int]], special: ModelConfig) -> tuple[bool, bool] | None:
    """Whether all sources begin with bos, and end with eos; None if they have neither."""
    begin = all(ids[0] == special.bos_id for ids in sources)
    end = all(ids[-1] == special.eos_id and len(ids) > begin for ids in sources)
    return (begin, end) if begin or end else None


def _source(line: Line, path: Path, special: ModelConfig, tokenizer: TextTokenizer | None) -> list[int]:
    where = f"the source in line {line.number} of {path}"
    ids = _ids(line.source, where, special.src_vocab_size, tokenizer)
    if tokenizer is not None and isinstance(line.source, str):
        return [*tokenizer.before, *ids, *tokenizer.after]
    if special.pad_id in ids and special.pad_id not in (special.bos_id, special.eos_id):
        raise TfexportError(f"{where} has the padding id {special.pad_id}. Leave padding out.")
    return ids


def _ids(side: Side, where: str, size: int, tokenizer: TextTokenizer | None) -> list[int]:
    is_text = tokenizer is not None and isinstance(side, str)
    content = side if isinstance(side, str) else " ".join(map(str, side))
    try:
        ids = ids_in(content, "text" if is_text else "ids", tokenizer, size)
    except Unreadable as error:
        advice = "" if is_text else " Correct it; for text, give the vocabularies with --src-vocab and --tgt-vocab."
        raise TfexportError(f"{where} cannot be read: {error}.{advice}") from error
    if max(ids, default=0) >= size:
        raise TfexportError(
            f"{where} has the id {max(ids)}, the model's last is {size - 1}. Give the vocabulary of this model."
        )
    return ids


def _output(line: Line, path: Path, special: ModelConfig, tokenizer: TextTokenizer | None) -> Example:
    """The example of a line without its source. Only an output with eos has `ends`."""
    where = f"the output in line {line.number} of {path}"
    if tokenizer is not None and isinstance(line.output, str):
        words = line.output.split()
        bos, eos = tokenizer.tokens([special.bos_id, special.eos_id])
        words = words[words[:1] == [bos] :]
        ends = eos in words
        text = " ".join(words[: words.index(eos)] if ends else words)
        ids = _ids(text, where, special.tgt_vocab_size, tokenizer) if text else []
        return Example(line.number, (), _with_forced(ids, special), ends, text)
    ids = _ids(line.output, where, special.tgt_vocab_size, None)
    # A model whose decoder begins with eos, as in fairseq, prints it first; alone it is an empty output.
    if ids[:1] == [special.bos_id] and (special.bos_id != special.eos_id or len(ids) > 1):
        ids = ids[1:]
    ends = special.eos_id in ids
    if ends:
        ids = ids[: ids.index(special.eos_id)]
    while ids and ids[-1] == special.pad_id:
        ids.pop()
    return Example(line.number, (), _with_forced(ids, special), ends)


def _with_forced(ids: Sequence[int], special: ModelConfig) -> tuple[int, ...]:
    """An output with the token that the model's search puts first, which a program may leave out."""
    forced = [special.forced_first_id] * (special.forced_first_id >= 0)
    return (*([] if list(ids[:1]) == forced else forced), *ids)


def _with_ends(rows: Sequence[Example], most: int) -> list[Example]:
    """Examples of a program that may print no eos. All its outputs ended then, except those that a limit may have cut.

    A limit is a number of tokens, or the length of the source plus a number: no output is longer than those that it cut. If
    all outputs are longer than their sources by the same number, as in a reversal, that number is no limit.
    """
    if any(row.ends for row in rows):
        return [replace(row, ends=row.ends or not row.output) for row in rows]
    longest = max(len(row.output) for row in rows)
    beyond = [len(row.output) - len(row.source) for row in rows]
    is_relative = min(beyond) < max(beyond)

    def may_be_cut(row: Example, more: int) -> bool:
        return len(row.output) in (longest, most) or (is_relative and more == max(beyond))

    return [
        replace(row, ends=not row.output or not may_be_cut(row, more)) for row, more in zip(rows, beyond, strict=True)
    ]
