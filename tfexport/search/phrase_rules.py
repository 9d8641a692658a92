"""Bans tokens because of the phrases of a source: forbidden phrases, and word parts that would extend whole phrases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfexport.runtimes.outputs import IntArray
from tfexport.search.hypothesis import Ids, Source
from tfexport.search.rules.bad_words import LastTokens, has_banned, last_tokens
from tfexport.text.word_parts import kind_of


@dataclass(frozen=True)
class Glued:
    """The tokens that would make a whole phrase of a source part of a longer word.

    Tokens inside another required phrase are allowed: `New` may be required together with `New@@ ton`.

    Args:
        after: phrases, with the ids that may not follow them because they continue the phrase's last word.
        unfinished: ids whose word continues with the next token.
        before: first ids of phrases, which may not follow an unfinished id, with the unfinished ids that they may follow.
    """

    after: list[tuple[Ids, IntArray]]
    unfinished: frozenset[int]
    before: dict[int, set[int]]

    @classmethod
    def of(cls, source: Source, vocabulary: int) -> Glued | None:
        """The tokens for a source; None if there are none."""
        parts, whole = source.word_parts, [phrase for phrase in source.required if phrase.is_whole]
        if parts is None or not whole:
            return None
        continuing = parts.continuing_ids[: int(np.searchsorted(parts.continuing_ids, vocabulary))]
        places: dict[int, list[tuple[Ids, int]]] = {}
        for phrase in source.required:
            for place, index in enumerate(phrase.ids):
                places.setdefault(index, []).append((phrase.ids, place))
        after: dict[Ids, IntArray] = {}
        before: dict[int, set[int]] = {}
        for ids, text, *_ in whole:
            here = places[ids[0]]
            if len(continuing) and kind_of(text[-1]) != "alone" and ids not in after:
                needed = [
                    other[at + len(ids)]
                    for other, at in here
                    if other[at : at + len(ids)] == ids and other[at + len(ids) :]
                ]
                after[ids] = continuing[~np.isin(continuing, needed)] if needed else continuing
            if parts.unfinished_ids and kind_of(text[0]) == "run":
                before[ids[0]] = {other[at - 1] for other, at in here if at}
        return cls([*after.items()], parts.unfinished_ids, before) if after or before else None

    def ban(self, allowed: NDArray[np.bool_], past: Sequence[int]) -> None:
        """Clear in `allowed` [vocab], in place, the tokens that may not follow `past`."""
        for ids, following in self.after:
            if past[-1:] == [ids[-1]] and tuple(past[-len(ids) :]) == ids:
                allowed[following] = False
        if past and past[-1] in self.unfinished:
            allowed[[first for first, needed in self.before.items() if past[-1] not in needed]] = False


@dataclass(frozen=True)
class Forbidden:
    """The forbidden phrases of a source.

    Args:
        anywhere: phrases that are banned after any token.
        attached: phrases that are banned at the start of an output and after the tokens `separating`.
    """

    anywhere: LastTokens
    attached: LastTokens
    separating: frozenset[int]

    @classmethod
    def of(cls, source: Source) -> Forbidden | None:
        """The forbidden phrases of a source; None if it has none."""
        if not source.forbidden:
            return None
        kinds = [[phrase.ids for phrase in source.forbidden if phrase.is_attached == kind] for kind in (False, True)]
        separating = source.word_parts.separating if source.word_parts is not None else frozenset()
        return cls(last_tokens(kinds[0]), last_tokens(kinds[1]), separating)

    def ban(self, allowed: NDArray[np.bool_], past: Sequence[int]) -> None:
        """Clear in `allowed` [vocab], in place, the last tokens of phrases that `past` begins."""
        longest = max((*self.anywhere, *self.attached), default=0)
        end = tuple(past[max(0, len(past) - longest - 1) :])
        for size, by_before in self.anywhere.items():
            if size <= len(end) and (banned := by_before.get(end[len(end) - size :])) is not None:
                allowed[banned] = False
        for size, by_before in self.attached.items():
            is_apart = size == len(past) or (size < len(past) and end[len(end) - size - 1] in self.separating)
            if is_apart and (banned := by_before.get(end[len(end) - size :])) is not None:
                allowed[banned] = False

    def is_in(self, ids: Ids) -> bool:
        """Whether `ids` contain a phrase."""
        return has_banned(ids, self.anywhere) or has_banned(ids, self.attached, after=self.separating)


class PhraseRules:
    """The tokens that the phrases of several sources ban; false if there are none.

    Args:
        vocabulary: the number of target ids.
    """

    def __init__(self, sources: Sequence[Source], vocabulary: int):
        # A glossary may forbid many phrases, in one tuple for all sources.
        known: dict[int, Forbidden | None] = {}
        for source in sources:
            if id(source.forbidden) not in known:
                known[id(source.forbidden)] = Forbidden.of(source)
        self._forbidden = [known[id(source.forbidden)] for source in sources]
        self._glued = [Glued.of(source, vocabulary) for source in sources]
        self._has_any = any(self._forbidden) or any(self._glued)

    def __bool__(self) -> bool:
        return self._has_any

    def ban(self, allowed: NDArray[np.bool_], history: IntArray, of_rows: Sequence[int]) -> None:
        """Clear in `allowed` [rows, vocab], in place, the tokens that may not follow `history` [rows, length].

        Args:
            of_rows: the source of each row.
        """
        for row, index in enumerate(of_rows):
            rules = [rule for rule in (self._forbidden[index], self._glued[index]) if rule is not None]
            past = history[row].tolist() if rules else []
            for rule in rules:
                rule.ban(allowed[row], past)

    def forbid(self, ids: Ids, index: int) -> bool:
        """Whether outputs of source `index` can never contain the ids of this required phrase."""
        forbidden = self._forbidden[index]
        return forbidden is not None and forbidden.is_in(ids)
