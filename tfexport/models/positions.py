"""Positions of tokens: tables of position vectors, and biases of relative positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.config import ModelConfig, Side


def sinusoids(n_positions: int, d_model: int) -> Tensor:
    """Sinusoidal position table [n_positions, d_model] (Vaswani et al. 2017, section 3.5): even columns sin, odd cos."""
    # Computed in float64: at position 5000, float32 angles are already wrong in the fourth decimal.
    position = torch.arange(n_positions, dtype=torch.float64)[:, None]
    frequency = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model))
    table = torch.zeros(n_positions, d_model, dtype=torch.float64)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency)[:, : d_model // 2]
    return table.float()


def tensor2tensor_sinusoids(n_positions: int, d_model: int, pad_id: int) -> Tensor:
    """tensor2tensor's sinusoids, whose lowest frequency is exactly 1 / 10000. The first rows belong to padding.

    Computed in float32, as in the models' own library: at position 1000 the difference is in the fourth decimal.
    """
    half = d_model // 2
    frequency = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(pad_id + 1, pad_id + 1 + n_positions).float()[:, None] * frequency
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.nn.functional.pad(table, (0, d_model % 2))


def halved_sinusoids(n_positions: int, d_model: int) -> Tensor:
    """The columns of `sinusoids` in another order: first all sin, then all cos."""
    table = sinusoids(n_positions, d_model)
    return torch.cat([table[:, 0::2], table[:, 1::2]], dim=1)


COMPUTED: Mapping[str, Callable[[int, int], Tensor]] = {
    "sinusoidal": sinusoids,
    "sinusoidal-halves": halved_sinusoids,
    # Row 0 is position 0; `position_offset` gives the first row that tokens use, as fairseq's pad_id + 1.
    "sinusoidal-t2t": partial(tensor2tensor_sinusoids, pad_id=-1),
}
"""Position tables [positions, d_model] that code computes, by the value of `--positions`."""


class PositionTable(nn.Module):
    """Position vectors [max_length + offset, d_model]: a parameter if learned, else a buffer."""

    def __init__(self, config: ModelConfig, max_length: int):
        super().__init__()
        self.offset = config.position_offset
        n_positions = max_length + self.offset
        self.table: Tensor
        if config.positions == "learned":
            self.table = nn.Parameter(torch.zeros(n_positions, config.d_model))
        else:
            # A computed table is also saved with the weights, so that no other library has to compute it again.
            table = torch.empty(n_positions, config.d_model)
            # A meta table is not copied: PyTorch would import its compiler for it.
            self.register_buffer("table", table if table.is_meta else sinusoids(n_positions, config.d_model))

    def forward(self, position: Tensor) -> Tensor:
        return F.embedding(position + self.offset, self.table)


class DistanceTable(nn.Module):
    """The bias of relative positions, [distances, heads], for the scores of all self-attention layers of a stack.

    Row d of the decoder is for a key d tokens before the query. Row 0 of the encoder is for the furthest key after it.
    """

    def __init__(self, config: ModelConfig, side: Side):
        super().__init__()
        is_encoder = side == "encoder"
        self.most, self.least = config.max_distance, -config.max_distance if is_encoder else 0
        heads = config.encoder_heads if is_encoder else config.n_heads
        self.table = nn.Parameter(torch.zeros(self.most - self.least + 1, heads))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The bias [.., heads, queries, keys] for positions of queries [.., queries] and keys [keys]."""
        distance = queries[..., :, None] - keys
        return self.table[distance.clamp(self.least, self.most) - self.least].movedim(-1, -3)
