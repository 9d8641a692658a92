"""The messages between a scheduler and its workers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from tfexport.search.hypothesis import Hypothesis, Source
from tfexport.search.options import SearchOptions


@dataclass(frozen=True, slots=True)
class Sentence:
    """A source to decode."""

    key: Hashable
    """Identifies the sentence among all running ones."""
    source: Source
    options: SearchOptions
    streams: bool = False
    """Report each token as soon as it is decided."""

    @property
    def rows(self) -> int:
        """The number of its rows in a step."""
        return self.options.rows


@dataclass(frozen=True, slots=True)
class Decided:
    """The tokens with which the best output of a sentence certainly begins."""

    key: Hashable
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A sentence is decoded. The result is that of `search` for it alone."""

    key: Hashable
    hypotheses: list[Hypothesis]


@dataclass(frozen=True, slots=True)
class Failed:
    """A sentence cannot be decoded."""

    key: Hashable
    error: Exception


Event = Decided | Finished | Failed


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders for a worker before its next step."""

    add: tuple[Sentence, ...] = ()
    drop: tuple[Hashable, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.add or self.drop)


NO_ORDERS = Orders()


def merged(several: Sequence[Orders]) -> Orders:
    """Merge several orders into one with the same effect."""
    if len(several) == 1:
        return several[0]
    drop = tuple(key for orders in several for key in orders.drop)
    return Orders(tuple(sentence for orders in several for sentence in orders.add if sentence.key not in drop), drop)


@dataclass(slots=True)
class Report:
    """The work of a worker since its last report."""

    events: list[Event] = field(default_factory=list)
    steps: list[tuple[int, float]] = field(default_factory=list)
    """The rows of each step, and its seconds including the encoding before it."""
