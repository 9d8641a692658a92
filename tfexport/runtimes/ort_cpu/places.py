"""Sentences of several ages in the same buffers: how far each is, and how buffers get more rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.runtimes.base import FloatArray, IntArray
from tfexport.runtimes.ort_cpu.context import Context

Array = TypeVar("Array", bound=NDArray[Any])

NEVER = np.iinfo(np.int64).max
"""The step at which an idle place needs room."""

SOURCE_BLOCK = 16
"""Source ids by which cross keys and values grow when a longer sentence joins."""


@dataclass
class Ages:
    """How far the sentences at each place of a beam search are."""

    position: IntArray
    """[places], of the next token."""
    room_until: IntArray
    """[places]: the position at which the cache is full."""
    per_step: IntArray
    """[places]: 1; 0 of an idle place, which stays at position 0."""
    longest: int = 0
    """The largest position."""
    room_left: int = 0
    """Steps until a cache is full."""

    @classmethod
    def first(cls, places: int, room: int) -> Ages:
        """Of sentences that begin, with room for so many steps."""
        none = np.zeros(places, dtype=np.int64)
        return cls(none, none + room, none + 1, 0, room)

    def advance(self) -> None:
        """A step was run."""
        self.position = self.position + self.per_step
        self.longest += 1
        self.room_left -= 1

    def due(self) -> IntArray:
        """The places whose cache is full."""
        return np.flatnonzero(self.position == self.room_until)

    def give_room(self, places: IntArray, steps: IntArray) -> None:
        """The caches of these places have room for more `steps`."""
        self.room_until[places] += steps
        self._note()

    def begin(self, places: IntArray, room: int) -> None:
        """Other sentences begin at these places."""
        self.position[places], self.room_until[places], self.per_step[places] = 0, room, 1
        self._note()

    def idle(self, places: IntArray) -> None:
        """Nobody is at these places any more."""
        self.position[places], self.room_until[places], self.per_step[places] = 0, NEVER, 0
        self._note()

    def with_places(self, places: int) -> Ages:
        """With idle places after the others."""
        position, room, per_step = (with_rows(one, places) for one in (self.position, self.room_until, self.per_step))
        more = Ages(position, room, per_step)
        more.idle(np.arange(len(self.position), places))
        return more

    def select(self, places: IntArray) -> Ages:
        """Of these places alone."""
        some = Ages(self.position[places], self.room_until[places], self.per_step[places])
        some._note()
        return some

    def _note(self) -> None:
        self.longest = int(self.position.max(initial=0))
        self.room_left = int((self.room_until - self.position).min(initial=NEVER))


def room_for(rows: int) -> int:
    """The rows of buffers that have to grow for `rows`: some more, so that they do not grow for each sentence that joins."""
    return rows + rows // 2


def with_rows(array: Array, rows: int) -> Array:
    """`array` [less, ...] with zeros up to [rows, ...]."""
    more: Array = np.zeros((rows, *array.shape[1:]), dtype=array.dtype)  # type: ignore[assignment]
    more[: len(array)] = array
    return more


def first_rows(tensors: Sequence[FloatArray], rows: int) -> list[FloatArray]:
    """The part of buffers that is in use."""
    return [tensor[:rows] for tensor in tensors]


def widened(context: Context, tensors: Sequence[FloatArray], rows: int, source: int) -> list[FloatArray]:
    """Cross keys and values [rows, heads, src, head_dim] in buffers for more rows and for longer sources."""
    had, heads, src, head_dim = tensors[0].shape
    rows = had if rows <= had else room_for(rows)
    source = src if source <= src else -(-source // SOURCE_BLOCK) * SOURCE_BLOCK
    found = []
    for tensor in tensors:
        more = context.buffers.empty((rows, heads, source, head_dim))
        more[:had, :, :src] = tensor
        # Without kernels the graph reads them with a weight of 0, and 0 * NaN is NaN.
        more[had:] = 0.0
        more[:had, :, src:] = 0.0
        found.append(more)
    return found


def write_rows(tensors: Sequence[FloatArray], places: IntArray, others: Sequence[FloatArray]) -> None:
    """Write what `others` [places, heads, src, head_dim] hold to these places of `tensors`, whose sources may be longer."""
    for tensor, other in zip(tensors, others, strict=True):
        tensor[places, :, : other.shape[2]] = other


def take_in_place(tensors: Sequence[FloatArray], rows: IntArray) -> None:
    """Let the first rows of `tensors`, each [rows, ...], be these `rows` of them. Rows that stay where they are, are not
    copied."""
    places = np.arange(len(rows))
    moving = np.flatnonzero(rows != places)
    if len(moving):
        for tensor in tensors:
            tensor[moving] = tensor[rows[moving]]


def require_position(config: ModelConfig, position: int) -> None:
    most = config.max_target_length
    if position >= most:
        raise TfexportError(f"the model has {most} target positions, and no more. Use a smaller --max-length.")
