"""The states of the runtime `ort-cpu` over the dialect `ort`: graphs bound to NumPy arrays, so that a step is one call.

Greedy search has a cache for each row, beam search one for all hypotheses of a sentence:

    slots   0   1   2   3   4   5   6   7   8   9  10  11        beam 3, three steps done
          [a0][b0][c0][a1][b1][c1][a2][b2][c2][  ][  ][  ]       each step appends a slot for each hypothesis
    mask   x           x       x                                 hypothesis 0: a0 a1, then c1's place in the third step

A reorder of beams moves rows of the mask. Every few steps, slots that no hypothesis has in its past any more are left
behind: beams share all but their last few tokens, so that a cache holds little more than one hypothesis. A search begins
with one token for all hypotheses of a sentence: then, with kernels, the first step computes one of them, and all see its
slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import cache_names
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Argmax, Best, FloatArray, IntArray
from tfexport.runtimes.ort_cpu.bound_graphs import Listed, RankingStep, Step

if TYPE_CHECKING:
    from tfexport.runtimes.ort_cpu.runtime import OrtCpuRuntime


@dataclass(frozen=True)
class CacheLayout:
    """How caches are laid out. What is decoded does not depend on it, which `verification/invariance.py` measures."""

    block: int = 16
    """Slots by which caches grow."""
    room: int = 16
    """Steps for which a shared cache has room when it is made or made anew."""
    fill: float = 0.0
    """What is in slots that no step has written. A NaN is for the caches of greedy search alone, whose kernel does not read
    them; elsewhere they are read with a weight of 0, and 0 * NaN is NaN."""

    def slots(self, needed: int) -> int:
        """Slots of a cache that has room for `needed`."""
        return -(-needed // self.block) * self.block

    def tensor(self, runtime: OrtCpuRuntime, places: int, size: int, written: FloatArray | None = None) -> FloatArray:
        """One of a cache's, [places, heads, size, head_dim], of which the first slots are `written`."""
        tensor = runtime.buffers.empty((places, runtime.config.n_heads, size, runtime.config.head_dim))
        filled = 0 if written is None else written.shape[2]
        if written is not None:
            tensor[:, :, :filled] = written
        tensor[:, :, filled:] = self.fill
        return tensor

    def cache(self, runtime: OrtCpuRuntime, places: int, size: int) -> list[FloatArray]:
        """The tensors of a cache that nothing was written to."""
        return [self.tensor(runtime, places, size) for _ in cache_names(runtime.config, "past")]


COMPACT_BELOW = 0.75
"""Finished sentences leave a beam search's buffers when the live ones are at most this part of them: it costs a copy."""


def _moved(tensors: Sequence[FloatArray], rows: IntArray) -> list[FloatArray]:
    """The `rows` of `tensors`, each [rows, ...], in the same memory: only those that change their place are copied."""
    places = np.arange(len(rows))
    moving = np.flatnonzero(rows != places)
    if len(moving):
        for tensor in tensors:
            tensor[moving] = tensor[rows[moving]]
    return [tensor[: len(rows)] for tensor in tensors]


class GreedyState:
    """A batch of which each row has its own cache."""

    def __init__(
        self,
        runtime: OrtCpuRuntime,
        cross: Sequence[FloatArray],
        src_len: NDArray[np.int32],
        *,
        attention: bool = False,
        listed: Listed | None = None,
    ):
        self._runtime, self._cross, self._src_len, self._filled = runtime, cross, src_len, 0
        self._attention, self._listed = attention, listed
        self._cache = runtime.layout.cache(runtime, len(src_len), runtime.layout.block)
        self._total = np.zeros(1, dtype=np.int32)
        self._unbind()

    def _unbind(self) -> None:
        self._bound: Step | None = None
        self._ranking: RankingStep | None = None

    @property
    def _step(self) -> Step:
        if self._bound is None:
            sizes = (self._cross, self._src_len, len(self._src_len))
            step = Step(self._runtime, "decoder_step", *sizes, attention=self._attention, listed=self._listed)
            step.binding.input("total", self._total)
            step.use(self._cache)
            self._bound = step
        return self._bound

    @property
    def rows(self) -> int:
        return len(self._src_len)

    @property
    def cross(self) -> list[FloatArray]:
        return list(self._cross)

    @property
    def attention(self) -> FloatArray:
        return _told(self._step.attention)

    def best(self, tokens: IntArray, count: int) -> Best:
        self._step.run(tokens, self._next_slot(), count)
        return self._step.best()

    def step(self, tokens: IntArray) -> FloatArray:
        self._step.wants_logits()
        self._step.run(tokens, self._next_slot())
        return self._step.logits()

    def argmax(self, tokens: IntArray, banned: Sequence[int]) -> Argmax:
        """The best token of each row that is not `banned`, with its logit, by the graph that tells no more."""
        if self._ranking is None:
            self._ranking = RankingStep(self._runtime, self._cross, self._src_len)
            self._ranking.binding.input("total", self._total)
            self._ranking.use(self._cache)
        return self._ranking.argmax(tokens, self._next_slot(), banned)

    def _next_slot(self) -> int:
        """Make room for one more token; its position."""
        _require_position(self._runtime, self._filled)
        if self._filled == self._cache[0].shape[2]:
            self._grow()
        self._filled += 1
        self._total[0] = self._filled
        return self._filled - 1

    def _grow(self) -> None:
        layout = self._runtime.layout
        steps = [step for step in (self._bound, self._ranking) if step is not None]
        for index, tensor in enumerate(self._cache):  # one by one, so that no two caches are in memory
            self._cache[index] = layout.tensor(self._runtime, self.rows, self._filled + layout.block, tensor)
            for step in steps:
                step.replace(index, self._cache[index])

    def select(self, rows: IntArray) -> GreedyState:
        self._cross, self._cache = _moved(self._cross, rows), _moved(self._cache, rows)
        self._src_len = self._src_len[rows]
        self._listed = self._listed and self._listed.of(rows)
        self._unbind()
        return self


class BeamState:
    """A batch of which the hypotheses of a sentence share a cache.

    `places` [sentences] are the places in the buffers of the sentences that are still searched; the others go on in vain.
    """

    def __init__(
        self,
        runtime: OrtCpuRuntime,
        cross: Sequence[FloatArray],
        src_len: NDArray[np.int32],
        beam: int,
        *,
        attention: bool = False,
        listed: Listed | None = None,
    ):
        self._runtime, self._beam, self._attention, self._listed = runtime, beam, attention, listed
        layout = runtime.layout
        self._position, self._room_until = 0, layout.room
        self._every = np.arange(beam)
        size = layout.slots(layout.room * beam)
        mask = np.zeros((len(src_len), 1, beam, size), dtype=bool)
        slot = np.zeros(len(src_len), dtype=np.int64)
        self._use(cross, src_len, layout.cache(runtime, len(src_len), size), mask, slot)

    def _use(
        self,
        cross: Sequence[FloatArray],
        src_len: NDArray[np.int32],
        cache: list[FloatArray],
        mask: NDArray[np.bool_],
        slot: IntArray,
    ) -> None:
        """Go on in these buffers, all of whose places are live and have their next free slot at `slot` [sentences]."""
        self._cross, self._src_len, self._cache, self._mask, self._slot = cross, src_len, cache, mask, slot
        self._places, self._in_order = np.arange(len(src_len)), True
        self._step: Step | None = None

    def _bind(self, width: int) -> Step:
        """The graph for steps that compute `width` hypotheses of each sentence."""
        sizes = (self._cross, self._src_len, (len(self._src_len), width))
        step = Step(self._runtime, "beam_step", *sizes, attention=self._attention, listed=self._listed)
        step.tokens.fill(self._runtime.config.bos_id)  # what places that are left go on reading
        step.binding.input("slot", self._slot)
        step.use(self._cache)
        self._step, self._width = step, width
        self._see(self._mask)
        return step

    def _see(self, mask: NDArray[np.bool_]) -> None:
        """Let each hypothesis see the slots of `mask` [places, 1, beam, slots]."""
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
        assert self._step is not None  # there is none of a step that was not run
        told, rows = _told(self._step.attention), self._rows()
        return told if rows is None else told[:, rows]

    def best(self, tokens: IntArray, count: int) -> Best:
        best, rows = self._run(tokens, count).best(), self._rows()
        return best if rows is None else Best(best.log_probs[rows], best.ids[rows])

    def step(self, tokens: IntArray) -> FloatArray:
        logits, rows = self._run(tokens).logits(), self._rows()
        return logits if rows is None else logits[rows]

    def _lie(self) -> IntArray | None:
        """Where the hypotheses that are searched lie in the buffers, [rows]; None for all in their order."""
        return None if self._in_order else (self._places[:, None] * self._beam + self._every).ravel()

    def _rows(self) -> IntArray | None:
        """The row of each hypothesis in the outputs of the last step; None for all in their order."""
        return self._lie() if self._width == self._beam else self._places.repeat(self._beam)

    def _run(self, tokens: IntArray, count: int | None = None) -> Step:
        """The graph after a step that tells the `count` best tokens, or else logits."""
        _require_position(self._runtime, self._position)
        if self._position == self._room_until:
            self._make_room()
        given = tokens.reshape(-1, self._beam)
        live, new = self._places[:, None], self._every
        if self._begins_alike(given):
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
            step.wants_logits()
        step.run(given[:, : self._width], self._position, count or 1)
        self._slot += self._beam
        self._position += 1
        return step

    def _begins_alike(self, tokens: IntArray) -> bool:
        """Whether one hypothesis is all that a step has to compute of each sentence with these `tokens` [sentences, beam].

        Not of a single sentence, where it would save less than the graph costs that is bound for it, and products of a
        single row may have other last bits, where they are ONNX Runtime's.
        """
        if self._position or len(self._places) == 1 or self._attention or not self._runtime.attends_by_row:
            return False
        return bool((tokens == tokens[:, :1]).all())

    def _make_room(self) -> None:
        """Go on in a cache without the slots that are in no hypothesis' past.

        When this is done, and where a sentence's slots lie then, depends on nothing but the step and the sentence: sums over
        slots in another arrangement have other last bits.
        """
        seen = self._mask[:, 0].any(axis=1)  # [batch, cache]
        count = seen.sum(axis=1)  # [batch]
        most = int(count.max())
        # Where all slots are seen, as with a beam of one, room for so few steps each time would be copied for too often.
        layout = self._runtime.layout
        steps = max(layout.room, self._position // 8)
        size = layout.slots(most + steps * self._beam)
        order = np.argsort(~seen, axis=1, kind="stable")[:, :most]  # the seen slots first, in their order
        places, heads, slots, head_dim = self._cache[0].shape
        # A tensor as [places * heads * slots, head_dim]: where what is seen lies in it, [places, heads, most].
        lies = np.arange(places * heads).reshape(places, heads, 1) * slots + order[:, None]
        moved = self._runtime.buffers.empty((*lies.shape, head_dim))
        for index, tensor in enumerate(self._cache):  # one by one, so that no two caches are in memory
            # Places are in range; "raise", which looks, makes one copy more.
            tensor.reshape(-1, head_dim).take(lies, axis=0, out=moved, mode="clip")
            self._cache[index] = layout.tensor(self._runtime, places, size, moved)
            if self._step is not None:
                self._step.replace(index, self._cache[index])
        mask = np.zeros((*self._mask.shape[:3], size), dtype=bool)
        mask[:, 0, :, :most] = self._mask[np.arange(places)[:, None, None], 0, self._every[:, None], order[:, None]]
        self._see(mask)
        self._slot[:] = count
        self._room_until += steps

    def select(self, rows: IntArray) -> BeamState:
        seen, lay = self._mask.reshape(-1, self._mask.shape[3]), self._lie()
        sentences = rows[:: self._beam] // self._beam
        some_left = len(sentences) < len(self._places)
        if some_left or (sentences != np.arange(len(sentences))).any():
            self._places = self._places[sentences]
            self._in_order = len(self._places) == len(self._src_len) and bool((np.diff(self._places) == 1).all())
        moved = seen[rows if lay is None else lay[rows]]
        if some_left:
            seen[...] = False  # those that are left see nothing more, so that they need no room
        lie = self._lie()
        seen[... if lie is None else lie] = moved
        if len(self._places) <= COMPACT_BELOW * len(self._src_len):
            cross, cache = _moved(self._cross, self._places), _moved(self._cache, self._places)
            self._listed = self._listed and self._listed.of(self._places)
            mask, slot = self._mask[self._places], self._slot[self._places]
            self._use(cross, self._src_len[self._places], cache, mask, slot)
        return self


def _told(attention: FloatArray | None) -> FloatArray:
    assert attention is not None, "encode was not asked for it"
    return attention


def _require_position(runtime: OrtCpuRuntime, position: int) -> None:
    most = runtime.config.max_target_length
    if position >= most:
        raise TfexportError(f"the model has {most} target positions, and no more. Use a smaller --max-length.")
