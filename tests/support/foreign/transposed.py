"""Matrices [in, out], as GPT-2 has them, sinusoids with all sines first, and one norm for all sublayers of a layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD = 0


class Matrix(nn.Module):
    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(n_in, n_out) * n_in**-0.5), nn.Parameter(torch.randn(n_out) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.b


class Attend(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = Matrix(d, 3 * d), Matrix(d, d)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        q, (_, k, v) = self.c_attn(x).chunk(3, -1)[0], self.c_attn(memory).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, d: int, heads: int, *, cross: bool):
        super().__init__()
        self.attn, self.cross, self.norm = Attend(d, heads), Attend(d, heads) if cross else None, nn.LayerNorm(d)
        self.c_fc, self.c_out = Matrix(d, 4 * d), Matrix(4 * d, d)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, real: Tensor | None = None) -> Tensor:
        x = self.norm(x + self.attn(x, x, mask))
        if self.cross is not None:
            x = self.norm(x + self.cross(x, memory, real))
        return self.norm(x + self.c_out(F.relu(self.c_fc(x))))


def positions(length: int, d: int) -> Tensor:
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(d // 2) * (-math.log(10000) / (d // 2)))
    return torch.cat([angle.sin(), angle.cos()], -1)


class Transposed(nn.Module):
    def __init__(self, *, src_vocab: int, tgt_vocab: int, d: int, heads: int, layers: int):
        super().__init__()
        self.wte, self.wte_out = nn.Embedding(src_vocab, d), nn.Embedding(tgt_vocab, d)
        self.h_enc = nn.ModuleList(Layer(d, heads, cross=False) for _ in range(layers))
        self.h_dec = nn.ModuleList(Layer(d, heads, cross=True) for _ in range(layers))
        self.lm = Matrix(d, tgt_vocab)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        real = (src != PAD)[:, None, None]
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        x, y = (e(ids) + positions(ids.shape[1], e.embedding_dim) for e, ids in ((self.wte, src), (self.wte_out, tgt)))
        for layer in self.h_enc:
            x = layer(x, real)
        for layer in self.h_dec:
            y = layer(y, causal, x, real)
        return self.lm(y)
