"""Naive reference of the paper's own model: post-norm, sinusoidal positions, one embedding matrix used three times.

| name                                                           | shape             | what                           |
|----------------------------------------------------------------|-------------------|--------------------------------|
| `embedding.weight`                                             | [vocab, d]        | source, target and output      |
| `{encoder,decoder}.{i}.self_attention.{q,k,v,out}.{weight,bias}` | [d, d], [d]     | heads fused, head 0 first      |
| `decoder.{i}.cross_attention.{q,k,v,out}.{weight,bias}`        | [d, d], [d]       | q of the target, k, v of source |
| `{encoder,decoder}.{i}.feed_forward.inner.{weight,bias}`       | [ffn, d], [ffn]   | before the ReLU                |
| `{encoder,decoder}.{i}.feed_forward.outer.{weight,bias}`       | [d, ffn], [d]     | after it                       |
| `{encoder,decoder}.{i}.{self,ffn}_norm.{weight,bias}`          | [d]               | after the residual sum         |
| `decoder.{i}.cross_norm.{weight,bias}`                         | [d]               | likewise                       |

There is no output bias, no final norm and no table of positions. Dropout is left out: only evaluation is of interest.
"""

import math

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q = nn.Linear(d_model, d_model)
        self.k = nn.Linear(d_model, d_model)
        self.v = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, query: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        """query [batch, q, d], memory [batch, k, d], keep bool, broadcast to [batch, q, k] -> [batch, q, d]"""
        heads = []
        # One head after the other, as the paper writes it: each has its own d / heads columns of q, k and v.
        for q, k, v in zip(
            self.q(query).chunk(self.n_heads, dim=2),
            self.k(memory).chunk(self.n_heads, dim=2),
            self.v(memory).chunk(self.n_heads, dim=2),
            strict=True,
        ):
            scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[2])  # [batch, q, k]
            heads.append(torch.softmax(scores.masked_fill(~keep, -math.inf), dim=2) @ v)
        return self.out(torch.cat(heads, dim=2))


class FeedForward(nn.Module):
    def __init__(self, d_model: int, d_ffn: int) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_ffn)
        self.outer = nn.Linear(d_ffn, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d] -> [batch, length, d]"""
        return self.outer(torch.relu(self.inner(x)))


class EncoderLayer(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_ffn: int) -> None:
        super().__init__()
        self.self_attention = Attention(d_model, n_heads)
        self.self_norm = nn.LayerNorm(d_model, eps=1e-5)
        self.feed_forward = FeedForward(d_model, d_ffn)
        self.ffn_norm = nn.LayerNorm(d_model, eps=1e-5)

    def forward(self, x: Tensor, src_keep: Tensor) -> Tensor:
        """x [batch, src, d], src_keep bool [batch, 1, src] -> [batch, src, d]"""
        x = self.self_norm(x + self.self_attention(x, x, src_keep))
        return self.ffn_norm(x + self.feed_forward(x))


class DecoderLayer(EncoderLayer):
    def __init__(self, d_model: int, n_heads: int, d_ffn: int) -> None:
        super().__init__(d_model, n_heads, d_ffn)
        self.cross_attention = Attention(d_model, n_heads)
        self.cross_norm = nn.LayerNorm(d_model, eps=1e-5)

    def forward(self, x: Tensor, causal: Tensor, memory: Tensor, src_keep: Tensor) -> Tensor:
        """x [batch, tgt, d], causal bool [tgt, tgt], memory [batch, src, d] -> [batch, tgt, d]"""
        x = self.self_norm(x + self.self_attention(x, x, causal))
        x = self.cross_norm(x + self.cross_attention(x, memory, src_keep))
        return self.ffn_norm(x + self.feed_forward(x))


def sinusoids(length: int, d_model: int) -> Tensor:
    """[length, d] float32: column 2i is sin(position / 10000 ** (2i / d)), column 2i + 1 its cosine."""
    rates = 10000.0 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angles = torch.arange(length, dtype=torch.float64)[:, None] / rates  # [length, d / 2]
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1).float()


class BaseTransformer(nn.Module):
    def __init__(
        self,
        *,
        vocab: int,
        d_model: int,
        n_heads: int,
        d_ffn: int,
        n_encoder_layers: int,
        n_decoder_layers: int,
        max_len: int = 5000,
        pad_id: int = 1,
    ) -> None:
        super().__init__()
        self.max_len = max_len
        self.pad_id = pad_id
        self.embedding = nn.Embedding(vocab, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)  # it is the output matrix as well
        sizes = (d_model, n_heads, d_ffn)
        self.encoder = nn.ModuleList([EncoderLayer(*sizes) for _ in range(n_encoder_layers)])
        self.decoder = nn.ModuleList([DecoderLayer(*sizes) for _ in range(n_decoder_layers)])

    def embed(self, ids: Tensor) -> Tensor:
        """[batch, length] -> [batch, length, d]"""
        length, d_model = ids.shape[1], self.embedding.embedding_dim
        # The formula has no end; the limit makes this model refuse what the ones with a table refuse.
        if length > self.max_len:
            raise IndexError(f"{length} tokens, but max_len is {self.max_len}")
        return self.embedding(ids) * math.sqrt(d_model) + sinusoids(length, d_model)

    def forward(self, src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
        """src_ids [batch, src], tgt_ids [batch, tgt], int64 -> logits [batch, tgt, vocab]"""
        src_keep = (src_ids != self.pad_id)[:, None, :]
        # Pads at the end of a target are in the future of every real token, so the causal mask hides them.
        causal = torch.ones(tgt_ids.shape[1], tgt_ids.shape[1], dtype=torch.bool).tril()
        memory = self.embed(src_ids)
        for layer in self.encoder:
            memory = layer(memory, src_keep)
        x = self.embed(tgt_ids)
        for layer in self.decoder:
            x = layer(x, causal, memory, src_keep)
        return x @ self.embedding.weight.T
