"""An independent model: a gated feed-forward of one fused matrix, RMSNorm, more heads in the encoder, no positions."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD = 1


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight


class Attention(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        mixed = []
        size = x.shape[-1] // self.heads
        for start, end in pairwise(range(0, x.shape[-1] + 1, size)):
            q, k, v = self.q(x)[..., start:end], self.k(memory)[..., start:end], self.v(memory)[..., start:end]
            scores = (q @ k.mT / size**0.5).masked_fill(~mask, float("-inf"))
            mixed.append(scores.softmax(-1) @ v)
        return self.o(torch.cat(mixed, -1))


class FeedForward(nn.Module):
    """`w13` is the activated half and the factor, one after the other."""

    def __init__(self, d: int, hidden: int, *, bias: bool):
        super().__init__()
        self.w13, self.w2 = nn.Linear(d, 2 * hidden, bias=bias), nn.Linear(hidden, d, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        activated, factor = self.w13(x).chunk(2, -1)
        return self.w2(F.silu(activated) * factor)


class Layer(nn.Module):
    def __init__(self, d: int, hidden: int, heads: int, *, bias: bool, cross: bool):
        super().__init__()
        self.attn, self.attn_norm = Attention(d, heads), Norm(d)
        self.cross, self.cross_norm = (Attention(d, heads), Norm(d)) if cross else (None, None)
        self.mlp, self.mlp_norm = FeedForward(d, hidden, bias=bias), Norm(d)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, real: Tensor | None = None) -> Tensor:
        inner = self.attn_norm(x)
        x = x + self.attn(inner, inner, mask)
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x), memory, real)
        return x + self.mlp(self.mlp_norm(x))


class Fused(nn.Module):
    """Pre-norm; a final norm in the decoder alone."""

    def __init__(self, vocab: int, d: int, hidden: int, heads: int, encoder_heads: int, *, bias: bool):
        super().__init__()
        self.src, self.tgt, self.out = nn.Embedding(vocab, d), nn.Embedding(vocab, d), nn.Linear(d, vocab)
        self.enc = nn.ModuleList(Layer(d, hidden, encoder_heads, bias=bias, cross=False) for _ in range(2))
        self.dec = nn.ModuleList(Layer(d, hidden, heads, bias=bias, cross=True) for _ in range(2))
        self.norm = Norm(d)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        real = (src != PAD)[:, None]
        x, y = self.src(src), self.tgt(tgt)
        for layer in self.enc:
            x = layer(x, real)
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        for layer in self.dec:
            y = layer(y, causal, x, real)
        return self.out(self.norm(y))
