"""The base class of rules about past tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfexport.option import Options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tfexport.runtimes.outputs import IntArray

PANEL = "Allowed tokens"
"""The panel of the options of rules in the command line's help."""
TERMS = "Required and forbidden phrases"
"""The panel of the options of phrases."""


@dataclass(frozen=True, kw_only=True)
class HistoryRule(Options):
    """A rule that depends on the past tokens of each row. Its options are its fields.

    `SearchOptions` inherits from every rule, and all rules have the same method names. So call a method on the class of the
    rule, with the options of the search: `rule.ban(options, allowed, history, sources)`.
    """

    def is_active(self) -> bool:
        """Whether the options enable the rule. Only then are the logits of a step computed for it."""
        raise NotImplementedError

    def named_ids(self) -> Iterable[int]:
        """The ids in the options. The target vocabulary must have them."""
        return ()

    def penalise(self, scores: NDArray[np.float64], history: IntArray) -> None:
        """Change `scores` [rows, vocab] in place: logits, or log-probabilities if the toolkit penalises those.

        Args:
            history: the past tokens, [rows, length].
        """

    def ban(self, allowed: NDArray[np.bool_], history: IntArray, sources: Sequence[Sequence[int]] = ()) -> None:
        """Clear in `allowed` [rows, vocab], in place, the tokens that may not follow `history` [rows, length].

        Args:
            sources: the encoder's ids of each row.
        """

    def excludes(self, phrases: Sequence[tuple[int, ...]], source: Sequence[int]) -> bool:
        """Whether no output of a source can contain all these phrases without overlap.

        Args:
            source: the encoder's ids.
        """
        return False


def ngrams_of(ids: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    """The n-grams of `ids`, from left to right."""
    return (tuple(ids[place : place + n]) for place in range(len(ids) - n + 1))


def rows_that_end_with(history: IntArray, tokens: Sequence[int]) -> NDArray[np.bool_]:
    """Flags [rows] for the rows of `history` [rows, length] that end with `tokens`. Every row ends with no tokens."""
    import numpy as np

    if history.shape[1] < len(tokens):
        return np.zeros(len(history), dtype=bool)
    end = history[:, history.shape[1] - len(tokens) :]
    return np.asarray((end == np.array(tokens, dtype=np.int64)).all(axis=1))
