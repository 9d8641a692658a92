"""Naive reference of the `annotated` family: pre-norm, sinusoids in a buffer, its own LayerNorm, masks of -1e9.

Everything is recomputed at every call and attention is spelt out, so that the arithmetic can be checked by eye.
Dropout is left out: only evaluation is of interest here.
"""

import math

import torch
from torch import Tensor, nn


class StdNorm(nn.Module):
    """Divides by (std + eps) with the unbiased std (n - 1): not `nn.LayerNorm`."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(d_model))
        self.b_2 = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]"""
        centred = x - x.mean(dim=-1, keepdim=True)
        std = torch.sqrt((centred**2).sum(dim=-1, keepdim=True) / (x.shape[-1] - 1))
        return self.a_2 * centred / (std + 1e-6) + self.b_2


class Attention(nn.Module):
    """Multi-head attention whose heads are fused in four square Linears: query, key, value, output."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        """query [batch, q, d], memory [batch, k, d], keep bool, broadcast to [batch, 1, q, k] -> [batch, q, d]"""
        project_q, project_k, project_v, project_out = self.linears
        # Each becomes [batch, heads, length, d / heads].
        q = project_q(query).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
        k = project_k(memory).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
        v = project_v(memory).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])  # [batch, heads, q, k]
        weights = torch.softmax(scores.masked_fill(~keep, -1e9), dim=-1)
        return project_out((weights @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, d_model: int, d_ffn: int) -> None:
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ffn)
        self.w_2 = nn.Linear(d_ffn, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d] -> [batch, length, d]"""
        return self.w_2(torch.relu(self.w_1(x)))


def sublayer_norms(n: int, d_model: int) -> nn.ModuleList:
    """The norms that stand before the n sublayers of a layer, named `{n}.norm` in the files."""
    return nn.ModuleList([nn.ModuleDict({"norm": StdNorm(d_model)}) for _ in range(n)])


class EncoderLayer(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_ffn: int) -> None:
        super().__init__()
        self.self_attn = Attention(d_model, n_heads)
        self.feed_forward = FeedForward(d_model, d_ffn)
        self.sublayer = sublayer_norms(2, d_model)

    def forward(self, x: Tensor, src_keep: Tensor) -> Tensor:
        """x [batch, src, d], src_keep bool [batch, 1, 1, src] -> [batch, src, d]"""
        normed = self.sublayer[0]["norm"](x)
        x = x + self.self_attn(normed, normed, src_keep)
        return x + self.feed_forward(self.sublayer[1]["norm"](x))


class DecoderLayer(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_ffn: int) -> None:
        super().__init__()
        self.self_attn = Attention(d_model, n_heads)
        self.src_attn = Attention(d_model, n_heads)
        self.feed_forward = FeedForward(d_model, d_ffn)
        self.sublayer = sublayer_norms(3, d_model)

    def forward(self, x: Tensor, causal: Tensor, memory: Tensor, src_keep: Tensor) -> Tensor:
        """x [batch, tgt, d], causal bool [tgt, tgt], memory [batch, src, d] -> [batch, tgt, d]"""
        normed = self.sublayer[0]["norm"](x)
        x = x + self.self_attn(normed, normed, causal)
        x = x + self.src_attn(self.sublayer[1]["norm"](x), memory, src_keep)
        return x + self.feed_forward(self.sublayer[2]["norm"](x))


class Stack(nn.Module):
    def __init__(self, d_model: int, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = StdNorm(d_model)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        """x [batch, length, d]; context is what each layer takes besides the state -> [batch, length, d]"""
        for layer in self.layers:
            x = layer(x, *context)
        return self.norm(x)


class ScaledEmbedding(nn.Module):
    def __init__(self, vocab: int, d_model: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, length] -> [batch, length, d]"""
        return self.lut(ids) * math.sqrt(self.lut.embedding_dim)


class Sinusoids(nn.Module):
    pe: Tensor

    def __init__(self, d_model: int, max_len: int) -> None:
        super().__init__()
        # float32 and in log space, as the files were made: the last digits of the buffer differ otherwise.
        rates = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        angles = torch.arange(max_len)[:, None] * rates  # [max_len, d / 2]
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[None])

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d] -> [batch, length, d]; the first token takes position 0"""
        return x + self.pe[:, : x.shape[1]]


class AnnotatedTransformer(nn.Module):
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
        max_len: int = 5000,
        pad_id: int = 2,
    ) -> None:
        super().__init__()
        self.pad_id = pad_id
        sizes = (d_model, n_heads, d_ffn)
        self.encoder = Stack(d_model, [EncoderLayer(*sizes) for _ in range(n_encoder_layers)])
        self.decoder = Stack(d_model, [DecoderLayer(*sizes) for _ in range(n_decoder_layers)])
        self.src_embed = nn.Sequential(ScaledEmbedding(src_vocab, d_model), Sinusoids(d_model, max_len))
        self.tgt_embed = nn.Sequential(ScaledEmbedding(tgt_vocab, d_model), Sinusoids(d_model, max_len))
        self.generator = nn.ModuleDict({"proj": nn.Linear(d_model, tgt_vocab)})

    def forward(self, src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
        """src_ids [batch, src], tgt_ids [batch, tgt], int64 -> logits [batch, tgt, tgt_vocab]

        These are the raw outputs of `generator.proj`: the original returns their log-softmax.
        """
        src_keep = (src_ids != self.pad_id)[:, None, None, :]
        # The original decodes with the causal mask alone. It hides the pads at the end of a training target too.
        causal = torch.ones(tgt_ids.shape[1], tgt_ids.shape[1], dtype=torch.bool).tril()
        memory = self.encoder(self.src_embed(src_ids), src_keep)
        return self.generator["proj"](self.decoder(self.tgt_embed(tgt_ids), causal, memory, src_keep))
