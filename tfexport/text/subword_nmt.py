"""Splitting of words into subwords with subword-nmt (Sennrich et al. 2016) and its codes."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tfexport.errors import TokenizerError
from tfexport.system.imports import import_failure
from tfexport.system.regular_files import read_text

SEPARATOR = "@@"
"""Suffix of a subword that is not the last of its word."""
_MOST_KEPT = 200_000
"""Maximum number of words whose subwords are cached."""


@dataclass(frozen=True)
class Subwords:
    """The content of a codes file of version 0.1 or 0.2.

    Args:
        known: the subwords of the vocabulary, if other subwords are split further (`apply-bpe --vocabulary`).
    """

    codes: str
    known: frozenset[str] | None = None

    @classmethod
    def from_file(cls, path: Path) -> Subwords:
        """Raises: TokenizerError if the file is not a codes file."""
        try:
            codes = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"cannot read {path}: {error}. Give the codes that learn-bpe wrote.") from error
        subwords = cls(codes)
        subwords.check(str(path))
        return subwords

    def check(self, where: str) -> None:
        """Raises: TokenizerError if the codes are not valid. The library would end the process."""
        lines = self.codes.rstrip("\n").split("\n")
        has_version = lines[0].startswith("#version:")
        if has_version and lines[0].split()[-1] not in ("0.1", "0.2"):
            raise TokenizerError(f"{where} has codes of {lines[0][1:40]!r}; 0.1 and 0.2 are known. Learn them again.")
        for number, line in enumerate(lines[has_version:] or [""], start=1 + has_version):
            if len(line.strip("\r\n ").split(" ")) != 2:
                raise TokenizerError(
                    f"{where} has no codes: line {number} is not two subwords. Give the codes that learn-bpe wrote."
                )

    def split(self, words: Sequence[str]) -> list[str]:
        """The subwords of `words`. All but the last of a word end with `@@`."""
        if len(self._library.cache) > _MOST_KEPT:
            self._library.cache.clear()
        return list(self._library.segment_tokens(words))

    @cached_property
    def _library(self) -> Any:
        try:
            from subword_nmt.apply_bpe import BPE
        except ImportError as error:
            absent = (
                "this text is split by codes of subword-nmt, which is not installed: pip install 'tfexport[subword-nmt]', "
                "or split it yourself and use --input-format tokens."
            )
            raise import_failure(error, "subword_nmt", absent) from error
        return BPE(io.StringIO(self.codes), separator=SEPARATOR, vocab=self.known)


def has_subwords(words: Collection[str]) -> bool:
    """Whether a vocabulary consists of subwords from subword-nmt."""
    return any(word.endswith(SEPARATOR) and word != SEPARATOR for word in words)
