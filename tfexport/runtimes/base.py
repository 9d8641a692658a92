"""The interface between searches and runtimes: `encode` once per batch, then `step` after `step`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.runtimes.outputs import (
    Argmax,
    ArgmaxRequest,
    Best,
    BestRequest,
    Continuations,
    FloatArray,
    IntArray,
    StepOutput,
    StepRequest,
)

AHEAD = 8
"""The largest number of steps that a runtime makes by itself when it searches ahead."""


@dataclass(frozen=True)
class Ahead:
    """Requests several steps of a search: the runtime ranks the continuations of each step, and continues the best."""

    tokens: IntArray
    """The last token of each live hypothesis, [rows]."""
    log_probs: NDArray[np.float64] | None
    """The log-probabilities of the live hypotheses, [sentences, beam]; None without a beam."""
    candidates: int
    """The number of best continuations of a sentence to return."""
    banned: tuple[tuple[int, ...], ...]
    """The banned ids of each step."""
    end_ids: tuple[int, ...]
    """The ids after which a hypothesis leaves the beam."""
    steps: int = AHEAD
    """The number of steps, at least one, before a sentence may be done although none of `end_ids` was found. A runtime for
    which a step costs more than a transfer to the host makes no more."""
    live: NDArray[np.bool_] | None = None
    """The rows whose outputs are not done, [rows]; None for all. The others are computed, and not read."""
    best_only: bool = False
    """A search without a beam takes any number in place of log-probabilities, such as logits."""


@dataclass(frozen=True)
class Capacity:
    """The largest sizes that a runtime takes; None where only memory sets a limit."""

    source: int
    """The largest number of source ids."""
    target: int
    """The largest number of generated tokens."""
    batch: int | None = None
    """The largest number of sentences in a batch."""
    rows: int | None = None
    """The largest number of rows, batch * beam."""

    @classmethod
    def of_model(cls, config: ModelConfig) -> Capacity:
        """The limits of the model's positions."""
        return cls(config.max_source_length, config.max_target_length)

    def batch_size(self, wanted: int, beam: int) -> int:
        """The number of sentences in a batch, up to `wanted`, for a beam of this width; at least one."""
        sizes = (wanted, self.batch, None if self.rows is None else self.rows // beam)
        return max(1, min(size for size in sizes if size is not None))


@dataclass(frozen=True)
class Needs:
    """The properties of a search that decide which graphs a runtime loads. They are known before the first batch."""

    width: int = 1
    """The number of hypotheses of a sentence that are decoded at once."""
    best_only: bool = False
    """The search needs the ids of the best tokens only: no probabilities and no logits."""
    attention: bool = False
    """The search needs cross-attention weights."""


@dataclass(frozen=True)
class Capabilities:
    """The optional methods that a runtime implements. A search works without them, but is slower."""

    argmax: bool = False
    """`Runtime.argmax` is implemented."""
    shortlists: bool = False
    """`Runtime.encode_shortlisted` is implemented."""
    fork: bool = False
    """After `prepare` the process may fork, and the children may search."""
    greedy_ahead: bool = False
    """`Runtime.search_ahead` is implemented for searches without a beam."""
    beam_ahead: bool = False
    """`Runtime.search_ahead` is implemented for searches with a beam."""
    waits_for_host: bool = False
    """A device waits while the host ranks the tokens of a step."""
    joins: bool = False
    """The states of `encode` are `JoiningState`s, and `Runtime.shared_step` is implemented."""


class DecoderState(Protocol):
    """A batch during decoding: cross keys/values of `batch` sentences and the self-attention cache of `rows` hypotheses.

    A search uses a state once: `step` and `select` return the next state, and may write it into the buffers of this one.
    """

    @property
    def rows(self) -> int:
        """Hypotheses: batch * beam, row = b * beam + k."""
        ...

    @property
    def cross(self) -> list[FloatArray]:
        """The cross keys and values, layer by layer, key before value, each [batch, heads, src, head_dim]."""
        ...

    @property
    def attention(self) -> FloatArray:
        """The cross-attention weights [layers, rows, heads, src] of the last step's tokens, in the order of the rows. Read
        them before the next `step` or `select`, and only if `encode` was called with `attention=True`."""
        ...

    def select(self, rows: IntArray) -> Self:
        """The state whose row r continues row `rows[r]` of this one.

        `rows` [batch' * beam] keeps the beams of a sentence together, and has no sentence twice. So it reorders beams, drops
        sentences and moves sentences; cross keys/values move only in the last two cases.
        """
        ...


class JoiningState(DecoderState, Protocol):
    """A state that takes new sentences while others are under way, so that sentences of several ages share each step.

    A sentence has a place, its number in the state. The output of a row does not depend on the other places, to the
    last bit.
    """

    def put(self, places: IntArray, other: Self) -> None:
        """Let the sentences of `other`, a state before any token of the same kind, begin at `places` [sentences].

        These are idle places, or they come after the last place without a gap. `other` may not be used any more.
        """
        ...

    def idle(self, places: IntArray) -> None:
        """Mark the sentences at `places` as done. Until the next `put` or `select`, their rows are computed with any token,
        and never read."""
        ...


class Runtime(Protocol):
    """One way to execute a model. `BaseRuntime` has defaults for the members that few runtimes implement.

    States are `DecoderState`s. A runtime accepts only states that it returned itself.
    """

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def precision(self) -> Precision:
        """The precision of the weights and activations."""
        ...

    @property
    def capacity(self) -> Capacity:
        """The sizes that the runtime takes; beyond them `encode` and `step` raise TfexportError."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def prepare(self, needs: Needs) -> None:
        """Load the graphs that a search needs. Without this call, its first batch loads them."""
        ...

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> Any:
        """Encode `src_ids` [batch, src], of which the first `src_len` [batch] count; returns the state before any token.

        Args:
            attention: the states have `attention`.

        Raises:
            RuntimeUnavailable: this runtime has no cross-attention weights to give.
            BundleError: the bundle has no graphs for them.
        """
        ...

    def encode_shortlisted(
        self, src_ids: IntArray, src_len: IntArray, candidates: Sequence[IntArray], *, beam: int = 1
    ) -> Any:
        """`encode` for sentences whose outputs consist of their `candidates` (sorted ids, for each sentence) alone.

        All other tokens have logit and log-probability -inf; log-probabilities are normalised over the candidates. Only if
        `capabilities.shortlists`.
        """
        ...

    def step(self, state: Any, tokens: IntArray) -> tuple[FloatArray, Any]:
        """Feed the next `tokens` [rows]; returns logits [rows, vocab] float32, and the state that includes these tokens."""
        ...

    def best(self, state: Any, tokens: IntArray, count: int) -> tuple[Best, Any]:
        """Run `step`, and return only the `count` best tokens of each row, or the whole vocabulary if it is smaller.

        The logits stay on the device.
        """
        ...

    def argmax(self, state: Any, tokens: IntArray, banned: Sequence[int]) -> tuple[Argmax, Any]:
        """Run `step`, and return only the largest logit of each row, the `banned` ids excluded. This is faster than `best`.
        Only if `capabilities.argmax`.
        """
        ...

    def shared_step(
        self, state: Any, tokens: IntArray, requests: Sequence[StepRequest]
    ) -> tuple[list[StepOutput], Any]:
        """A step that returns an output of all rows for each request. Either all are `ArgmaxRequest`s, or none is. Only if
        `capabilities.joins`.
        """
        ...

    def search_ahead(self, state: Any, request: Ahead) -> tuple[Continuations, Any]:
        """Make up to `AHEAD` steps, at least one, each with the tokens that the one before found best.

        Equal continuations are ordered by beam, then by rank. Log-probabilities are summed in float64. The results of steps
        after the end of a sentence, or after the last position of the runtime, are undefined. Only if
        `capabilities.greedy_ahead`, or `capabilities.beam_ahead`.

        Returns:
            The best continuations of each step, [steps, sentences, candidates], and the state whose rows are the live
            hypotheses after the last step, in their order.
        """
        ...

    def begin_ahead(self, state: Any, request: Ahead, sentences: int) -> None:
        """Begin the next `search_ahead` of a `state` that `search_ahead` returned, without waiting for it.

        The device continues while the host finds out which sentences are done. These may leave by `state.select` before the
        call of `search_ahead`. A runtime may ignore this call, for example if the batch is about to move to smaller buffers.

        Args:
            request: the request of the next `search_ahead`, which may have fewer sentences.
            sentences: the number of sentences that certainly continue, at least one.
        """
        ...


class BaseRuntime:
    """The members of `Runtime` as a runtime without `Capabilities` has them."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def prepare(self, needs: Needs) -> None:
        """Everything is loaded already."""

    def encode_shortlisted(
        self, src_ids: IntArray, src_len: IntArray, candidates: Sequence[IntArray], *, beam: int = 1
    ) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no shortlists; use MaskedShortlistRuntime")

    def argmax(self, state: Any, tokens: IntArray, banned: Sequence[int]) -> tuple[Argmax, Any]:
        raise NotImplementedError(f"{type(self).__name__} has no argmax; use best")

    def search_ahead(self, state: Any, request: Ahead) -> tuple[Continuations, Any]:
        raise NotImplementedError(f"{type(self).__name__} does not search ahead; use best")

    def begin_ahead(self, state: Any, request: Ahead, sentences: int) -> None:
        """Does nothing: `search_ahead` makes the steps."""

    def shared_step(
        self, state: Any, tokens: IntArray, requests: Sequence[StepRequest]
    ) -> tuple[list[StepOutput], Any]:
        raise NotImplementedError(f"{type(self).__name__} joins no states; use the function `step_for`")


class ClassifierRuntime(Protocol):
    """One way to execute an encoder classifier."""

    @property
    def name(self) -> str: ...

    @property
    def precision(self) -> Precision: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def capacity(self) -> Capacity: ...

    def logits(self, src_ids: IntArray, src_len: IntArray) -> FloatArray:
        """The logits [batch, classes] float32 of `src_ids` [batch, src], of which the first `src_len` [batch] count."""
        ...


def step_for(runtime: Runtime, state: Any, tokens: IntArray, request: StepRequest) -> tuple[StepOutput, Any]:
    """Run a step of any runtime. Returns the output of the request, and the next state."""
    if isinstance(request, ArgmaxRequest):
        return runtime.argmax(state, tokens, request.banned)
    if isinstance(request, BestRequest):
        return runtime.best(state, tokens, request.count)
    return runtime.step(state, tokens)
