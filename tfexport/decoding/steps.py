"""What greedy and beam search have in common: they stop after each step, and finished sentences leave the batch."""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np
from numpy.typing import NDArray

from tfexport.decoding.hypothesis import Hypothesis
from tfexport.errors import TfexportError
from tfexport.runtimes.base import IntArray

StablePrefix = Callable[[int], tuple[IntArray, NDArray[np.float64]]]
"""For the index of a source: the tokens that its best output certainly begins with, and their log-probabilities, both
[length]."""

Steps = Generator[StablePrefix, None, list[list[Hypothesis]]]
"""A search that yields after each step but the last. It returns the hypotheses of each source."""

ALL_SENTENCES = slice(None)
"""An index for all sentences, while all are in the batch. A slice takes half the time of an array of indices."""


def rows_to_keep(live: NDArray[np.bool_]) -> IntArray:
    """The indices of the `live` rows, in an order that moves few of them: the last ones fill the gaps."""
    rows = np.flatnonzero(live)
    places = np.arange(len(rows))
    gaps = places[~live[: len(rows)]]
    places[gaps] = rows[len(rows) - len(gaps) :]
    return places


def is_end(tokens: IntArray, end_ids: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which of `tokens` end an output; of the same shape."""
    return np.asarray(tokens == end_ids[0] if len(end_ids) == 1 else np.isin(tokens, end_ids))


def no_token_error() -> TfexportError:
    return TfexportError(
        "the model gives probability 0 to all that an output may go on with, its end included. Leave out the rule or the "
        "forced beginning that asks for it."
    )
