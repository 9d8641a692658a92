"""Options of a decoding run that are not of the search: prefixes, shortlists, alignments, formats and batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfexport.contract import Precision, precisions_of
from tfexport.errors import TfexportError
from tfexport.option import MOST_AT_ONCE, Options, option
from tfexport.search.rules.history import TERMS

_PREFIX, _SHORTLIST = "Prefixes", "Shortlist"
_ALIGNMENT, _RUN = "Alignments and unknown words", "Runtime and batches"

GlossaryCase = Literal["exact", "ignore"]
InputFormat = Literal["text", "tokens", "ids"]
OutputFormat = Literal["text", "tokens", "ids", "jsonl"]


@dataclass(frozen=True, kw_only=True)
class PrefixOptions(Options):
    """The prefixes of outputs."""

    prefix_column: bool = option(
        False, help="Each input line is source<TAB>prefix; the output begins with the prefix.", panel=_PREFIX
    )
    prefix_file: Path | None = option(
        None, metavar="FILE", help="Prefixes of the outputs, one line for each input line.", panel=_PREFIX
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix_column and self.prefix_file is not None:
            raise TfexportError(
                "--prefix-column and --prefix-file both give the prefixes of outputs. Give one of them."
            )

    def __bool__(self) -> bool:
        return self.prefix_column or self.prefix_file is not None


def _marks(called: str, text: str) -> tuple[str, str]:
    """The two marks in a text. Raises: TfexportError: the text is not two marks."""
    marks = tuple(text.split())
    if len(marks) != 2:
        raise TfexportError(f"{called} is {text!r}. Give two marks, separated by a space, as in '⟦ ⟧'.")
    return marks[0], marks[1]


def is_utf8(text: str) -> bool:
    """Whether text can be written as UTF-8: it has no lone surrogate."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(frozen=True, kw_only=True)
class KeepOptions(Options):
    """The parts of sources that are copied."""

    keep_between: tuple[str, str] | None = option(
        None,
        parse=_marks,
        metavar="'OPEN CLOSE'",
        help="Two marks, separated by a space: the text between them is copied into the output. The marks are left out.",
        panel=TERMS,
    )

    def conflicts(self) -> list[str]:
        """Messages about invalid marks."""
        if all(mark.split() == [mark] and is_utf8(mark) for mark in self.keep_between or ()):
            return []
        return [f"keep_between is {self.keep_between!r}, not two marks in UTF-8 without white space"]


@dataclass(frozen=True, kw_only=True)
class TermOptions(KeepOptions):
    """The phrases that outputs must and must not contain."""

    constraint_columns: bool = option(
        False,
        help="Each input line is source<TAB>phrase<TAB>phrase...; the output contains each phrase.",
        panel=TERMS,
        also=("constraints",),
    )
    constraint_file: Path | None = option(
        None,
        metavar="FILE",
        help="Phrases that outputs must contain, separated by tabs, one line for each input line.",
        panel=TERMS,
    )
    glossary: Path | None = option(
        None,
        metavar="FILE",
        help="Lines of source phrase<TAB>target phrase: where the first occurs, the output has the second. A third "
        "column 'forbidden': the output does not have it.",
        panel=TERMS,
    )
    glossary_case: GlossaryCase = option(
        "exact", help="Whether the case of letters must match in source phrases of a glossary.", panel=TERMS
    )

    def conflicts(self) -> list[str]:
        """Options that exclude each other, in words."""
        conflicts = {
            "constraint_columns and constraint_file both give the phrases of outputs": self.constraint_columns
            and self.constraint_file is not None,
            "glossary_case needs a glossary, and no glossary is given": self.glossary_case != "exact"
            and self.glossary is None,
        }
        return [*super().conflicts(), *(conflict for conflict, present in conflicts.items() if present)]

    def __bool__(self) -> bool:
        files = self.constraint_file is not None or self.glossary is not None
        return self.constraint_columns or files or self.keep_between is not None


@dataclass(frozen=True, kw_only=True)
class ShortlistOptions(Options):
    """The words that outputs may contain."""

    shortlist: Path | None = option(
        None,
        metavar="FILE",
        help="Words that are allowed in outputs: a vmap, a lexicon (lex.s2t), or one word per line.",
        panel=_SHORTLIST,
    )
    shortlist_first: int | None = option(
        None,
        minimum=0,
        help="For a lexicon: always allow the N most frequent target words; 100 by default.",
        panel=_SHORTLIST,
    )
    shortlist_best: int | None = option(
        None,
        minimum=1,
        help="For a lexicon: allow the N most probable translations of each source word; 100 by default.",
        panel=_SHORTLIST,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortlist is None and self.numbers:
            raise TfexportError(
                "--shortlist-first and --shortlist-best need a --shortlist. Give one, or leave them out."
            )

    @property
    def numbers(self) -> dict[str, int]:
        """The options that are given, as arguments of `read_shortlist`."""
        numbers = {"first": self.shortlist_first, "best": self.shortlist_best}
        return {name: number for name, number in numbers.items() if number is not None}


@dataclass(frozen=True, kw_only=True)
class AlignmentOptions(Options):
    """The attention of output tokens, written next to outputs or used to replace unknown words."""

    alignments: str | None = option(
        None,
        metavar="hard|soft|THRESHOLD",
        help="Write alignments from cross-attention: '||| 0-0 1-2' after each output, or all numbers in jsonl.",
        panel=_ALIGNMENT,
    )
    replace_unk: bool = option(
        False, help="Replace each unknown token with the source token that has the most attention.", panel=_ALIGNMENT
    )
    unk_dictionary: Path | None = option(
        None,
        metavar="FILE",
        help="For --replace-unk: lines of source word<TAB>replacement.",
        panel=_ALIGNMENT,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unk_dictionary is not None and not self.replace_unk:
            raise TfexportError("--unk-dictionary has the replacements of unknown tokens. Add --replace-unk.")

    def __bool__(self) -> bool:
        """Whether the options need the attention of a search."""
        return self.alignments is not None or self.replace_unk


@dataclass(frozen=True, kw_only=True)
class MapOptions(Options):
    """The attention maps to draw."""

    layer: int | None = option(None, help="Show only this decoder layer, from 0; -1 is the last.")
    head: int | None = option(None, minimum=0, help="Show only this head, from 0.")
    lines: int = option(10, minimum=1, help="Number of lines of INPUT to draw.")


@dataclass(frozen=True, kw_only=True)
class FormatOptions(Options):
    """The formats of input and output lines."""

    input_format: InputFormat | None = option(
        None, help="Input format: raw text, tokens separated by spaces, or the ids that the encoder reads."
    )
    output_format: OutputFormat | None = option(
        None,
        help="Output format. ids are without bos, and with eos if it was generated; jsonl has the status and scores.",
    )


@dataclass(frozen=True, kw_only=True)
class BatchLimits(Options):
    """The limit of the size of batches, in addition to their number of sentences."""

    max_batch_tokens: int | None = option(
        None,
        minimum=1,
        help="Largest number of source ids in a batch, padding included; a longer sentence is a batch of its own.",
        default_text="16384",
        panel=_RUN,
        also=("max_tokens", "batch_tokens"),
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions(BatchLimits):
    """The batches, and the workers that decode them."""

    batch_size: int = option(32, minimum=1, maximum=MOST_AT_ONCE, help="Sentences in a batch.", panel=_RUN)
    workers: int | None = option(
        None, minimum=1, maximum=256, help="Batches to decode in parallel; by default one for each CPU.", panel=_RUN
    )
    threads: int | None = option(
        None,
        minimum=1,
        maximum=256,
        help="CPU threads of each worker; by default an equal share of the CPUs.",
        panel=_RUN,
    )
    share_weights: bool = option(
        False,
        help="Share packed weights in memory with other commands that use this flag; they are stored in ~/.cache/tfexport.",
        panel=_RUN,
    )


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions(Options):
    """The runtime that decodes, and its precision."""

    runtime: str = option(
        "ort-cpu", metavar="NAME", help="Runtime; `tfexport version` lists those that work here.", panel=_RUN
    )
    precision: Literal["fp32", "fp16", "bf16", "int8", "int4"] | None = option(
        None, help="Precision of the graphs or engines to use.", panel=_RUN
    )

    @property
    def number_format(self) -> Precision | None:
        """The precision by its long name."""
        return precisions_of(self.precision)[0] if self.precision else None
