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
    start: int | None = None
    """The first id of each target, if forward fixes it."""

    def free(self, side: Side) -> Tensor:
        """The ids of a side that are not special, in order."""
        every = torch.arange(self.sizes[side])
        return every[~torch.isin(every, torch.tensor(sorted(self.special)))]

    def random(self, side: Side, shape: tuple[int, int], seed: int) -> Tensor:
        """Random ids [batch, length] that are not special; different ones within a row, if there are enough."""
        free, generator = self.free(side), torch.Generator().manual_seed(seed)
        if len(free) < shape[1]:
            return self.with_start(side, free[torch.randint(len(free), shape, generator=generator)])
        rows = [free[torch.randperm(len(free), generator=generator)[: shape[1]]] for _ in range(shape[0])]
        return self.with_start(side, torch.stack(rows))

    def with_start(self, side: Side, batch: Tensor) -> Tensor:
        """The batch [batch, length], changed so that each row has the first id that forward fixes, if there is one."""
        if side == "decoder" and self.start is not None:
            batch[:, 0] = self.start
        return batch

    def with_other_side(self, side: Side, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Sources and targets: `batch` [batch, length] on a side, and one token for each of its rows on the other."""
        if side == "encoder":
            return batch, self.with_start("decoder", torch.full((len(batch), 1), int(self.free("decoder")[0])))
        return torch.full((len(batch), 1), int(self.free("encoder")[0])), batch
