"""The one canonical Transformer: trained, exported and used as the parity reference from the same lines.

Shapes: `batch` source sentences, `src` and `tgt` lengths, `beam` hypotheses of a sentence, `rows = batch * beam` with
row = b * beam + k, `cache` slots of the self-attention cache. Activations are float, ids and lengths int64, masks
bool with True for what may be attended to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.config import Activation, ModelConfig
from tfexport.models.positions import DistanceTable, PositionTable


class KeyValue(NamedTuple):
    """Keys and values of one attention, each [batch or rows, heads, length, head_dim]."""

    key: Tensor
    value: Tensor


def write_cache(cache: Tensor, update: Tensor, position: Tensor) -> Tensor:
    """A copy of `cache` [rows, heads, cache, head_dim] with `update` [rows, heads, 1, head_dim] at `position` [rows]."""
    written = cache.clone()
    written[torch.arange(len(cache), device=cache.device), :, position] = update[:, :, 0]
    return written


def write_in_place(cache: Tensor, update: Tensor, position: Tensor) -> Tensor:
    """`write_cache` into `cache` itself, for PyTorch's own decoding with a static cache."""
    cache[torch.arange(len(cache), device=cache.device), :, position] = update[:, :, 0]
    return cache


WriteCache = Callable[[Tensor, Tensor, Tensor], Tensor]


def best_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens of each row of `logits` [rows, vocab]: log-probabilities and ids, each [rows, count]."""
    values, ids = logits.topk(count)
    peak = values[:, :1]  # out of the sum, so that no exponential overflows
    return values - peak - (logits - peak).exp().sum(-1, keepdim=True).log(), ids


class Attention(nn.Module):
    """Multi-head scaled dot-product attention (section 3.2); keys and values are projected apart so they can be kept."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        d, inner, bias = config.d_model, config.d_attention, config.attention_bias
        self.n_heads, self.head_dim = config.n_heads, config.head_dim
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
        """`states` [batch, queries, d_model] attend to `memory`.

        `mask` broadcasts to [batch, heads, queries, keys]: bool, or float to be added to the scores.
        """
        query = self._heads(self.query(states))
        mixed = F.scaled_dot_product_attention(query, *memory, attn_mask=mask, scale=self.head_dim**-0.5)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def weights(self, states: Tensor, memory: KeyValue, mask: Tensor) -> Tensor:
        """The attention weights [batch, heads, queries, keys] that `forward` mixes the values with."""
        scores = self._heads(self.query(states)) @ memory.key.transpose(-1, -2) * self.head_dim**-0.5
        return scores.masked_fill(~mask, -math.inf).softmax(-1)


class PointwiseConv(nn.Conv1d):
    """A Conv1d of kernel 1 over [batch, length, channels], computed as the matrix product that it is."""

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight.squeeze(-1), self.bias)


_ACTIVATIONS: dict[Activation, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
}


class FeedForward(nn.Module):
    """Position-wise feed-forward network (section 3.3), [batch, length, d_model] to the same."""

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
        self.activation = _ACTIVATIONS[config.activation]()

    def forward(self, states: Tensor) -> Tensor:
        hidden = self.activation(self.hidden(states))
        return self.output(hidden if self.gate is None else hidden * self.gate(states))


def _norm(config: ModelConfig) -> nn.Module:
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.d_model, config.norm_eps)


class Layer(nn.Module):
    """What encoder and decoder layers share: where the norms of the `n_sublayers` residual branches stand."""

    def __init__(self, config: ModelConfig, n_sublayers: int):
        super().__init__()
        n_norms = 1 if config.shared_norm else n_sublayers
        self.norms = nn.ModuleList(_norm(config) for _ in range(n_norms))
        self.dropout = nn.Dropout(config.dropout)
        self.norm_first = config.norm_first

    def _norm(self, sublayer: int, states: Tensor) -> Tensor:
        return self.norms[sublayer % len(self.norms)](states)

    def enter(self, sublayer: int, states: Tensor) -> Tensor:
        """What the sublayer reads."""
        return self._norm(sublayer, states) if self.norm_first else states

    def leave(self, sublayer: int, states: Tensor, branch: Tensor) -> Tensor:
        """The residual sum of `states` and what the sublayer made of them."""
        states = states + self.dropout(branch)
        return states if self.norm_first else self._norm(sublayer, states)


class EncoderLayer(Layer):
    def __init__(self, config: ModelConfig):
        super().__init__(config, n_sublayers=2)
        self.self_attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """`states` [batch, src, d_model], `mask` [batch, 1, 1, src]."""
        inner = self.enter(0, states)
        states = self.leave(0, states, self.self_attention(inner, self.self_attention.key_value(inner), mask))
        return self.leave(1, states, self.feed_forward(self.enter(1, states)))


class DecoderLayer(Layer):
    def __init__(self, config: ModelConfig):
        super().__init__(config, n_sublayers=3)
        self.self_attention = Attention(config)
        self.cross_attention = Attention(config)
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
        """One layer over whole targets (`past` None) or over one new token a row, added to `past` by `write`.

        Returns the states, the self-attention keys and values, and the queries of the cross-attention (for its maps).
        """
        inner = self.enter(0, states)
        present = self.self_attention.key_value(inner)
        if past is not None:
            present = KeyValue(*(write(old, new, position) for old, new in zip(past, present, strict=True)))
        states = self.leave(0, states, self.self_attention(inner, present, mask))

        # The beams of a sentence are so many queries to its one set of cross keys and values: [batch, beam, d_model].
        inner = self.enter(1, states)
        queries = inner.reshape(cross.key.shape[0], -1, inner.shape[-1])
        attended = self.cross_attention(queries, cross, cross_mask).reshape(inner.shape)
        states = self.leave(1, states, attended)

        return self.leave(2, states, self.feed_forward(self.enter(2, states))), present, queries


def _embedding(vocab_size: int, d_model: int) -> nn.Embedding:
    """Token vectors that are not initialised yet: see `initialise`."""
    return nn.Embedding(vocab_size, d_model, _weight=torch.empty(vocab_size, d_model))


class Stack(nn.Module):
    """What encoder and decoder share: embeddings, position table and a final norm around the layers."""

    def __init__(self, config: ModelConfig, max_length: int, vocab_size: int | None, *, both_ways: bool):
        super().__init__()
        self.tokens = _embedding(vocab_size, config.d_model) if vocab_size else None
        self.is_relative = config.positions == "relative"
        self.positions = (
            DistanceTable(config, both_ways=both_ways) if self.is_relative else PositionTable(config, max_length)
        )
        self.embedding_norm = _norm(config) if config.embedding_norm else nn.Identity()
        self.norm = _norm(config) if config.final_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.scale = config.embedding_scale

    def embed(self, ids: Tensor, position: Tensor, table: Tensor) -> Tensor:
        """`ids` [batch, length] at `position` [length] or [batch, length] to [batch, length, d_model]."""
        states = F.embedding(ids, table) * self.scale
        if not self.is_relative:
            states = states + self.positions(position)
        return self.dropout(self.embedding_norm(states))

    def biased(self, mask: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """The `mask` of self-attention, which broadcasts to [.., heads, queries, keys], with what positions add there."""
        return torch.where(mask, self.positions(queries, keys), -math.inf) if self.is_relative else mask


class Encoder(Stack):
    tokens: nn.Embedding

    def __init__(self, config: ModelConfig):
        super().__init__(config, config.max_source_length, config.src_vocab_size, both_ways=True)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.n_encoder_layers))

    def forward(self, src_ids: Tensor, src_len: Tensor) -> Tensor:
        """`src_ids` [batch, src], `src_len` [batch] to states [batch, src, d_model]; anything may follow `src_len`."""
        position = torch.arange(src_ids.shape[1], device=src_ids.device)
        states = self.embed(src_ids, position, self.tokens.weight)
        mask = self.biased(length_mask(src_len, src_ids.shape[1]), position, position)
        for layer in self.layers:
            states = layer(states, mask)
        return self.norm(states)


class Decoder(Stack):
    def __init__(self, config: ModelConfig):
        own_vocab = None if config.tie_source_target else config.tgt_vocab_size
        super().__init__(config, config.max_target_length, own_vocab, both_ways=False)
        layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_decoder_layers))
        self.layers: Sequence[DecoderLayer] = layers  # type: ignore[assignment]


def length_mask(length: Tensor, size: int) -> Tensor:
    """`length` [batch] to a mask [batch, 1, 1, size], True for the first `length` positions."""
    return (torch.arange(size, device=length.device) < length[:, None])[:, None, None]


class Transformer(nn.Module):
    """The encoder-decoder Transformer that a `ModelConfig` describes.

    `forward` is for training, `encode` and `step` for decoding; nothing is kept between calls.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.output_weight = None if config.tie_output else nn.Parameter(_like_output(config))
        self.output_bias = nn.Parameter(torch.zeros(config.tgt_vocab_size)) if config.output_bias else None
        initialise(self)

    def _target_table(self) -> Tensor:
        return self.encoder.tokens.weight if self.decoder.tokens is None else self.decoder.tokens.weight

    def output_matrix(self) -> Tensor:
        """The output projection [vocab, d_model], which may be the target embeddings."""
        return self._target_table() if self.output_weight is None else self.output_weight

    def _logits(self, states: Tensor) -> Tensor:
        """`states` [..., d_model] to logits: float64 of a model in float64, else float32, whatever the output matrix is."""
        weight = self.output_matrix()
        logits = F.linear(self.decoder.norm(states).to(weight.dtype), weight, self.output_bias)
        return logits if logits.dtype == torch.float64 else logits.float()

    def encode(self, src_ids: Tensor, src_len: Tensor) -> list[KeyValue]:
        """`src_ids` [batch, src], `src_len` [batch] to each layer's cross keys and values [batch, heads, src, head_dim]."""
        states = self.encoder(src_ids, src_len)
        return [layer.cross_attention.key_value(states) for layer in self.decoder.layers]

    def forward(self, src_ids: Tensor, src_len: Tensor, tgt_ids: Tensor) -> Tensor:
        """Teacher forcing: `tgt_ids` [batch, tgt], beginning with bos, to logits [batch, tgt, vocab].

        Logits at position t predict token t + 1; they depend on neither later tokens nor padding.
        """
        return self._teacher_forced(src_ids, src_len, tgt_ids)[0]

    def _maps(self, queries: list[Tensor], cross: list[KeyValue], mask: Tensor) -> list[Tensor]:
        """Each layer's cross-attention weights [batch, heads, queries, src]."""
        return [
            layer.cross_attention.weights(query, memory, mask)
            for layer, query, memory in zip(self.decoder.layers, queries, cross, strict=True)
        ]

    def forward_with_attention(self, src_ids: Tensor, src_len: Tensor, tgt_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """`forward`, and each layer's cross-attention weights [batch, heads, tgt, src]."""
        logits, cross, queries = self._teacher_forced(src_ids, src_len, tgt_ids)
        return logits, self._maps(queries, cross, length_mask(src_len, src_ids.shape[1]))

    def _teacher_forced(
        self, src_ids: Tensor, src_len: Tensor, tgt_ids: Tensor
    ) -> tuple[Tensor, list[KeyValue], list[Tensor]]:
        cross = self.encode(src_ids, src_len)
        logits, queries = self._forced(cross, src_len, tgt_ids)
        return logits, cross, queries

    def forced(self, cross: list[KeyValue], src_len: Tensor, tgt_ids: Tensor) -> Tensor:
        """`forward` over `cross`, which is `encode`'s of the same sources."""
        return self._forced(cross, src_len, tgt_ids)[0]

    def _forced(self, cross: list[KeyValue], src_len: Tensor, tgt_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        position = torch.arange(tgt_ids.shape[1], device=tgt_ids.device)
        states = self.decoder.embed(tgt_ids, position, self._target_table())
        causal = self.decoder.biased((position[:, None] >= position)[None, None], position, position)
        cross_mask = length_mask(src_len, cross[0].key.shape[2])
        all_queries = []
        for layer, memory in zip(self.decoder.layers, cross, strict=True):
            states, _, queries = layer(states, causal, memory, cross_mask, None, position, write_cache)
            all_queries.append(queries)
        return self._logits(states), all_queries

    def empty_cache(self, rows: int, cache: int) -> list[KeyValue]:
        """A zeroed self-attention cache of `cache` slots for each layer; zeros because a NaN would poison the mixture."""
        weight = self.encoder.tokens.weight
        shape = (rows, self.config.n_heads, cache, self.config.head_dim)
        return [KeyValue(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self.decoder.layers]

    def step(
        self,
        tokens: Tensor,
        position: Tensor,
        src_len: Tensor,
        past: list[KeyValue],
        cross: list[KeyValue],
        write: WriteCache = write_cache,
    ) -> tuple[Tensor, list[KeyValue]]:
        """One decoder step: `tokens` [rows] at `position` [rows] to logits [rows, vocab] and the cache with them in it.

        `past` holds [rows, heads, cache, head_dim] a layer with slots 0 .. position - 1 filled, `cross` is `encode`'s,
        of batch = rows / beam sentences. `past` itself is not changed, unless by `write_in_place`.
        """
        return self._step(tokens, position, src_len, past, cross, write)[:2]

    def step_with_attention(
        self, tokens: Tensor, position: Tensor, src_len: Tensor, past: list[KeyValue], cross: list[KeyValue]
    ) -> tuple[Tensor, list[KeyValue], Tensor]:
        """`step`, and the cross-attention weights [layers, rows, heads, src] of these tokens."""
        logits, present, queries = self._step(tokens, position, src_len, past, cross, write_cache)
        maps = torch.stack(self._maps(queries, cross, length_mask(src_len, cross[0].key.shape[2])))
        return logits, present, maps.transpose(2, 3).flatten(1, 2)

    def _step(
        self,
        tokens: Tensor,
        position: Tensor,
        src_len: Tensor,
        past: list[KeyValue],
        cross: list[KeyValue],
        write: WriteCache,
    ) -> tuple[Tensor, list[KeyValue], list[Tensor]]:
        states = self.decoder.embed(tokens[:, None], position[:, None], self._target_table())  # [rows, 1, d_model]
        slots = torch.arange(past[0].key.shape[2], device=position.device)
        mask = self.decoder.biased(length_mask(position + 1, len(slots)), position[:, None], slots)
        cross_mask = length_mask(src_len, cross[0].key.shape[2])
        present, all_queries = [], []
        for layer, old, memory in zip(self.decoder.layers, past, cross, strict=True):
            states, new, queries = layer(states, mask, memory, cross_mask, old, position, write)
            present.append(new)
            all_queries.append(queries)
        return self._logits(states[:, 0]), present, all_queries


def _like_output(config: ModelConfig) -> Tensor:
    return torch.empty(config.tgt_vocab_size, config.d_model)


def initialise(model: nn.Module) -> None:
    """Xavier-uniform matrices, zero biases, embeddings of deviation d_model ** -0.5 (so that their scaled norm is 1)."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # has no numbers, and PyTorch imports its compiler (a second) to say so
            continue
        if name.endswith(("tokens.weight", "positions.table", "output_weight")):
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
