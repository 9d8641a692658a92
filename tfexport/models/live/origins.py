"""Finds which parameters a canonical tensor is made of, element by element.

Before a module is read, each element of its parameters gets a random float64 number whose lowest bits are the number of that
element (`tag`). Copies keep those bits, through any reshaping, so a canonical tensor tells where its elements come from. A
tensor that arithmetic changed, such as that of weight norm, has other bits, and is recognised by that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tfexport.models.pieces import Piece

_BITS = 36
_MASK = (1 << _BITS) - 1
_MOST_PIECES = 4096


@dataclass(frozen=True)
class Tags:
    """The parameters of a module whose elements have their own numbers."""

    names: Sequence[str]
    parameters: Sequence[Tensor]
    starts: Tensor
    """The number of the first element of each parameter, in order."""

    def pieces_of(self, tensor: Tensor) -> list[Piece] | None:
        """The pieces that a canonical tensor [rows, columns] or [rows] consists of; None if arithmetic changed it."""
        matrix = tensor[:, None] if tensor.dim() == 1 else tensor
        firsts = self._numbers(matrix[:, 0])
        step = int(self._numbers(matrix[:1, 1])[0] - firsts[0]) if matrix.shape[1] > 1 else 1
        if int(firsts.max()) >= self._end or step < 0:
            return None
        owners = torch.searchsorted(self.starts, firsts, right=True) - 1
        pieces: list[Piece] = []
        for start, end in _runs(firsts, owners):
            if len(pieces) == _MOST_PIECES:
                return None
            owner = int(owners[start])
            parameter = self.parameters[owner]
            row_step = int(firsts[start + 1] - firsts[start]) if end - start > 1 else matrix.shape[1] * step
            first = int(firsts[start] - self.starts[owner])
            piece = Piece(self.names[owner], first, (end - start, matrix.shape[1]), (row_step, step))
            last = first + (end - start - 1) * row_step + (matrix.shape[1] - 1) * step
            if row_step < 0 or last >= parameter.numel() or not torch.equal(piece.of(parameter), matrix[start:end]):
                return None
            pieces.append(piece)
        return pieces

    def _numbers(self, values: Tensor) -> Tensor:
        return values.contiguous().view(torch.int64) & _MASK

    @property
    def _end(self) -> int:
        return int(self.starts[-1]) + self.parameters[-1].numel()


def _runs(firsts: Tensor, owners: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of rows of one parameter at equal distances."""
    steps = firsts.diff()
    same = owners.diff() == 0
    start, count = 0, len(firsts)
    # Rows where the distance to the next one differs from that of the row before.
    while start < count:
        end = start + 1
        if end < count and bool(same[start]):
            differs = (steps[start:] != steps[start]) | ~same[start:]
            places = differs.nonzero()
            end = count if len(places) == 0 else start + int(places[0]) + 1
        yield start, end
        start = end


def tag(module: nn.Module, seed: int = 0) -> Tags:
    """Give each element of a float64 module's parameters a random number that names it. Shared parameters stay shared.

    Matrices keep the size of states (LeCun et al. 1998); the elements of vectors are between 0.5 and 1.5, of either sign.
    """
    generator = torch.Generator().manual_seed(seed)
    names, parameters, starts, seen, end = [], [], [], set(), 0
    for name, parameter in module.named_parameters():
        key = parameter.untyped_storage().data_ptr(), parameter.storage_offset()
        if not parameter.is_floating_point() or key in seen or parameter.numel() == 0:
            continue
        seen.add(key)
        with torch.no_grad():
            if parameter.dim() > 1:
                width = (3 / max(1, parameter[0].numel())) ** 0.5
                parameter.uniform_(-width, width, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
                if parameter.numel() > 1:  # a single number may be a factor, which is positive
                    parameter.mul_(torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1)
            bits = parameter.data.view(-1).view(torch.int64) if parameter.dim() else parameter.data.view(torch.int64)
            for start in range(0, max(1, parameter.numel()), 2**20):
                part = bits[start : start + 2**20] if bits.dim() else bits
                part.bitwise_and_(~_MASK)
                part.bitwise_or_(torch.arange(end + start, end + start + part.numel()).view(part.shape))
        names.append(name)
        parameters.append(parameter.detach())
        starts.append(end)
        end += parameter.numel()
    return Tags(names, parameters, torch.tensor(starts))
