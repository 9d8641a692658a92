"""What a rule about the tokens that came before is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfexport.option import Options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tfexport.runtimes.base import IntArray

PANEL = "Which tokens may come"
"""Where the command line's help shows the options of rules."""
TERMS = "Required and forbidden phrases"
"""Where it shows the options of phrases."""


@dataclass(frozen=True, kw_only=True)
class HistoryRule(Options):
    """A rule that depends on the past tokens of each row; its options are its fields.

    `SearchOptions` inherits from every rule, so the methods below have names that rules share. Call them on the class of the
    rule, with the options of the search: `rule.ban(options, allowed, history, sources)`.
    """

    def is_active(self) -> bool:
        """Whether the options ask for the rule; only then are the logits of a step computed for it."""
        raise NotImplementedError

    def named_ids(self) -> Iterable[int]:
        """The ids that the options name, which the target vocabulary must have."""
        return ()

    def penalise(self, scores: NDArray[np.float64], history: IntArray) -> None:
        """Change `scores` [rows, vocab] in place: logits, or log-probabilities where the toolkit penalises these.

        Args:
            history: the past tokens, [rows, length].
        """

    def ban(self, allowed: NDArray[np.bool_], history: IntArray, sources: Sequence[Sequence[int]] = ()) -> None:
        """Clear in `allowed` [rows, vocab], in place, the tokens that may not come after `history` [rows, length].

        Args:
            sources: the encoder's ids of each row.
        """

    def excludes(self, phrases: Sequence[tuple[int, ...]], source: Sequence[int]) -> bool:
        """Whether no output of a source can have these phrases, each at a place of its own.

        Args:
            source: the encoder's ids.
        """
        return False


def ngrams_of(ids: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    """The n-grams of `ids`, from left to right."""
    return (tuple(ids[place : place + n]) for place in range(len(ids) - n + 1))


def rows_that_end_with(history: IntArray, tokens: Sequence[int]) -> NDArray[np.bool_]:
    """Which rows of `history` [rows, length] end with `tokens`; every row ends with none. [rows]"""
    import numpy as np

    if history.shape[1] < len(tokens):
        return np.zeros(len(history), dtype=bool)
    end = history[:, history.shape[1] - len(tokens) :]
    return np.asarray((end == np.array(tokens, dtype=np.int64)).all(axis=1))
