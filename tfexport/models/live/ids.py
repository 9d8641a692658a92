"""Ids to call a user's module with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tfexport.config import Side


@dataclass(frozen=True)
class Ids:
    """The ids of both sides."""

    pad: int
    special: frozenset[int]
    """The special ids, which a module may treat in its own way."""
    sizes: Mapping[Side, int]
    """The number of ids of each side; until its embedding is known, a number that it has at least."""

    def free(self, side: Side) -> Tensor:
        """The ids of a side that are not special, in order."""
        return torch.tensor([index for index in range(self.sizes[side]) if index not in self.special])

    def random(self, side: Side, shape: tuple[int, int], seed: int) -> Tensor:
        """Random ids [batch, length] that are not special; different ones within a row, if there are enough."""
        free, generator = self.free(side), torch.Generator().manual_seed(seed)
        if len(free) < shape[1]:
            return free[torch.randint(len(free), shape, generator=generator)]
        return torch.stack([free[torch.randperm(len(free), generator=generator)[: shape[1]]] for _ in range(shape[0])])

    def with_other_side(self, side: Side, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Sources and targets: `batch` [batch, length] on a side, and one token for each of its rows on the other."""
        if side == "encoder":
            return batch, torch.full((len(batch), 1), int(self.free("decoder")[0]))
        return torch.full((len(batch), 1), int(self.free("encoder")[0])), batch
