"""The state of greedy search on the runtime `ort-cpu` over the dialect `ort`: each row has a cache of its own.

The graphs are bound to NumPy arrays, so that a step is one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tfexport.runtimes.base import Ahead
from tfexport.runtimes.ort_cpu.batch_buffers import (
    first_rows,
    require_position,
    room_for,
    take_in_place,
    widened,
    with_rows,
    write_rows,
)
from tfexport.runtimes.ort_cpu.bound_graphs import (
    BatchShortlist,
    GreedyStepGraph,
    StepGraph,
    outputs_of,
    requested,
    same_bans,
    widest,
)
from tfexport.runtimes.ort_cpu.context import Context
from tfexport.runtimes.outputs import (
    Argmax,
    ArgmaxRequest,
    Best,
    Continuations,
    FloatArray,
    IntArray,
    StepOutput,
    StepRequest,
)


class GreedyState:
    """A batch in which each row has its own cache. A `JoiningState`: each row has a position of its own."""

    def __init__(
        self,
        context: Context,
        cross: Sequence[FloatArray],
        src_len: NDArray[np.int32],
        *,
        attention: bool = False,
        shortlist: BatchShortlist | None = None,
    ):
        self._context = context
        self._attention = attention
        self._shortlist = shortlist
        self._cross, self._src_len = list(cross), src_len
        self._filled = np.zeros(len(src_len), dtype=np.int32)  # the number of filled slots of each row
        self._per_step = np.ones(len(src_len), dtype=np.int32)  # slots that a step fills: 1, or 0 of an idle row
        self._longest = 0
        self._cache = context.empty_cache(len(src_len), context.layout.block)
        self._total = np.zeros(1, dtype=np.int32)
        self._unbind()

    def _unbind(self) -> None:
        self._bound_step: StepGraph | None = None
        self._bound_greedy_step: GreedyStepGraph | None = None

    @property
    def _step(self) -> StepGraph:
        if self._bound_step is None:
            sizes = (first_rows(self._cross, self.rows), self._src_len, self.rows)
            step = StepGraph(
                self._context, "decoder_step", *sizes, attention=self._attention, shortlist=self._shortlist
            )
            step.binding.input("total", self._total)
            step.bind_cache(first_rows(self._cache, self.rows))
            self._bound_step = step
        return self._bound_step

    @property
    def rows(self) -> int:
        return len(self._src_len)

    @property
    def cross(self) -> list[FloatArray]:
        return first_rows(self._cross, self.rows)

    @property
    def attention(self) -> FloatArray:
        return requested(self._step.attention)

    def best(self, tokens: IntArray, count: int) -> Best:
        self._step.begin(tokens, self._next_slots())
        self._step.run(count)
        return self._step.best()

    def step(self, tokens: IntArray) -> FloatArray:
        self._step.enable_logits()
        self._step.begin(tokens, self._next_slots())
        self._step.run()
        return self._step.logits()

    def argmax(self, tokens: IntArray, banned: Sequence[int]) -> Argmax:
        """The best token of each row, `banned` ids excluded, with its logit. The graph computes nothing else."""
        return self._argmax(tokens, self._next_slots(), banned)

    def _argmax(self, tokens: IntArray, position: NDArray[np.int32], banned: Sequence[int]) -> Argmax:
        if self._bound_greedy_step is None:
            self._bound_greedy_step = GreedyStepGraph(self._context, self.cross, self._src_len)
            self._bound_greedy_step.binding.input("total", self._total)
            self._bound_greedy_step.bind_cache(first_rows(self._cache, self.rows))
        return self._bound_greedy_step.argmax(tokens, position, banned)

    def search_ahead(self, request: Ahead) -> Continuations:
        """See `Runtime.search_ahead`. It returns after a step in which a row ended."""
        config, banned, live = self._context.config, request.banned[0], request.live
        steps = max(1, min(request.steps, same_bans(request), config.max_target_length - self._longest))
        choose = self._best_logit if request.best_only else self._best_token
        tokens, scores, ids = request.tokens, [], []
        for _ in range(steps):
            score, tokens = choose(tokens, banned)
            scores.append(score)
            ids.append(tokens)
            read = tokens if live is None else tokens[live]
            is_finite = math.isfinite(score.sum())  # else the row ended, or a number is wrong
            if not is_finite or any(np.count_nonzero(read == end) for end in request.end_ids):
                break
        chosen = np.stack(ids)[..., None]
        return Continuations(np.stack(scores)[..., None].astype(np.float64), np.zeros_like(chosen), chosen)

    def _best_logit(self, tokens: IntArray, banned: tuple[int, ...]) -> tuple[FloatArray, IntArray]:
        """The logit and the id of the token that follows `tokens`, each [rows]; NaN where a logit is not a number."""
        best = self.argmax(tokens, banned).checked(banned, eos=self._context.config.eos_id)
        return best.logits[:, 0], best.ids[:, 0]

    def _best_token(self, tokens: IntArray, banned: tuple[int, ...]) -> tuple[FloatArray, IntArray]:
        """As `_best_logit`, with log-probabilities."""
        best = self.best(tokens, 1 + len(banned))
        is_wrong = ~np.isfinite(best.log_probs[:, 0])
        if banned:
            best = best.without(banned, 1, eos=self._context.config.eos_id)
        log_probs = best.log_probs[:, 0]
        return np.where(is_wrong, np.nan, log_probs) if np.count_nonzero(is_wrong) else log_probs, best.ids[:, 0]

    def shared_step(self, tokens: IntArray, requests: Sequence[StepRequest]) -> list[StepOutput]:
        """See `Runtime.shared_step`."""
        bans = [request.banned for request in requests if isinstance(request, ArgmaxRequest)]
        if bans:
            position = self._next_slots()
            # The graph runs once for each request. Each run writes the same numbers to the same slots.
            return [self._argmax(tokens, position, banned) for banned in bans]
        step, (count, logits) = self._step, widest(requests)
        if logits:
            step.enable_logits()
        step.begin(tokens, self._next_slots())
        step.run(count)
        return outputs_of(step, requests, None)

    def _next_slots(self) -> NDArray[np.int32]:
        """Make room for one more token of each row; returns their positions, [rows]."""
        require_position(self._context.config, self._longest)
        if self._longest == self._cache[0].shape[2]:
            self._grow()
        self._longest += 1
        self._total[0] = self._longest
        position = self._filled
        self._filled = position + self._per_step
        return position

    def _grow(self) -> None:
        context = self._context
        steps = [step for step in (self._bound_step, self._bound_greedy_step) if step is not None]
        for index, tensor in enumerate(self._cache):  # one at a time, so that two whole caches never exist
            self._cache[index] = context.cache_tensor(
                self.rows, self._longest + context.layout.block, tensor[: self.rows]
            )
            for step in steps:
                step.bind_cache_tensor(index, self._cache[index])

    def select(self, rows: IntArray) -> GreedyState:
        take_in_place(self._cross, rows)
        take_in_place(self._cache, rows)
        self._src_len = self._src_len[rows]
        self._filled = self._filled[rows]
        self._per_step = self._per_step[rows]
        self._shortlist = self._shortlist and self._shortlist.select(rows)
        self._unbind()
        return self

    def put(self, places: IntArray, other: GreedyState) -> None:
        rows, room = max(self.rows, int(places.max()) + 1), len(self._cross[0])
        if rows > self.rows:
            self._src_len = with_rows(self._src_len, rows)
            self._filled = with_rows(self._filled, rows)
            self._per_step = with_rows(self._per_step, rows)
            self._unbind()
        if rows > room or other.source_room > self.source_room:
            self._cross = widened(self._context, self._cross, rows, other.source_room)
            self._unbind()
        if rows > len(self._cache[0]):
            slots = self._cache[0].shape[2]
            self._cache = [self._context.cache_tensor(room_for(rows), slots, tensor) for tensor in self._cache]
        write_rows(self._cross, places, other.cross)
        self._src_len[places] = other.source_lengths
        self._filled[places], self._per_step[places] = 0, 1
        self._longest = int(self._filled.max())

    def idle(self, places: IntArray) -> None:
        self._filled[places] = self._per_step[places] = 0
        self._longest = int(self._filled.max())

    @property
    def source_room(self) -> int:
        """The source length of the cross keys and values."""
        return self._cross[0].shape[2]

    @property
    def source_lengths(self) -> NDArray[np.int32]:
        """The number of source ids of each row, [rows]."""
        return self._src_len
