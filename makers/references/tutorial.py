"""Naive reference of the `tutorial` family: post-norm, learned positions, untied output, masks of -1e10.

Everything is recomputed at every call and attention is spelt out, so that the arithmetic can be checked by eye.
Dropout is left out: only evaluation is of interest here.
"""

import math

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention whose heads are fused in four square Linears."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.fc_q = nn.Linear(d_model, d_model)
        self.fc_k = nn.Linear(d_model, d_model)
        self.fc_v = nn.Linear(d_model, d_model)
        self.fc_o = nn.Linear(d_model, d_model)

    def split(self, x: Tensor) -> Tensor:
        """[batch, length, d] -> [batch, heads, length, d / heads]"""
        return x.unflatten(2, (self.n_heads, -1)).transpose(1, 2)

    def forward(self, query: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        """query [batch, q, d], memory [batch, k, d], keep bool [batch, 1, 1 or q, k] -> [batch, q, d]"""
        q, k, v = self.split(self.fc_q(query)), self.split(self.fc_k(memory)), self.split(self.fc_v(memory))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])  # [batch, heads, q, k]
        self.weights = torch.softmax(scores.masked_fill(~keep, -1e10), dim=-1)  # the tutorial returns them too
        return self.fc_o((self.weights @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, d_model: int, d_ffn: int) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(d_model, d_ffn)
        self.fc_2 = nn.Linear(d_ffn, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d] -> [batch, length, d]"""
        return self.fc_2(torch.relu(self.fc_1(x)))


class EncoderLayer(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_ffn: int) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(d_model, eps=1e-5)
        self.ff_layer_norm = nn.LayerNorm(d_model, eps=1e-5)
        self.self_attention = Attention(d_model, n_heads)
        self.positionwise_feedforward = FeedForward(d_model, d_ffn)

    def forward(self, x: Tensor, src_keep: Tensor) -> Tensor:
        """x [batch, src, d], src_keep bool [batch, 1, 1, src] -> [batch, src, d]"""
        x = self.self_attn_layer_norm(x + self.self_attention(x, x, src_keep))
        return self.ff_layer_norm(x + self.positionwise_feedforward(x))


class DecoderLayer(EncoderLayer):
    def __init__(self, d_model: int, n_heads: int, d_ffn: int) -> None:
        super().__init__(d_model, n_heads, d_ffn)
        self.enc_attn_layer_norm = nn.LayerNorm(d_model, eps=1e-5)
        self.encoder_attention = Attention(d_model, n_heads)

    def forward(self, x: Tensor, tgt_keep: Tensor, memory: Tensor, src_keep: Tensor) -> Tensor:
        """x [batch, tgt, d], tgt_keep bool [batch, 1, tgt, tgt], memory [batch, src, d] -> [batch, tgt, d]"""
        x = self.self_attn_layer_norm(x + self.self_attention(x, x, tgt_keep))
        x = self.enc_attn_layer_norm(x + self.encoder_attention(x, memory, src_keep))
        return self.ff_layer_norm(x + self.positionwise_feedforward(x))


class Stack(nn.Module):
    """The two embeddings and the layers of one side."""

    def __init__(self, vocab: int, d_model: int, max_len: int, layers: list[EncoderLayer]) -> None:
        super().__init__()
        self.tok_embedding = nn.Embedding(vocab, d_model)
        self.pos_embedding = nn.Embedding(max_len, d_model)
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor, *context: Tensor) -> Tensor:
        """ids [batch, length]; context is what each layer takes besides the state -> [batch, length, d]"""
        # Positions count columns from 0, padding or not; only the token embedding is scaled.
        tokens = self.tok_embedding(ids) * math.sqrt(self.tok_embedding.embedding_dim)
        x = tokens + self.pos_embedding(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, *context)
        return x


class TutorialTransformer(nn.Module):
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
        max_len: int = 100,
        pad_id: int = 1,
    ) -> None:
        super().__init__()
        self.pad_id = pad_id
        sizes = (d_model, n_heads, d_ffn)
        self.encoder = Stack(src_vocab, d_model, max_len, [EncoderLayer(*sizes) for _ in range(n_encoder_layers)])
        self.decoder = Stack(tgt_vocab, d_model, max_len, [DecoderLayer(*sizes) for _ in range(n_decoder_layers)])
        self.decoder.fc_out = nn.Linear(d_model, tgt_vocab)

    def forward(self, src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
        """src_ids [batch, src], tgt_ids [batch, tgt], int64 -> logits [batch, tgt, tgt_vocab]"""
        src_keep = (src_ids != self.pad_id)[:, None, None, :]
        # A pad token among the target tokens is hidden from the later ones, when decoding as well as in training.
        causal = torch.ones(tgt_ids.shape[1], tgt_ids.shape[1], dtype=torch.bool).tril()
        tgt_keep = (tgt_ids != self.pad_id)[:, None, None, :] & causal
        memory = self.encoder(src_ids, src_keep)
        return self.decoder.fc_out(self.decoder(tgt_ids, tgt_keep, memory, src_keep))


class TutorialClassifier(nn.Module):
    """The same encoder with a linear head on the state of the first token."""

    def __init__(
        self,
        *,
        src_vocab: int,
        n_classes: int,
        d_model: int,
        n_heads: int,
        d_ffn: int,
        n_encoder_layers: int,
        max_len: int = 100,
        pad_id: int = 1,
    ) -> None:
        super().__init__()
        self.pad_id = pad_id
        layers = [EncoderLayer(d_model, n_heads, d_ffn) for _ in range(n_encoder_layers)]
        self.encoder = Stack(src_vocab, d_model, max_len, layers)
        self.fc_out = nn.Linear(d_model, n_classes)

    def forward(self, src_ids: Tensor) -> Tensor:
        """src_ids [batch, src] int64 -> logits [batch, n_classes]"""
        src_keep = (src_ids != self.pad_id)[:, None, None, :]
        return self.fc_out(self.encoder(src_ids, src_keep)[:, 0])
