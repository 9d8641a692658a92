"""Tensors of the canonical model, made of pieces of other weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Piece:
    """Rows of a canonical tensor: elements of a parameter at regular distances."""

    name: str
    """The name of the parameter."""
    start: int
    """The element of the parameter, in order, that is the first one."""
    size: tuple[int, int]
    """Rows and columns; a vector has one column."""
    strides: tuple[int, int]
    """Elements from a row to the next, and from a column to the next."""

    def of(self, tensor: Tensor) -> Tensor:
        """The rows, from the parameter's value."""
        return tensor.contiguous().view(-1).as_strided(self.size, self.strides, self.start)

    def is_whole(self, tensor: Tensor) -> bool:
        """Whether the piece is all of the parameter, in its order."""
        return self.start == 0 and self.size[0] * self.size[1] == tensor.numel() and self.strides == (self.size[1], 1)


@dataclass(frozen=True)
class Made:
    """How a canonical tensor is made: pieces below each other, times a factor, with zeros up to its shape."""

    shape: tuple[int, ...]
    factor: float
    pieces: tuple[Piece, ...]
    """Empty for a tensor of zeros."""

    def of(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The tensor, from weights by name. The weight itself, if it is one piece in its order; float64 with a factor."""
        if not self.pieces:
            return torch.zeros(self.shape)
        rows = sum(piece.size[0] for piece in self.pieces)
        tensor = assembled(self.pieces, weights, (rows, self.pieces[0].size[1])[: len(self.shape)])
        missing = [
            size for axis in reversed(range(tensor.dim())) for size in (0, self.shape[axis] - tensor.shape[axis])
        ]
        tensor = F.pad(tensor, missing) if any(missing) else tensor
        return tensor if self.factor == 1.0 else tensor.double() * self.factor


def assembled(pieces: Sequence[Piece], weights: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    """A canonical tensor from its pieces. The parameter itself, if it is one piece in its order."""
    (first, *others) = pieces
    if not others and first.is_whole(weights[first.name]):
        return weights[first.name].reshape(shape)
    rows = [piece.of(weights[piece.name]) for piece in pieces]
    return (torch.cat(rows) if others else rows[0]).reshape(shape)  # one piece needs no copy
