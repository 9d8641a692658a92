"""Naive reference of the `per-head` family: one Linear triple per head, convolutions as feed-forward, masks of -inf.

Pre-norm with **one** LayerNorm shared by all the sublayers of a layer, and the target embedding used as output matrix.
Everything is recomputed at every call and attention is spelt out, so that the arithmetic can be checked by eye.
Dropout is left out: only evaluation is of interest here.
"""

import math

import torch
from torch import Tensor, nn


class Head(nn.Module):
    def __init__(self, d_model: int, d_head: int) -> None:
        super().__init__()
        self.q_w = nn.Linear(d_model, d_head, bias=False)
        self.k_w = nn.Linear(d_model, d_head, bias=False)
        self.v_w = nn.Linear(d_model, d_head, bias=False)

    def forward(self, query: Tensor, memory: Tensor, hide: Tensor) -> Tensor:
        """query [batch, q, d], memory [batch, k, d], hide bool [batch, 1 or q, k] -> [batch, q, d_head]

        A row of which every key is hidden comes out as NaN, as it does in the original.
        """
        q, k, v = self.q_w(query), self.k_w(memory), self.v_w(memory)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])  # [batch, q, k]
        return torch.softmax(scores.masked_fill(hide, -math.inf), dim=-1) @ v


class Attention(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([Head(d_model, d_model // n_heads) for _ in range(n_heads)])
        self.o_w = nn.Linear(d_model, d_model, bias=False)

    def forward(self, query: Tensor, memory: Tensor, hide: Tensor) -> Tensor:
        """query [batch, q, d], memory [batch, k, d], hide bool [batch, 1 or q, k] -> [batch, q, d]"""
        return self.o_w(torch.cat([head(query, memory, hide) for head in self.attentions], dim=-1))


class FeedForward(nn.Module):
    def __init__(self, d_model: int, d_ffn: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(d_model, d_ffn, kernel_size=1)
        self.conv2 = nn.Conv1d(d_ffn, d_model, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d] -> [batch, length, d]; convolutions want the features before the length"""
        return self.conv2(torch.relu(self.conv1(x.transpose(1, 2)))).transpose(1, 2)


class EncoderLayer(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_ffn: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)
        self.self_attention = Attention(d_model, n_heads)
        self.position_wise_ffn = FeedForward(d_model, d_ffn)

    def forward(self, x: Tensor, src_hide: Tensor) -> Tensor:
        """x [batch, src, d], src_hide bool [batch, 1, src] -> [batch, src, d]"""
        normed = self.layer_norm(x)
        x = x + self.self_attention(normed, normed, src_hide)
        return x + self.position_wise_ffn(self.layer_norm(x))


class DecoderLayer(EncoderLayer):
    def __init__(self, d_model: int, n_heads: int, d_ffn: int) -> None:
        super().__init__(d_model, n_heads, d_ffn)
        self.encoder_attention = Attention(d_model, n_heads)

    def forward(self, x: Tensor, tgt_hide: Tensor, memory: Tensor, src_hide: Tensor) -> Tensor:
        """x [batch, tgt, d], tgt_hide bool [batch, tgt, tgt], memory [batch, src, d] -> [batch, tgt, d]"""
        normed = self.layer_norm(x)
        x = x + self.self_attention(normed, normed, tgt_hide)
        x = x + self.encoder_attention(self.layer_norm(x), memory, src_hide)
        return x + self.position_wise_ffn(self.layer_norm(x))


def sinusoid_table(rows: int, d_model: int) -> Tensor:
    """[rows, d] float32, row 0 being zeros.

    Not the paper's sinusoids: column j turns at the rate 10000 ** (-2j / d), where the paper has the same rate for
    the sine and the cosine of a pair, 10000 ** (-2 (j // 2) / d).
    """
    column = torch.arange(d_model, dtype=torch.float64)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] / 10000.0 ** (2 * column / d_model)
    table = torch.where(column % 2 == 0, angles.sin(), angles.cos())
    table[0] = 0.0
    return table.float()


class Side(nn.Module):
    """What encoder and decoder have in common: embeddings, positions and the final norm."""

    def __init__(self, vocab: int, d_model: int, max_len: int, pad_id: int) -> None:
        super().__init__()
        self.pad_id = pad_id
        self.token_embedding = nn.Embedding(vocab, d_model)
        nn.init.normal_(self.token_embedding.weight, std=d_model**-0.5)  # it is the output matrix as well
        self.pos_embedding = nn.Embedding.from_pretrained(sinusoid_table(max_len + 1, d_model), freeze=True)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

    def embed(self, ids: Tensor) -> Tensor:
        """[batch, length] -> [batch, length, d]; the token in column t takes row t + 1, a pad takes row 0"""
        rows = torch.arange(1, ids.shape[1] + 1) * (ids != self.pad_id)
        return self.token_embedding(ids) * math.sqrt(self.token_embedding.embedding_dim) + self.pos_embedding(rows)


class PerHeadTransformer(nn.Module):
    def __init__(
        self,
        *,
        src_vocab: int,
        tgt_vocab: int,
        d_model: int,
        n_heads: int,
        d_ffn: int,
        n_encoder_layers: int,
        n_decoder_layers: int,
        max_len: int = 64,
        pad_id: int = 1,
    ) -> None:
        super().__init__()
        self.pad_id = pad_id
        sizes = (d_model, n_heads, d_ffn)
        self.encoder = Side(src_vocab, d_model, max_len, pad_id)
        self.encoder.encoder_layers = nn.ModuleList([EncoderLayer(*sizes) for _ in range(n_encoder_layers)])
        self.decoder = Side(tgt_vocab, d_model, max_len, pad_id)
        self.decoder.decoder_layers = nn.ModuleList([DecoderLayer(*sizes) for _ in range(n_decoder_layers)])

    def forward(self, src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
        """src_ids [batch, src], tgt_ids [batch, tgt], int64 -> logits [batch, tgt, tgt_vocab]"""
        src_hide = (src_ids == self.pad_id)[:, None, :]
        # A pad token among the target tokens is hidden from the later ones, when decoding as well as in training.
        future = torch.ones(tgt_ids.shape[1], tgt_ids.shape[1], dtype=torch.bool).triu(diagonal=1)
        tgt_hide = (tgt_ids == self.pad_id)[:, None, :] | future
        memory = self.encoder.embed(src_ids)
        for layer in self.encoder.encoder_layers:
            memory = layer(memory, src_hide)
        memory = self.encoder.layer_norm(memory)
        x = self.decoder.embed(tgt_ids)
        for layer in self.decoder.decoder_layers:
            x = layer(x, tgt_hide, memory, src_hide)
        return self.decoder.layer_norm(x) @ self.decoder.token_embedding.weight.T
