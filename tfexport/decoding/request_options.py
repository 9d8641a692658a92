"""Options of a decoding run beside its search: prefixes, shortlists, alignments, formats and batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfexport.contract import Precision, precisions_of
from tfexport.errors import TfexportError
from tfexport.option import Options, option

_PREFIX, _SHORTLIST, _ALIGNMENT = "Prefixes", "Shortlist", "Alignments and unknown words"
_RUN = "Runtime and batches"

InputFormat = Literal["text", "tokens", "ids"]
OutputFormat = Literal["text", "tokens", "ids", "jsonl"]


@dataclass(frozen=True, kw_only=True)
class PrefixOptions(Options):
    """What outputs begin with."""

    prefix_column: bool = option(
        False, help="The output begins with what follows a tab in its input line.", panel=_PREFIX
    )
    prefix_file: Path | None = option(
        None, metavar="FILE", help="What each output begins with, a line for each input line.", panel=_PREFIX
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix_column and self.prefix_file is not None:
            raise TfexportError("--prefix-column and --prefix-file both say what outputs begin with. Give one of them.")

    def __bool__(self) -> bool:
        return self.prefix_column or self.prefix_file is not None


@dataclass(frozen=True, kw_only=True)
class ShortlistOptions(Options):
    """Which words may come in outputs."""

    shortlist: Path | None = option(
        None,
        metavar="FILE",
        help="Words that outputs may have: a vmap, a lexicon (lex.s2t), or a word a line.",
        panel=_SHORTLIST,
    )
    shortlist_first: int | None = option(
        None,
        minimum=0,
        help="Of a lexicon: the N most frequent target words always may come; 100 by default.",
        panel=_SHORTLIST,
    )
    shortlist_best: int | None = option(
        None,
        minimum=1,
        help="Of a lexicon: the N most probable words of each source word; 100 by default.",
        panel=_SHORTLIST,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortlist is None and self.numbers:
            raise TfexportError(
                "--shortlist-first and --shortlist-best are of a --shortlist. Give one, or leave them out."
            )

    @property
    def numbers(self) -> dict[str, int]:
        """Those that are given, as `read_shortlist` takes them."""
        numbers = {"first": self.shortlist_first, "best": self.shortlist_best}
        return {name: number for name, number in numbers.items() if number is not None}


@dataclass(frozen=True, kw_only=True)
class AlignmentOptions(Options):
    """What output tokens attended to, written beside outputs or in place of unknown words."""

    alignments: str | None = option(
        None,
        metavar="hard|soft|THRESHOLD",
        help="Write what output tokens attend to: '||| 0-0 1-2' after each output, all numbers in jsonl.",
        panel=_ALIGNMENT,
    )
    replace_unk: bool = option(
        False, help="Write the source token with most attention for unknown tokens.", panel=_ALIGNMENT
    )
    unk_dictionary: Path | None = option(
        None,
        metavar="FILE",
        help="Of --replace-unk: lines of a source word, a tab, what to write.",
        panel=_ALIGNMENT,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unk_dictionary is not None and not self.replace_unk:
            raise TfexportError("--unk-dictionary says what replaces unknown tokens. Add --replace-unk.")

    def __bool__(self) -> bool:
        """Whether they need the attention of a search."""
        return self.alignments is not None or self.replace_unk


@dataclass(frozen=True, kw_only=True)
class MapOptions(Options):
    """Which attention maps are drawn."""

    layer: int | None = option(None, help="Only this decoder layer, from 0; -1 is the last.")
    head: int | None = option(None, minimum=0, help="Only this head, from 0.")
    lines: int = option(10, minimum=1, help="Lines of INPUT that are drawn.")


@dataclass(frozen=True, kw_only=True)
class FormatOptions(Options):
    """How lines are read and written."""

    input_format: InputFormat | None = option(
        None, help="Raw text, space-separated tokens, or ids as the encoder reads them."
    )
    output_format: OutputFormat | None = option(
        None, help="text by default; ids have no bos, and eos when it came; jsonl has status and scores."
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions(Options):
    """How sentences become batches, and what decodes these."""

    batch_size: int = option(32, minimum=1, help="Sentences decoded together.", panel=_RUN)
    workers: int | None = option(
        None, minimum=1, maximum=256, help="Batches decoded at once; by default as many as CPUs.", panel=_RUN
    )
    threads: int | None = option(
        None, minimum=1, maximum=256, help="CPU threads of a worker; by default its share of the CPUs.", panel=_RUN
    )
    share_weights: bool = option(
        False,
        help="Have packed weights in memory once with other such commands; they are kept in ~/.cache/tfexport.",
        panel=_RUN,
    )


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions(Options):
    """What decodes, and in which number format."""

    runtime: str = option("ort-cpu", help="ort-cpu, ort-cuda, tensorrt, torch or torch-cuda.", panel=_RUN)
    precision: Literal["fp32", "fp16", "bf16", "int8", "int4"] | None = option(
        None, help="Of the graphs or engines to use.", panel=_RUN
    )

    @property
    def number_format(self) -> Precision | None:
        """The precision by its long name."""
        return precisions_of(self.precision)[0] if self.precision else None
