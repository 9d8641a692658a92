"""The states of the runtime `ort-cpu` over the dialect `ort`: graphs bound to NumPy arrays, so that a step is one call.

Greedy search has a cache for each row, beam search one for all hypotheses of a sentence:

    slots   0   1   2   3   4   5   6   7   8   9  10  11        beam 3, three steps done
          [a0][b0][c0][a1][b1][c1][a2][b2][c2][  ][  ][  ]       each step appends a slot for each hypothesis
    mask   x           x                   x                     hypothesis 0: a0, a1, then c2

A reorder of beams moves rows of the mask. Every few steps, slots are dropped that no hypothesis has in its past any more.
The hypotheses of a sentence share all but their last few tokens, so that a cache holds little more than one hypothesis. They
begin with the same token: with kernels, the first step computes one hypothesis of a sentence, and all see its slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Argmax, Best, FloatArray, IntArray
from tfexport.runtimes.ort_cpu.bound_graphs import BatchShortlist, GreedyStepGraph, StepGraph
from tfexport.runtimes.ort_cpu.context import Context

COMPACT_BELOW = 0.75
"""The part of the sentences that are live at which a beam search removes the others from its buffers. It costs a copy."""


class GreedyState:
    """A batch in which each row has its own cache."""

    def __init__(
        self,
        context: Context,
        cross: Sequence[FloatArray],
        src_len: NDArray[np.int32],
        *,
        attention: bool = False,
        shortlist: BatchShortlist | None = None,
    ):
        self._context, self._cross, self._src_len, self._filled = context, cross, src_len, 0
        self._attention, self._shortlist = attention, shortlist
        self._cache = context.empty_cache(len(src_len), context.layout.block)
        self._total = np.zeros(1, dtype=np.int32)
        self._unbind()

    def _unbind(self) -> None:
        self._bound_step: StepGraph | None = None
        self._bound_greedy_step: GreedyStepGraph | None = None

    @property
    def _step(self) -> StepGraph:
        if self._bound_step is None:
            sizes = (self._cross, self._src_len, len(self._src_len))
            step = StepGraph(
                self._context, "decoder_step", *sizes, attention=self._attention, shortlist=self._shortlist
            )
            step.binding.input("total", self._total)
            step.bind_cache(self._cache)
            self._bound_step = step
        return self._bound_step

    @property
    def rows(self) -> int:
        return len(self._src_len)

    @property
    def cross(self) -> list[FloatArray]:
        return list(self._cross)

    @property
    def attention(self) -> FloatArray:
        return _requested(self._step.attention)

    def best(self, tokens: IntArray, count: int) -> Best:
        self._step.run(tokens, self._next_slot(), count)
        return self._step.best()

    def step(self, tokens: IntArray) -> FloatArray:
        self._step.enable_logits()
        self._step.run(tokens, self._next_slot())
        return self._step.logits()

    def argmax(self, tokens: IntArray, banned: Sequence[int]) -> Argmax:
        """The best token of each row, `banned` ids excluded, with its logit, by the graph that computes no more."""
        if self._bound_greedy_step is None:
            self._bound_greedy_step = GreedyStepGraph(self._context, self._cross, self._src_len)
            self._bound_greedy_step.binding.input("total", self._total)
            self._bound_greedy_step.bind_cache(self._cache)
        return self._bound_greedy_step.argmax(tokens, self._next_slot(), banned)

    def _next_slot(self) -> int:
        """Make room for one more token; returns its position."""
        _require_position(self._context.config, self._filled)
        if self._filled == self._cache[0].shape[2]:
            self._grow()
        self._filled += 1
        self._total[0] = self._filled
        return self._filled - 1

    def _grow(self) -> None:
        context = self._context
        steps = [step for step in (self._bound_step, self._bound_greedy_step) if step is not None]
        for index, tensor in enumerate(self._cache):  # one by one, so that there are never two whole caches
            self._cache[index] = context.cache_tensor(self.rows, self._filled + context.layout.block, tensor)
            for step in steps:
                step.bind_cache_tensor(index, self._cache[index])

    def select(self, rows: IntArray) -> GreedyState:
        self._cross, self._cache = _take_in_place(self._cross, rows), _take_in_place(self._cache, rows)
        self._src_len = self._src_len[rows]
        self._shortlist = self._shortlist and self._shortlist.select(rows)
        self._unbind()
        return self


class BeamState:
    """A batch in which the hypotheses of a sentence share a cache.

    `places` [sentences] are the places of the live sentences in the buffers. The other places are computed, and not read.
    """

    def __init__(
        self,
        context: Context,
        cross: Sequence[FloatArray],
        src_len: NDArray[np.int32],
        beam: int,
        *,
        attention: bool = False,
        shortlist: BatchShortlist | None = None,
    ):
        self._context, self._beam, self._attention, self._shortlist = context, beam, attention, shortlist
        layout = context.layout
        self._position, self._room_until = 0, layout.room
        self._hypotheses = np.arange(beam)
        size = layout.slots(layout.room * beam)
        mask = np.zeros((len(src_len), 1, beam, size), dtype=bool)
        slot = np.zeros(len(src_len), dtype=np.int64)
        self._use_buffers(cross, src_len, context.empty_cache(len(src_len), size), mask, slot)

    def _use_buffers(
        self,
        cross: Sequence[FloatArray],
        src_len: NDArray[np.int32],
        cache: list[FloatArray],
        mask: NDArray[np.bool_],
        slot: IntArray,
    ) -> None:
        """Continue in these buffers. All of their places are live; `slot` [sentences] is the next free slot of each."""
        self._cross, self._src_len, self._cache, self._mask, self._slot = cross, src_len, cache, mask, slot
        self._places, self._in_order = np.arange(len(src_len)), True
        self._step: StepGraph | None = None

    def _bind(self, width: int) -> StepGraph:
        """The graph for steps that compute `width` hypotheses of each sentence."""
        sizes = (self._cross, self._src_len, (len(self._src_len), width))
        step = StepGraph(self._context, "beam_step", *sizes, attention=self._attention, shortlist=self._shortlist)
        step.tokens.fill(self._context.config.bos_id)  # read by places that are not live
        step.binding.input("slot", self._slot)
        step.bind_cache(self._cache)
        self._step, self._width = step, width
        self._bind_mask(self._mask)
        return step

    def _bind_mask(self, mask: NDArray[np.bool_]) -> None:
        """Let each hypothesis see its slots of `mask` [places, 1, beam, slots]."""
        self._mask = mask
        if self._step is not None:
            self._step.binding.input("mask", np.ascontiguousarray(mask[:, :, : self._width]))

    @property
    def rows(self) -> int:
        return len(self._places) * self._beam

    @property
    def cross(self) -> list[FloatArray]:
        return [tensor[self._places] for tensor in self._cross]

    @property
    def attention(self) -> FloatArray:
        assert self._step is not None  # a step was run
        attention, rows = _requested(self._step.attention), self._output_rows()
        return attention if rows is None else attention[:, rows]

    def best(self, tokens: IntArray, count: int) -> Best:
        best, rows = self._run(tokens, count).best(), self._output_rows()
        return best if rows is None else Best(best.log_probs[rows], best.ids[rows])

    def step(self, tokens: IntArray) -> FloatArray:
        logits, rows = self._run(tokens).logits(), self._output_rows()
        return logits if rows is None else logits[rows]

    def _buffer_rows(self) -> IntArray | None:
        """The row of each live hypothesis in the buffers, [rows]; None if all are live and in order."""
        return None if self._in_order else (self._places[:, None] * self._beam + self._hypotheses).ravel()

    def _output_rows(self) -> IntArray | None:
        """The row of each live hypothesis in the outputs of the last step; None if all are live and in order."""
        return self._buffer_rows() if self._width == self._beam else self._places.repeat(self._beam)

    def _run(self, tokens: IntArray, count: int | None = None) -> StepGraph:
        """Run a step; returns its graph, with the `count` best tokens, or with logits if None."""
        _require_position(self._context.config, self._position)
        if self._position == self._room_until:
            self._make_room()
        given = tokens.reshape(-1, self._beam)
        live, new = self._places[:, None], self._hypotheses
        if self._one_row_is_enough(given):
            self._mask[live, 0, new, 0] = True
            step = self._bind(1)
        else:
            self._mask[live, 0, new, self._slot[live] + new] = True
            step = self._step if self._step is not None and self._width == self._beam else self._bind(self._beam)
        if not self._in_order:
            every = step.tokens.copy()
            every[self._places] = given[:, : self._width]
            given = every
        if count is None:
            step.enable_logits()
        step.run(given[:, : self._width], self._position, count or 1)
        self._slot += self._beam
        self._position += 1
        return step

    def _one_row_is_enough(self, tokens: IntArray) -> bool:
        """Whether a step with these `tokens` [sentences, beam] has to compute one hypothesis of each sentence only.

        Not for a single sentence: the graph that is bound for it would cost more than it saves, and products of a single row
        may have other last bits, where they are ONNX Runtime's.
        """
        if self._position or len(self._places) == 1 or self._attention or not self._context.attention_is_by_row:
            return False
        return bool((tokens == tokens[:, :1]).all())

    def _make_room(self) -> None:
        """Continue in a cache without the slots that are in no hypothesis' past.

        When this is done, and where the slots of a sentence lie then, depends on the step and the sentence alone: sums over
        slots in another order have other last bits.
        """
        seen = self._mask[:, 0].any(axis=1)  # [batch, cache]
        count = seen.sum(axis=1)  # [batch]
        most = int(count.max())
        # Where all slots are seen, as with a beam of one, room for a constant number of steps would mean too many copies.
        layout = self._context.layout
        steps = max(layout.room, self._position // 8)
        size = layout.slots(most + steps * self._beam)
        order = np.argsort(~seen, axis=1, kind="stable")[:, :most]  # the seen slots first, in their order
        places, heads, slots, head_dim = self._cache[0].shape
        # The rows of what is seen in a tensor as [places * heads * slots, head_dim]: [places, heads, most].
        source_rows = np.arange(places * heads).reshape(places, heads, 1) * slots + order[:, None]
        moved = self._context.buffers.empty((*source_rows.shape, head_dim))
        for index, tensor in enumerate(self._cache):  # one by one, so that there are never two whole caches
            # All rows are in range; mode "raise", which checks that, makes one more copy.
            tensor.reshape(-1, head_dim).take(source_rows, axis=0, out=moved, mode="clip")
            self._cache[index] = self._context.cache_tensor(places, size, moved)
            if self._step is not None:
                self._step.bind_cache_tensor(index, self._cache[index])
        mask = np.zeros((*self._mask.shape[:3], size), dtype=bool)
        mask[:, 0, :, :most] = self._mask[
            np.arange(places)[:, None, None], 0, self._hypotheses[:, None], order[:, None]
        ]
        self._bind_mask(mask)
        self._slot[:] = count
        self._room_until += steps

    def select(self, rows: IntArray) -> BeamState:
        seen, before = self._mask.reshape(-1, self._mask.shape[3]), self._buffer_rows()
        sentences = rows[:: self._beam] // self._beam
        some_leave = len(sentences) < len(self._places)
        if some_leave or (sentences != np.arange(len(sentences))).any():
            self._places = self._places[sentences]
            self._in_order = len(self._places) == len(self._src_len) and bool((np.diff(self._places) == 1).all())
        moved = seen[rows if before is None else before[rows]]
        if some_leave:
            seen[...] = False  # sentences that leave see no slot, so that none is kept for them
        after = self._buffer_rows()
        seen[... if after is None else after] = moved
        if len(self._places) <= COMPACT_BELOW * len(self._src_len):
            cross, cache = _take_in_place(self._cross, self._places), _take_in_place(self._cache, self._places)
            self._shortlist = self._shortlist and self._shortlist.select(self._places)
            mask, slot = self._mask[self._places], self._slot[self._places]
            self._use_buffers(cross, self._src_len[self._places], cache, mask, slot)
        return self


def _take_in_place(tensors: Sequence[FloatArray], rows: IntArray) -> list[FloatArray]:
    """The `rows` of `tensors`, each [rows, ...], in the same memory. Rows that stay where they are, are not copied."""
    places = np.arange(len(rows))
    moving = np.flatnonzero(rows != places)
    if len(moving):
        for tensor in tensors:
            tensor[moving] = tensor[rows[moving]]
    return [tensor[: len(rows)] for tensor in tensors]


def _requested(attention: FloatArray | None) -> FloatArray:
    assert attention is not None, "encode was called without attention=True"
    return attention


def _require_position(config: ModelConfig, position: int) -> None:
    most = config.max_target_length
    if position >= most:
        raise TfexportError(f"the model has {most} target positions, and no more. Use a smaller --max-length.")
