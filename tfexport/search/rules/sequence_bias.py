"""Makes sequences of tokens more or less likely (`sequence_bias` of Transformers)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfexport.errors import TfexportError
from tfexport.option import option
from tfexport.search.rules.history import PANEL, HistoryRule, rows_that_end_with

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tfexport.runtimes.outputs import IntArray

Bias = tuple[tuple[int, ...], float]


def parse_bias(called: str, text: str) -> tuple[str, float]:
    """Parse `w1 w2=-2.5` into tokens and a number.

    Args:
        called: the name of the argument or flag, for errors.

    Raises:
        TfexportError: the text has another form.
    """
    tokens, equals, number = text.rpartition("=")
    try:
        return (tokens, float(number if equals and tokens.strip() else "none"))
    except ValueError:
        raise TfexportError(
            f"{called} is {text!r}, not tokens, = and a number. Give them as in 'w1 w2=-2.5'."
        ) from None


@dataclass(frozen=True, kw_only=True)
class SequenceBias(HistoryRule):
    """Adds a number to the score of the last token of each sequence, if the row ends with the other tokens of the sequence.
    The score is the logit, or the log-probability if the toolkit penalises those."""

    sequence_bias: tuple[Bias, ...] = option(
        (),
        tokens=True,
        repeated=True,
        parse=parse_bias,
        metavar="TOKENS=BIAS",
        help="Add BIAS to the score of the last of these tokens after the others, as in 'w1 w2=-2.5'; may be repeated.",
        panel=PANEL,
    )

    def conflicts(self) -> list[str]:
        wrong = [bias for tokens, bias in self.sequence_bias if not math.isfinite(bias) or not tokens]
        problem = "sequence_bias has an empty sequence, or a number that is not finite (bad_words are never generated)"
        return [*super().conflicts(), *([problem] * bool(wrong))]

    def is_active(self) -> bool:
        return bool(self.sequence_bias)

    def named_ids(self) -> Iterable[int]:
        return (index for tokens, _ in self.sequence_bias for index in tokens)

    def penalise(self, scores: NDArray[np.float64], history: IntArray) -> None:
        for (*before, last), bias in self.sequence_bias:
            scores[rows_that_end_with(history, before), last] += bias
