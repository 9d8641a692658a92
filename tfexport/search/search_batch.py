"""The interface of greedy and beam search: they request a step, read its results, and drop sentences that are done.

A search does not run graphs itself. So one loop serves all searches (`steps_of`), a runtime may make several steps before
the search sees them, and many searches may share each step (`scheduling/`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tfexport.errors import TfexportError
from tfexport.runtimes.base import Ahead, Runtime, step_for
from tfexport.runtimes.outputs import Continuations, FloatArray, IntArray, StepOutput, StepRequest
from tfexport.search.hypothesis import Hypothesis

StablePrefix = Callable[[int], tuple[IntArray, NDArray[np.float64]]]
"""Takes the index of a source. Returns the tokens with which its best output certainly begins, and their
log-probabilities, both [length]."""

Steps = Generator[StablePrefix, None, list[list[Hypothesis]]]
"""A search that yields after each step except the last. It returns the hypotheses of each source."""

ReadAttention = Callable[[], FloatArray]
"""Returns the cross-attention of the last step, [layers, rows, heads, src]. Only searches that need it call it."""


Begin = Callable[[Ahead, int], None]
"""Takes the request for the next steps, and the number of sentences that certainly continue."""


class SearchBatch(Protocol):
    """The state of a search of a batch of sentences between two steps.

    Row b * width + k of a step is hypothesis k of `sentences[b]`.
    """

    sentences: IntArray
    """The index of the source of each group of rows."""
    tokens: IntArray
    """The last token of each row, [rows]: the input of the next step."""
    ended: IntArray
    """The indices of the sources that ended with the last call of `advance` or `advance_ahead`."""

    @property
    def is_done(self) -> bool:
        """Whether all sentences are done."""
        ...

    def request(self) -> StepRequest:
        """The outputs that the next step must return."""
        ...

    def request_ahead(self) -> Ahead | None:
        """A request for several steps that the runtime makes by itself. None if the search ranks the next step, and always
        in a search without `ahead`.
        """
        ...

    def advance(self, output: StepOutput, attention: ReadAttention) -> IntArray | None:
        """Continue with the results of a step of `tokens`.

        Returns:
            For each row of the next step, the row of this step that it continues, [rows]; None if each row continues itself.

        Raises:
            TfexportError: the runtime returned numbers that are not finite, or an output can neither continue nor end.
        """
        ...

    def advance_ahead(self, continuations: Continuations, begin: Begin | None = None) -> IntArray | None:
        """Continue with the runtime's results for the steps of `request_ahead`. Tokens after the end of a sentence, or
        after its length limit, are dropped.

        Args:
            continuations: the results, [steps, sentences, candidates]. The search owns them from now on, and may change
                them.
            begin: called with the next request of `request_ahead`, for all sentences that the batch has now, as soon as some
                of them certainly continue. The others may leave afterwards.

        Returns:
            As `advance`. The runtime has already reordered the beams.

        Raises:
            TfexportError: as `advance`.
        """
        ...

    def drop(self, indices: IntArray) -> None:
        """Remove these unfinished sources: the next step has no rows for them."""
        ...

    def stable_prefix(self, index: int) -> tuple[IntArray, NDArray[np.float64]]:
        """See `StablePrefix`."""
        ...

    def outputs(self, indices: IntArray) -> list[list[Hypothesis]]:
        """The hypotheses of each of these finished sources."""
        ...


def steps_of(runtime: Runtime, state: Any, batch: SearchBatch, sources: int) -> Steps:
    """Run a search of `sources` sentences from their first `state`, in single steps or several at once."""
    while True:
        ahead = batch.request_ahead()
        if ahead is None:
            output, state = step_for(runtime, state, batch.tokens, batch.request())
            rows = batch.advance(output, partial(_attention_of, state))
        else:
            continuations, state = runtime.search_ahead(state, ahead)
            # A device continues while the host processes the results.
            begin = partial(runtime.begin_ahead, state) if runtime.capabilities.waits_for_host else None
            rows = batch.advance_ahead(continuations, begin)
        if batch.is_done:
            return batch.outputs(np.arange(sources))
        if rows is not None:
            state = state.select(rows)
        yield batch.stable_prefix


def _attention_of(state: Any) -> FloatArray:
    attention: FloatArray = state.attention
    return attention


NO_SENTENCES: IntArray = np.empty(0, dtype=np.int64)

ALL_SENTENCES = slice(None)
"""An index for all sentences, while all are in the batch. A slice takes half the time of an array of indices."""


def rows_to_keep(live: NDArray[np.bool_]) -> IntArray:
    """The indices of the `live` rows. The last rows fill the gaps, so that few rows move."""
    rows = np.flatnonzero(live)
    places = np.arange(len(rows))
    gaps = places[~live[: len(rows)]]
    places[gaps] = rows[len(rows) - len(gaps) :]
    return places


def is_end(tokens: IntArray, end_ids: tuple[int, ...]) -> NDArray[np.bool_]:
    """Flags for the `tokens` that end an output, of the same shape."""
    return np.asarray(tokens == end_ids[0] if len(end_ids) == 1 else np.isin(tokens, end_ids))


def no_token_error() -> TfexportError:
    return TfexportError(
        "the model gives probability 0 to all tokens that may continue an output, including its end. Leave out the rule or "
        "the forced prefix that causes this."
    )
