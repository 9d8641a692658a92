"""Options of text that is more than one sentence per line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tfexport.errors import TfexportError
from tfexport.option import Options, option

_PANEL = "Documents"

Split = Literal["lines", "sentences"]
Markup = Literal["html", "markdown"]


@dataclass(frozen=True, kw_only=True)
class DocumentOptions(Options):
    """The parts of a text that are translated, and its splitting."""

    split: Split | None = option(
        None,
        help="Translate the sentences of each line, or whole lines. Parts that are too long for the model are cut.",
        panel=_PANEL,
    )
    language: str | None = option(
        None,
        metavar="CODE",
        help="Source language for --split sentences, such as de; by default the tokenizer's, or en.",
        panel=_PANEL,
    )
    markup: Markup | None = option(
        None, help="Keep the tags of HTML or Markdown: the whole input is one document.", panel=_PANEL
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.language is not None and not re.fullmatch(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{1,8})*", self.language):
            raise TfexportError(f"the language {self.language[:20]!r} is not a code. Give one such as de or pt-BR.")
        if self.language is not None and self.parts != "sentences":
            raise TfexportError("--language is for the splitting of sentences. Add --split sentences.")

    @property
    def parts(self) -> Split:
        """The kind of segments."""
        return self.split or ("sentences" if self.markup else "lines")


@dataclass(frozen=True, kw_only=True)
class InputDocumentOptions(DocumentOptions):
    """`DocumentOptions` for an input that may have columns."""

    column: str | None = option(
        None,
        metavar="N|NAME",
        help="Translate this tab-separated column and copy the others; a NAME is looked up in the first line.",
        panel=_PANEL,
    )

    def __bool__(self) -> bool:
        """Whether the input is more than one sentence per line."""
        return self.split is not None or self.markup is not None or self.column is not None

    @property
    def is_whole(self) -> bool:
        """Whether the whole input is one document, rather than each of its lines."""
        return self.markup is not None and self.column is None
