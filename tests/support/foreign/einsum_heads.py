"""Attention by einsum over weights [d, heads, head size], softmax in float32, RMS norms, a gated feed-forward, no biases."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD = 0


class EinsumAttention(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(d, heads, d // heads) * d**-0.5) for _ in range(3))
        self.w_o = nn.Parameter(torch.randn(heads, d // heads, d) * d**-0.5)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        q = torch.einsum("btd,dhk->bhtk", x, self.w_q)
        k, v = (torch.einsum("bsd,dhk->bhsk", memory, w) for w in (self.w_k, self.w_v))
        scores = torch.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask, float("-inf")).float().softmax(-1).type_as(v)
        return torch.einsum("bhts,bhsk,hkd->btd", weights, v, self.w_o)


class Gated(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Linear(*sizes, bias=False) for sizes in ((d, 2 * d), (d, 2 * d), (2 * d, d)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, d: int, heads: int, *, cross: bool):
        super().__init__()
        self.attention, self.cross = EinsumAttention(d, heads), EinsumAttention(d, heads) if cross else None
        self.mlp = Gated(d)
        self.norms = nn.ModuleList(nn.RMSNorm(d, eps=1e-6) for _ in range(3 if cross else 2))

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, real: Tensor | None = None) -> Tensor:
        inner = self.norms[0](x)
        x = x + self.attention(inner, inner, mask)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory, real)
        return x + self.mlp(self.norms[-1](x))


class EinsumHeads(nn.Module):
    def __init__(self, *, src_vocab: int, tgt_vocab: int, d: int, heads: int, layers: int, max_len: int):
        super().__init__()
        self.src, self.tgt = nn.Embedding(src_vocab, d), nn.Embedding(tgt_vocab, d)
        self.src_pos, self.tgt_pos = (nn.Parameter(torch.randn(1, max_len, d)) for _ in range(2))
        self.enc = nn.ModuleList(Layer(d, heads, cross=False) for _ in range(layers))
        self.dec = nn.ModuleList(Layer(d, heads, cross=True) for _ in range(layers))
        self.enc_norm, self.dec_norm = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        real = (src != PAD)[:, None, None]
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        x = self.src(src) + self.src_pos[:, : src.shape[1]]
        for layer in self.enc:
            x = layer(x, real)
        x, y = self.enc_norm(x), self.tgt(tgt) + self.tgt_pos[:, : tgt.shape[1]]
        for layer in self.dec:
            y = layer(y, causal, x, real)
        return self.dec_norm(y) @ self.tgt.weight.T
