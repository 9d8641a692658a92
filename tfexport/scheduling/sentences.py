"""What a scheduler hands to its workers, and what these tell of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from tfexport.decoding.hypothesis import Hypothesis, Source
from tfexport.decoding.options import SearchOptions


@dataclass(frozen=True, slots=True)
class Sentence:
    """A source to decode."""

    key: Hashable
    """Tells it from all others that are under way."""
    source: Source
    options: SearchOptions
    streams: bool = False
    """Each token is told as soon as it is decided."""

    @property
    def rows(self) -> int:
        """Rows that it takes in a step."""
        return self.options.rows


@dataclass(frozen=True, slots=True)
class Decided:
    """The tokens that the best output of a sentence certainly begins with."""

    key: Hashable
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A sentence is decoded: what `search` finds for it alone."""

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
    """What a worker does before its next step."""

    add: tuple[Sentence, ...] = ()
    drop: tuple[Hashable, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.add or self.drop)


NO_ORDERS = Orders()


def merged(several: Sequence[Orders]) -> Orders:
    """What several orders, one after the other, come to."""
    if len(several) == 1:
        return several[0]
    drop = tuple(key for orders in several for key in orders.drop)
    return Orders(tuple(one for orders in several for one in orders.add if one.key not in drop), drop)


@dataclass(slots=True)
class Report:
    """What a worker did since its last report."""

    events: list[Event] = field(default_factory=list)
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Of each step the rows that it decoded, and its seconds with the encoding before it."""
