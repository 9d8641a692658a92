"""Forbidden sequences of tokens, such as a word of several pieces (`bad_words_ids` of Transformers)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfexport.option import option
from tfexport.search.rules.history import PANEL, HistoryRule, rows_that_end_with

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tfexport.runtimes.outputs import IntArray


@dataclass(frozen=True, kw_only=True)
class BadWords(HistoryRule):
    """Bans the last token of each forbidden sequence if the row ends with the other tokens of the sequence."""

    bad_words: tuple[tuple[int, ...], ...] = option(
        (),
        tokens=True,
        repeated=True,
        metavar="TOKENS",
        help="A forbidden sequence of tokens, separated by spaces; may be repeated.",
        panel=PANEL,
        also=("bad_words_ids", "suppress_sequences"),
    )

    def conflicts(self) -> list[str]:
        return [*super().conflicts(), *(["bad_words has an empty sequence"] * (() in self.bad_words))]

    def is_active(self) -> bool:
        return bool(self.bad_words)

    def named_ids(self) -> Iterable[int]:
        return (index for words in self.bad_words for index in words)

    def ban(self, allowed: NDArray[np.bool_], history: IntArray, sources: Sequence[Sequence[int]] = ()) -> None:
        for *before, last in self.bad_words:
            allowed[rows_that_end_with(history, before), last] = False

    def excludes(self, phrases: Sequence[tuple[int, ...]], source: Sequence[int]) -> bool:
        banned = last_tokens(self.bad_words)
        return any(has_banned(ids, banned) for ids in phrases)


LastTokens = Mapping[int, Mapping[tuple[int, ...], "Sequence[int] | IntArray"]]
"""The last tokens of sequences, by the number of tokens before them, and by these tokens. There may be thousands."""


def last_tokens(sequences: Iterable[Sequence[int]]) -> LastTokens:
    """The `LastTokens` of sequences."""
    import numpy as np

    by_length: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for *before, last in sequences:
        by_length.setdefault(len(before), {}).setdefault(tuple(before), []).append(last)
    # Single tokens are banned in each row and step, as an array: NumPy takes long to read a list of thousands.
    always: LastTokens = {0: {(): np.array(by_length[0][()], dtype=np.int64)}} if 0 in by_length else {}
    return {**by_length, **always}


def has_banned(ids: tuple[int, ...], sequences: LastTokens, after: Container[int] | None = None) -> bool:
    """Whether `ids` contain one of the sequences, at their start or after one of the ids `after`; None for any id."""
    return any(
        ids[place + size] in by_before.get(ids[place : place + size], ())
        for size, by_before in sequences.items()
        for place in range(len(ids) - size)
        if after is None or not place or ids[place - 1] in after
    )
