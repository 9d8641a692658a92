"""What greedy and beam search have in common: they ask for a step, read what it tells, and sentences that are done leave.

A search runs no graph. So one loop serves all searches (`steps_of`), a runtime may make several steps before the search sees
them, and `scheduling/` lets many searches share each step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tfexport.decoding.hypothesis import Hypothesis
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Ahead, Ask, Continuations, FloatArray, IntArray, Runtime, Told, tell

StablePrefix = Callable[[int], tuple[IntArray, NDArray[np.float64]]]
"""For the index of a source: the tokens that its best output certainly begins with, and their log-probabilities, both
[length]."""

Steps = Generator[StablePrefix, None, list[list[Hypothesis]]]
"""A search that yields after each step but the last. It returns the hypotheses of each source."""

TellAttention = Callable[[], FloatArray]
"""The cross-attention of the last step, [layers, rows, heads, src]; called only by searches that read it."""


Begin = Callable[[Ahead, int], None]
"""Takes the next steps, and how many sentences go on for certain."""


class SearchBatch(Protocol):
    """A search of a batch of sentences, between two steps.

    Row b * width + k of a step is hypothesis k of `sentences[b]`.
    """

    sentences: IntArray
    """The index of the source of each group of rows."""
    tokens: IntArray
    """The last token of each row, [rows]: what the next step is fed."""
    ended: IntArray
    """The indices of the sources that were done with the last step, or with one of several."""

    @property
    def is_done(self) -> bool:
        """Whether all sentences are."""
        ...

    def ask(self) -> Ask:
        """What the next step has to tell."""
        ...

    def ask_ahead(self) -> Ahead | None:
        """The next steps, where the runtime is to make several by itself; None where the search ranks the next one, and
        always in a search that was not offered it.
        """
        ...

    def advance(self, told: Told, attention: TellAttention) -> IntArray | None:
        """Continue with what a step of `tokens` told.

        Returns:
            Which row of this step each row of the next continues, [rows]; None where every row continues itself.

        Raises:
            TfexportError: the runtime gave numbers that are not finite, or an output can neither go on nor end.
        """
        ...

    def advance_ahead(self, found: Continuations, begin: Begin | None = None) -> IntArray | None:
        """Continue with what the runtime found in the steps of `ask_ahead`, [steps, sentences, candidates]. What comes after
        the end of a sentence is dropped. So is what comes after the length limit.

        Args:
            found: the batch's own from now on: it may change it.
            begin: called with what `ask_ahead` will ask for next, of all sentences that the batch has now, as soon as some
                of them go on for certain. The others may leave afterwards.

        Returns:
            As `advance`: the runtime has reordered the beams already.

        Raises:
            TfexportError: as `advance`.
        """
        ...

    def drop(self, indices: IntArray) -> None:
        """Leave out these sources, which are not done: their rows are missing in the next step."""
        ...

    def stable_prefix(self, index: int) -> tuple[IntArray, NDArray[np.float64]]:
        """See `StablePrefix`."""
        ...

    def outputs(self, indices: IntArray) -> list[list[Hypothesis]]:
        """What was found for each of these sources, which are done."""
        ...


def steps_of(runtime: Runtime[Any], state: Any, batch: SearchBatch, sources: int) -> Steps:
    """Run a search of `sources` sentences from their first `state`, by one step or several."""
    while True:
        ahead = batch.ask_ahead()
        if ahead is None:
            told, state = tell(runtime, state, batch.tokens, batch.ask())
            rows = batch.advance(told, partial(_attention_of, state))
        else:
            found, state = runtime.search_ahead(state, ahead)
            # The device works on while the host takes what it found.
            rows = batch.advance_ahead(found, partial(runtime.begin_ahead, state))
        if batch.is_done:
            return batch.outputs(np.arange(sources))
        if rows is not None:
            state = state.select(rows)
        yield batch.stable_prefix


def _attention_of(state: Any) -> FloatArray:
    found: FloatArray = state.attention
    return found


NO_SENTENCES: IntArray = np.empty(0, dtype=np.int64)

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
