"""Buffers of a batch that sentences join at different steps: the position of each sentence, and buffers that grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.runtimes.ort_cpu.context import Context
from tfexport.runtimes.outputs import FloatArray, IntArray

Array = TypeVar("Array", bound=NDArray[Any])

NEVER = np.iinfo(np.int64).max
"""The step at which an idle place needs room."""

SOURCE_BLOCK = 16
"""Source ids by which cross keys and values grow when a longer sentence joins."""


@dataclass
class Positions:
    """The position of the sentence at each place of a beam search, and the room in its cache."""

    position: IntArray
    """The position of the next token, [places]."""
    room_until: IntArray
    """The position at which the cache is full, [places]."""
    per_step: IntArray
    """The positions that a step adds, [places]: 1, or 0 at an idle place, which stays at position 0."""
    longest: int = 0
    """The largest position."""
    room_left: int = 0
    """Steps until a cache is full."""

    @classmethod
    def first(cls, places: int, room: int) -> Positions:
        """The positions of sentences that begin, with room for `room` steps."""
        none = np.zeros(places, dtype=np.int64)
        return cls(none, none + room, none + 1, 0, room)

    def advance(self) -> None:
        """Move on by one step."""
        self.position = self.position + self.per_step
        self.longest += 1
        self.room_left -= 1

    def due(self) -> IntArray:
        """The places whose cache is full."""
        return np.flatnonzero(self.position == self.room_until)

    def give_room(self, places: IntArray, steps: IntArray) -> None:
        """Add room for `steps` [places] to the caches of these places."""
        self.room_until[places] += steps
        self._note()

    def begin(self, places: IntArray, room: int) -> None:
        """Begin other sentences at these places, with room for `room` steps."""
        self.position[places] = 0
        self.room_until[places] = room
        self.per_step[places] = 1
        self._note()

    def idle(self, places: IntArray) -> None:
        """Mark these places as idle."""
        self.position[places] = 0
        self.room_until[places] = NEVER
        self.per_step[places] = 0
        self._note()

    def with_places(self, places: int) -> Positions:
        """A copy with idle places after the others, `places` in all."""
        position, room_until = with_rows(self.position, places), with_rows(self.room_until, places)
        more = Positions(position, room_until, with_rows(self.per_step, places))
        more.idle(np.arange(len(self.position), places))
        return more

    def select(self, places: IntArray) -> Positions:
        """The positions of these places alone."""
        some = Positions(self.position[places], self.room_until[places], self.per_step[places])
        some._note()
        return some

    def _note(self) -> None:
        self.longest = int(self.position.max(initial=0))
        self.room_left = int((self.room_until - self.position).min(initial=NEVER))


def room_for(rows: int) -> int:
    """The number of rows to allocate for `rows`: half as many more, so that few joining sentences make buffers grow."""
    return rows + rows // 2


def with_rows(array: Array, rows: int) -> Array:
    """A copy of an array [places, ...] with zeros after it, up to `rows` places."""
    more: Array = np.zeros((rows, *array.shape[1:]), dtype=array.dtype)  # type: ignore[assignment]
    more[: len(array)] = array
    return more


def first_rows(tensors: Sequence[FloatArray], rows: int) -> list[FloatArray]:
    """The first `rows` rows of each tensor, as views."""
    return [tensor[:rows] for tensor in tensors]


def widened(context: Context, tensors: Sequence[FloatArray], rows: int, source: int) -> list[FloatArray]:
    """Cross keys and values [rows, heads, src, head_dim], copied to buffers for more `rows` and for longer sources."""
    had, heads, src, head_dim = tensors[0].shape
    rows = had if rows <= had else room_for(rows)
    source = src if source <= src else -(-source // SOURCE_BLOCK) * SOURCE_BLOCK
    buffers = []
    for tensor in tensors:
        more = context.buffers.empty((rows, heads, source, head_dim))
        more[:had, :, :src] = tensor
        # Without kernels the rest is read with a weight of 0, and 0 * NaN is NaN.
        more[had:] = 0.0
        more[:had, :, src:] = 0.0
        buffers.append(more)
    return buffers


def write_rows(tensors: Sequence[FloatArray], places: IntArray, others: Sequence[FloatArray]) -> None:
    """Copy `others` [places, heads, src, head_dim] to these places of `tensors`, whose sources may be longer."""
    for tensor, other in zip(tensors, others, strict=True):
        tensor[places, :, : other.shape[2]] = other


def take_in_place(tensors: Sequence[FloatArray], rows: IntArray) -> None:
    """Move these `rows` of `tensors`, each [rows, ...], to their first rows, in place. Rows that stay are not copied."""
    places = np.arange(len(rows))
    moving = np.flatnonzero(rows != places)
    if len(moving):
        for tensor in tensors:
            tensor[moving] = tensor[rows[moving]]


def require_position(config: ModelConfig, position: int) -> None:
    """Raises: TfexportError if the model has no such `position`."""
    most = config.max_target_length
    if position >= most:
        raise TfexportError(f"the model has {most} target positions, and no more. Use a smaller --max-length.")
