"""A model as one may write it: pre-norm, GELU, learned positions, normed embeddings, one Linear for q, k and v, tied."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD, BOS, EOS = 0, 1, 2


class Attention(nn.Module):
    """Of a sequence to itself, or to the memory of the encoder."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        q, _, _ = self.qkv(x).chunk(3, dim=-1)
        _, k, v = self.qkv(memory).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, *, cross: bool):
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(d, eps=1e-6), Attention(d, heads)
        self.ln2, self.cross = (nn.LayerNorm(d, eps=1e-6), Attention(d, heads)) if cross else (None, None)
        self.ln3 = nn.LayerNorm(d, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(
        self, x: Tensor, mask: Tensor, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        inner = self.ln1(x)
        x = x + self.attn(inner, inner, mask)
        if self.cross is not None:
            x = x + self.cross(self.ln2(x), memory, memory_mask)
        return x + self.mlp(self.ln3(x))


class MyModel(nn.Module):
    """`forward` is teacher forcing: the whole target at once, or a prefix of it anew for every token."""

    def __init__(self, *, src_vocab: int, tgt_vocab: int, d: int, heads: int, layers: int, max_len: int):
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(src_vocab, d), nn.Embedding(tgt_vocab, d)
        self.src_pos, self.tgt_pos = nn.Embedding(max_len, d), nn.Embedding(max_len, d)
        self.encoder_embed_ln, self.decoder_embed_ln = nn.LayerNorm(d, eps=1e-6), nn.LayerNorm(d, eps=1e-6)
        self.encoder = nn.ModuleList(Block(d, heads, cross=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(d, heads, cross=True) for _ in range(layers))
        self.encoder_ln, self.decoder_ln = nn.LayerNorm(d, eps=1e-6), nn.LayerNorm(d, eps=1e-6)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """`src` [batch, src] and `tgt` [batch, tgt], padded with PAD, to logits [batch, tgt, vocab]."""
        real = (src != PAD)[:, None, None]
        x = self.encoder_embed_ln(self.src_embed(src) + self.src_pos.weight[: src.shape[1]])
        for block in self.encoder:
            x = block(x, real)
        memory = self.encoder_ln(x)
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        y = self.decoder_embed_ln(self.tgt_embed(tgt) + self.tgt_pos.weight[: tgt.shape[1]])
        for block in self.decoder:
            y = block(y, causal, memory, real)
        return self.decoder_ln(y) @ self.tgt_embed.weight.T
