"""The layers of the canonical Transformer: attention, feed-forward, norms, and the KV cache of a step.

`transformer.py` defines the names of the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.config import Activation, ModelConfig


class KeyValue(NamedTuple):
    """Keys and values of an attention layer, each [batch or rows, heads, length, head_dim]."""

    key: Tensor
    value: Tensor


def write_cache(cache: Tensor, update: Tensor, position: Tensor) -> Tensor:
    """Copy `cache` [rows, heads, cache, head_dim] and write `update` [rows, heads, 1, head_dim] at `position` [rows]."""
    written = cache.clone()
    written[torch.arange(len(cache), device=cache.device), :, position] = update[:, :, 0]
    return written


def write_in_place(cache: Tensor, update: Tensor, position: Tensor) -> Tensor:
    """`write_cache`, but `cache` itself is changed, for PyTorch's own decoding with a static cache."""
    cache[torch.arange(len(cache), device=cache.device), :, position] = update[:, :, 0]
    return cache


WriteCache = Callable[[Tensor, Tensor, Tensor], Tensor]


def best_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens of each row of `logits` [rows, vocab]: log-probabilities and ids, each [rows, count]."""
    values, ids = logits.topk(count)
    peak = values[:, :1]  # subtracted in the sum, so that no exponential overflows
    return values - peak - (logits - peak).exp().sum(-1, keepdim=True).log(), ids


class Attention(nn.Module):
    """Multi-head scaled dot-product attention (section 3.2). `key_value` is a method of its own, for the KV cache."""

    def __init__(self, config: ModelConfig, n_heads: int):
        super().__init__()
        d, inner, bias = config.d_model, config.d_attention, config.attention_bias
        self.n_heads, self.head_dim = n_heads, inner // n_heads
        self.query = nn.Linear(d, inner, bias=bias)
        self.key = nn.Linear(d, inner, bias=bias)
        self.value = nn.Linear(d, inner, bias=bias)
        self.output = nn.Linear(inner, d, bias=bias)

    def _heads(self, states: Tensor) -> Tensor:
        return states.reshape(*states.shape[:2], self.n_heads, self.head_dim).transpose(
            1, 2
        )  # [batch, heads, length, head_dim]

    def key_value(self, states: Tensor) -> KeyValue:
        """Project `states` [batch, length, d_model] to keys and values."""
        return KeyValue(self._heads(self.key(states)), self._heads(self.value(states)))

    def forward(self, states: Tensor, memory: KeyValue, mask: Tensor) -> Tensor:
        """Attention of `states` [batch, queries, d_model] to `memory`; returns [batch, queries, d_model].

        `mask` broadcasts to [batch, heads, queries, keys]. It is bool, or float that is added to the scores.
        """
        query = self._heads(self.query(states))
        mixed = F.scaled_dot_product_attention(query, *memory, attn_mask=mask, scale=self.head_dim**-0.5)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def weights(self, states: Tensor, memory: KeyValue, mask: Tensor) -> Tensor:
        """The attention weights [batch, heads, queries, keys] that `forward` multiplies the values with."""
        scores = self._heads(self.query(states)) @ memory.key.transpose(-1, -2) * self.head_dim**-0.5
        return scores.masked_fill(~mask, -math.inf).softmax(-1)


class PointwiseConv(nn.Conv1d):
    """A Conv1d of kernel size 1 over [batch, length, channels], computed as a matrix product."""

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight.squeeze(-1), self.bias)


ACTIVATIONS: dict[Activation, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
}


class FeedForward(nn.Module):
    """Position-wise feed-forward network (section 3.3): [batch, length, d_model] to [batch, length, d_model]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        d, d_ff, bias = config.d_model, config.d_ff, config.feed_forward_bias
        if config.feed_forward == "conv1d":
            self.hidden: nn.Module = PointwiseConv(d, d_ff, 1, bias=bias)
            self.output: nn.Module = PointwiseConv(d_ff, d, 1, bias=bias)
        else:
            self.hidden = nn.Linear(d, d_ff, bias=bias)
            self.output = nn.Linear(d_ff, d, bias=bias)
        self.gate = nn.Linear(d, d_ff, bias=bias) if config.gated else None
        self.activation = ACTIVATIONS[config.activation]()

    def forward(self, states: Tensor) -> Tensor:
        hidden = self.activation(self.hidden(states))
        return self.output(hidden if self.gate is None else hidden * self.gate(states))


def norm_of(config: ModelConfig, path: str) -> nn.Module:
    """The norm at the path of a module, such as `encoder.norm`."""
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.d_model, config.norm_eps_of(path))


class Layer(nn.Module):
    """Base of encoder and decoder layers: applies the norms of the `n_sublayers` residual branches."""

    def __init__(self, config: ModelConfig, n_sublayers: int):
        super().__init__()
        n_norms = 1 if config.shared_norm else n_sublayers
        self.norms = nn.ModuleList(norm_of(config, "norms") for _ in range(n_norms))
        self.dropout = nn.Dropout(config.dropout)
        self.norm_first = config.norm_first

    def _norm(self, sublayer: int, states: Tensor) -> Tensor:
        return self.norms[sublayer % len(self.norms)](states)

    def enter(self, sublayer: int, states: Tensor) -> Tensor:
        """The input of the sublayer."""
        return self._norm(sublayer, states) if self.norm_first else states

    def leave(self, sublayer: int, states: Tensor, branch: Tensor) -> Tensor:
        """The residual sum of `states` and the sublayer's output `branch`."""
        states = states + self.dropout(branch)
        return states if self.norm_first else self._norm(sublayer, states)


class EncoderLayer(Layer):
    def __init__(self, config: ModelConfig):
        super().__init__(config, n_sublayers=2)
        self.self_attention = Attention(config, config.encoder_heads)
        self.feed_forward = FeedForward(config)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """`states` [batch, src, d_model] to the same shape; `mask` is [batch, 1, 1, src]."""
        inner = self.enter(0, states)
        states = self.leave(0, states, self.self_attention(inner, self.self_attention.key_value(inner), mask))
        return self.leave(1, states, self.feed_forward(self.enter(1, states)))


class DecoderLayer(Layer):
    def __init__(self, config: ModelConfig):
        super().__init__(config, n_sublayers=3)
        self.self_attention = Attention(config, config.n_heads)
        self.cross_attention = Attention(config, config.n_heads)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        states: Tensor,
        mask: Tensor,
        cross: KeyValue,
        cross_mask: Tensor,
        past: KeyValue | None,
        position: Tensor,
        write: WriteCache,
    ) -> tuple[Tensor, KeyValue, Tensor]:
        """One layer over whole targets (`past` None) or over one new token per row, which `write` adds to `past`.

        Returns the states, the self-attention keys and values, and the queries of the cross-attention (for its weights).
        """
        inner = self.enter(0, states)
        present = self.self_attention.key_value(inner)
        if past is not None:
            present = KeyValue(*(write(old, new, position) for old, new in zip(past, present, strict=True)))
        states = self.leave(0, states, self.self_attention(inner, present, mask))

        # The hypotheses of a sentence are queries to its single set of cross keys and values: [batch, beam, d_model].
        inner = self.enter(1, states)
        queries = inner.reshape(cross.key.shape[0], -1, inner.shape[-1])
        attended = self.cross_attention(queries, cross, cross_mask).reshape(inner.shape)
        states = self.leave(1, states, attended)

        return self.leave(2, states, self.feed_forward(self.enter(2, states))), present, queries
