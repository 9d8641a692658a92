"""Every sublayer is a residual block, and all blocks of a side stand in one list. Post-norm, ReLU, sinusoids."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

PAD = 0


class MultiHead(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            w(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for w, t in ((self.wq, x), (self.wk, memory), (self.wv, memory))
        )
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One sublayer and its norm."""

    def __init__(self, inner: nn.Module, d: int):
        super().__init__()
        self.inner, self.norm = inner, nn.LayerNorm(d)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return self.norm(x + self.inner(x, *given))


def feed_forward(d: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d, 3 * d), nn.ReLU(), nn.Linear(3 * d, d))


class FlatList(nn.Module):
    def __init__(self, *, src_vocab: int, tgt_vocab: int, d: int, heads: int, layers: int, max_len: int):
        super().__init__()
        self.emb = nn.ModuleList([nn.Embedding(src_vocab, d), nn.Embedding(tgt_vocab, d)])
        angle = torch.arange(max_len)[:, None] * 10000 ** (-torch.arange(0, d, 2) / d)
        self.register_buffer("pos", torch.stack([angle.sin(), angle.cos()], -1).flatten(1))
        self.enc = nn.ModuleList()
        self.dec = nn.ModuleList()
        for _ in range(layers):
            self.enc += [Block(MultiHead(d, heads), d), Block(feed_forward(d), d)]
            self.dec += [Block(MultiHead(d, heads), d), Block(MultiHead(d, heads), d), Block(feed_forward(d), d)]
        self.head = nn.Linear(d, tgt_vocab)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        real = (src != PAD)[:, None, None]
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        x, y = (
            e(ids) * math.sqrt(self.pos.shape[1]) + self.pos[: ids.shape[1]]
            for e, ids in zip(self.emb, (src, tgt), strict=True)
        )
        for attention, mlp in zip(self.enc[0::2], self.enc[1::2], strict=True):
            x = mlp(attention(x, x, real))
        for attention, cross, mlp in zip(self.dec[0::3], self.dec[1::3], self.dec[2::3], strict=True):
            y = mlp(cross(attention(y, y, causal), x, real))
        return self.head(y)
