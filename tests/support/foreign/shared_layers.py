"""One layer a side, run several times, and one embedding for everything. Pre-norm, GELU, learned positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD, STEPS = 0, 2


class Heads(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.proj = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        k, v = self.kv(memory).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """`pre` norms the input of both attentions."""

    def __init__(self, d: int, heads: int, *, cross: bool):
        super().__init__()
        self.pre, self.pre_ff = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn, self.cross = Heads(d, heads), Heads(d, heads) if cross else None
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, real: Tensor | None = None) -> Tensor:
        inner = self.pre(x)
        x = x + self.attn(inner, inner, mask)
        if self.cross is not None:
            x = x + self.cross(self.pre(x), memory, real)
        return x + self.down(F.gelu(self.up(self.pre_ff(x))))


class SharedLayers(nn.Module):
    def __init__(self, *, vocab: int, d: int, heads: int, max_len: int):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.enc, self.dec = Layer(d, heads, cross=False), Layer(d, heads, cross=True)
        self.last = nn.LayerNorm(d)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        real = (src != PAD)[:, None, None]
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        x, y = (self.words(ids) + self.places.weight[: ids.shape[1]] for ids in (src, tgt))
        for _ in range(STEPS):
            x = self.enc(x, real)
        x = self.last(x)
        for _ in range(STEPS):
            y = self.dec(y, causal, x, real)
        return self.last(y) @ self.words.weight.T
