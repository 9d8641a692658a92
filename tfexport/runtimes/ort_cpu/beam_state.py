"""The state of beam search on the runtime `ort-cpu` over the dialect `ort`: one cache for all hypotheses of a sentence.

`shared_cache_mask.py` describes the cache. When it is full, the slots that are in the past of no hypothesis are dropped. The
hypotheses of a sentence share all but their last few tokens, so a cache holds little more than one hypothesis. They begin
with the same token: with kernels, the first step computes one hypothesis of a sentence, and all hypotheses see its slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tfexport.runtimes.base import Ahead
from tfexport.runtimes.ort_cpu import native_beams
from tfexport.runtimes.ort_cpu.batch_buffers import (
    Positions,
    first_rows,
    require_position,
    take_in_place,
    widened,
    with_rows,
    write_rows,
)
from tfexport.runtimes.ort_cpu.bound_graphs import BatchShortlist, StepGraph, outputs_of, requested, same_bans, widest
from tfexport.runtimes.ort_cpu.context import Context
from tfexport.runtimes.outputs import Best, Continuations, FloatArray, IntArray, StepOutput, StepRequest
from tfexport.runtimes.shared_cache_mask import see_new_slots

SHRINK_BELOW = 0.75
"""The fraction of live sentences at or below which the others are removed from the buffers, which costs a copy."""


class BeamState:
    """A batch in which the hypotheses of a sentence share a cache.

    `_places` [sentences] are the places of the live sentences in the buffers. Other places are computed, but never read.
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
        self._context = context
        self._beam = beam
        self._attention = attention
        self._shortlist = shortlist
        layout, batch = context.layout, len(src_len)
        self._positions = Positions.first(batch, layout.room)
        self._hypotheses = np.arange(beam)
        size = layout.slots(layout.room * beam)
        mask, slot = np.zeros((batch, 1, beam, size), dtype=bool), np.zeros(batch, dtype=np.int64)
        self._use_buffers(list(cross), src_len, context.empty_cache(batch, size), mask, slot)

    def _use_buffers(
        self,
        cross: list[FloatArray],
        src_len: NDArray[np.int32],
        cache: list[FloatArray],
        mask: NDArray[np.bool_],
        slot: IntArray,
    ) -> None:
        """Continue in these buffers, in which all places are live.

        Args:
            slot: the next free slot of each place, [places].
        """
        self._cross = cross
        self._src_len = src_len
        self._cache = cache
        self._mask = mask
        self._slot = slot
        self._places, self._in_order = np.arange(len(src_len)), True
        self._step: StepGraph | None = None

    def _bind(self, width: int) -> StepGraph:
        """The graph for steps that compute `width` hypotheses of each sentence."""
        sizes = (self._cross, self._src_len, (len(self._src_len), width))
        step = StepGraph(self._context, "beam_step", *sizes, attention=self._attention, shortlist=self._shortlist)
        step.tokens.fill(self._context.config.bos_id)  # places that are not live read it
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
        return list(self._cross) if self._in_order else [tensor[self._places] for tensor in self._cross]

    @property
    def attention(self) -> FloatArray:
        assert self._step is not None  # a step was run
        attention, rows = requested(self._step.attention), self._output_rows()
        return attention if rows is None else attention[:, rows]

    def best(self, tokens: IntArray, count: int) -> Best:
        best, rows = self._run(tokens, count).best(), self._output_rows()
        return best if rows is None else Best(best.log_probs[rows], best.ids[rows])

    def step(self, tokens: IntArray) -> FloatArray:
        logits, rows = self._run(tokens, 1, True).logits(), self._output_rows()
        return logits if rows is None else logits[rows]

    def shared_step(self, tokens: IntArray, requests: Sequence[StepRequest]) -> list[StepOutput]:
        """See `Runtime.shared_step`."""
        step = self._run(tokens, *widest(requests))
        return outputs_of(step, requests, self._output_rows())

    def _buffer_rows(self) -> IntArray | None:
        """The row of each live hypothesis in the buffers, [rows]; None if all are live and in order."""
        return None if self._in_order else (self._places[:, None] * self._beam + self._hypotheses).ravel()

    def _output_rows(self) -> IntArray | None:
        """The row of each live hypothesis in the outputs of the last step; None if all are live and in order."""
        return self._buffer_rows() if self._width == self._beam else self._places.repeat(self._beam)

    def search_ahead(self, request: Ahead) -> Continuations:
        """See `Runtime.search_ahead`. It returns after a step in which a hypothesis ended."""
        step = self._begin(request.tokens)
        positions, most = self._positions, self._context.config.max_target_length
        steps = min(request.steps, positions.room_left, most - positions.longest, same_bans(request))
        if self._width < self._beam:
            steps = 1  # the graph of the next step computes all hypotheses
        continuations = native_beams.run_steps(
            step, request, steps, beam=self._beam, places=self._places, slot=self._slot, mask=self._mask
        )
        for _ in continuations.tokens:
            positions.advance()
        return continuations

    def _run(self, tokens: IntArray, count: int, logits: bool = False) -> StepGraph:
        """Run a step, with the `count` best tokens of each row, and with logits if they are requested. Returns its graph."""
        step = self._begin(tokens)
        if self._width == self._beam:
            see_new_slots(self._mask, self._places, self._slot[self._places])
        if logits:
            step.enable_logits()
        step.run(count)
        self._slot += self._beam * self._positions.per_step
        self._positions.advance()
        return step

    def _begin(self, tokens: IntArray) -> StepGraph:
        """The graph of the next step, with its inputs. Where it computes all hypotheses, they do not see new slots yet."""
        positions = self._positions
        require_position(self._context.config, positions.longest)
        if positions.room_left == 0:
            self._make_room()
        inputs = tokens.reshape(-1, self._beam)
        if self._one_row_is_enough(inputs):
            self._mask[self._places, 0, :, 0] = True
            step = self._bind(1)
        else:
            step = self._step if self._step is not None and self._width == self._beam else self._bind(self._beam)
        if not self._in_order:
            every = step.tokens.copy()
            every[self._places] = inputs[:, : self._width]
            inputs = every
        step.begin(inputs[:, : self._width], positions.position[:, None])
        return step

    def _one_row_is_enough(self, tokens: IntArray) -> bool:
        """Whether a step with these `tokens` [sentences, beam] may compute only one hypothesis of each sentence.

        It may in the first step, where all hypotheses of a sentence are equal. A batch of one sentence computes all of them:
        to bind another graph costs more than it saves, and ONNX Runtime's products of a single row may have other last bits.
        """
        if (
            self._positions.longest
            or len(self._places) == 1
            or self._attention
            or not self._context.attention_is_by_row
        ):
            return False
        return bool((tokens == tokens[:, :1]).all())

    def _make_room(self) -> None:
        """Continue in a cache without the slots that are in the past of no hypothesis.

        The step at which this happens, and the new order of the slots of a sentence, depend on that sentence alone, because
        sums over slots in another order have other last bits.
        """
        due = self._positions.due()  # [due]: all places, if all sentences began together
        seen = self._mask[due, 0].any(axis=1)  # [due, cache]
        count = seen.sum(axis=1)  # [due]
        most = int(count.max())
        # If all slots are seen, as with a beam of one, room for a constant number of steps would cause too many copies.
        layout = self._context.layout
        steps = np.maximum(layout.room, self._positions.position[due] // 8)
        size = layout.slots(int((count + steps * self._beam).max()))
        places, heads, slots, head_dim = self._cache[0].shape
        some_stay = len(due) < places
        size = max(size, slots) if some_stay else size
        order = np.argsort(~seen, axis=1, kind="stable")[:, :most]  # the seen slots first, in their order
        # The rows of the seen slots in a tensor of shape [places * heads * slots, head_dim]: [due, heads, most].
        source_rows = (due[:, None, None] * heads + np.arange(heads)[:, None]) * slots + order[:, None]
        moved = self._context.buffers.empty((*source_rows.shape, head_dim))
        for index, tensor in enumerate(self._cache):  # one at a time, so that two whole caches never exist
            # All rows are in range; mode "raise", which checks that, makes one more copy.
            tensor.reshape(-1, head_dim).take(source_rows, axis=0, out=moved, mode="clip")
            if some_stay:
                if size > slots:
                    self._cache[index] = self._context.cache_tensor(places, size, tensor)
                self._cache[index][due, :, :most] = moved
            else:
                self._cache[index] = self._context.cache_tensor(places, size, moved)
            if self._step is not None:
                self._step.bind_cache_tensor(index, self._cache[index])
        mask = np.zeros((*self._mask.shape[:3], size), dtype=bool)
        if some_stay:
            mask[..., :slots] = self._mask
            mask[due] = False
        mask[due, 0, :, :most] = self._mask[due[:, None, None], 0, self._hypotheses[:, None], order[:, None]]
        self._bind_mask(mask)
        self._slot[due] = count
        self._positions.give_room(due, steps)

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
        if len(self._places) <= SHRINK_BELOW * len(self._src_len):
            self._compact()
        return self

    def _compact(self) -> None:
        """Remove the sentences that left from the buffers."""
        places = self._places
        take_in_place(self._cross, places)
        take_in_place(self._cache, places)
        cross, cache = first_rows(self._cross, len(places)), first_rows(self._cache, len(places))
        self._shortlist = self._shortlist and self._shortlist.select(places)
        self._positions = self._positions.select(places)
        self._use_buffers(cross, self._src_len[places], cache, self._mask[places], self._slot[places])

    def put(self, places: IntArray, other: BeamState) -> None:
        if not self._in_order:
            self._compact()
        rows = max(len(self._src_len), int(places.max()) + 1)
        if rows > len(self._src_len) or other.source_room > self.source_room:
            slots = self._cache[0].shape[2]
            cross = first_rows(widened(self._context, self._cross, rows, other.source_room), rows)
            cache = self._cache
            if rows > len(self._src_len):
                cache = [self._context.cache_tensor(rows, slots, tensor) for tensor in cache]
            mask, slot = with_rows(self._mask, rows), with_rows(self._slot, rows)
            self._positions = self._positions.with_places(rows)
            self._use_buffers(cross, with_rows(self._src_len, rows), cache, mask, slot)
        if not self._context.attention_is_by_row:  # unseen slots are read with a weight of 0, and 0 * NaN is NaN
            for tensor in self._cache:
                tensor[places] = self._context.layout.fill
        write_rows(self._cross, places, other.cross)
        self._src_len[places] = other.source_lengths
        self._mask[places] = False
        self._slot[places] = 0
        self._positions.begin(places, self._context.layout.room)

    def idle(self, places: IntArray) -> None:
        self._mask[places], self._slot[places] = False, 0
        self._positions.idle(places)

    @property
    def source_room(self) -> int:
        """The source length of the cross keys and values."""
        return self._cross[0].shape[2]

    @property
    def source_lengths(self) -> NDArray[np.int32]:
        """The number of source ids of each live sentence, [sentences]."""
        return self._src_len[self._places]
