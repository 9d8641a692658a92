"""The position tables of a module: rows of a parameter or a buffer, or what its forward computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tfexport.config import Side
from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.fits import is_close
from tfexport.models.live.ids import Ids
from tfexport.models.live.origins import Tags
from tfexport.models.live.recording import Call, record_steps
from tfexport.models.live.streams import Embedding, rows_of
from tfexport.models.pieces import Piece

SHORT = 7
"""Length of a sequence whose positions must be the first ones of a longer one."""


@dataclass(frozen=True)
class PositionRows:
    """The rows of a stored table, from the first one that the forward reads."""

    piece: Piece

    @property
    def count(self) -> int:
        return self.piece.size[0]


def stored_rows(module: nn.Module, tags: Tags, embedding: Embedding) -> PositionRows | None:
    """The stored table that a stack adds to its embeddings; None if its forward computes one, or adds nothing."""
    rows = embedding.constant
    if rows is None:
        return None
    length, d_model = rows.shape
    for name, start, table in _candidates(module, tags, rows):
        if torch.equal(table[start : start + length], rows):
            piece = Piece(name, start * d_model, (len(table) - start, d_model), (d_model, 1))
            return PositionRows(piece)
    return None


def _candidates(module: nn.Module, tags: Tags, rows: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """Tables [positions, d_model], by name, and the row of each that may be the first one of `rows`."""
    d_model = rows.shape[1]
    for piece in (tags.pieces_of(rows) or [])[:1]:
        values = dict(module.named_parameters())[piece.name].detach()
        if piece.strides == (d_model, 1) and piece.start % d_model == 0:
            yield piece.name, piece.start // d_model, values.reshape(-1, d_model)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.dim() and buffer.shape[-1] == d_model:
            table = buffer.reshape(-1, d_model)
            for start in (table == rows[0]).all(1).nonzero().flatten().tolist():
                yield name, start, table


def position_table(
    call: Call,
    side: Side,
    embedding: Embedding,
    stored: PositionRows | None,
    length: int,
    ids: Ids,
    values: Mapping[str, Tensor],
) -> Tensor | None:
    """The position vectors [length, d_model]; None if the stack adds none.

    Args:
        values: the module's parameters and buffers.

    Raises:
        NotCanonical: they depend on the length of the sequence.
    """
    if stored is not None:
        table = stored.piece.of(values[stored.piece.name])[:length]
        return table if embedding.factor == 1.0 else table.double() * embedding.factor
    if bool((embedding.positions == 0).all()):
        return None
    added, beginning = (_added(call, side, embedding, size, ids) for size in (length, min(length, SHORT)))
    if added is None or beginning is None or not is_close(added[: len(beginning)], beginning):
        raise NotCanonical("positions depend on the length of the sequence", embedding.node.place)
    return added


def _added(call: Call, side: Side, embedding: Embedding, length: int, ids: Ids) -> Tensor | None:
    """The sum that a stack adds to the embeddings of `length` tokens [length, d_model], with the current parameters."""
    tokens = ids.random(side, (1, length), 9)
    node = record_steps(call, *ids.with_other_side(side, tokens), side, embedding.step + 1)[-1]
    states = rows_of(node.value, embedding.values.shape[1])
    return None if states is None or len(states) != length else states - embedding.scale * embedding.table[tokens[0]]
