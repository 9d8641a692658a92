"""The canonical Transformer. Training, export and the parity reference use the same code.

Shapes: `batch` source sentences, `src` and `tgt` lengths, `beam` hypotheses per sentence, `rows = batch * beam` with
row = b * beam + k, `cache` slots of the self-attention cache. Activations are float, ids and lengths are int64. Masks are
bool; True marks positions that may be attended to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.config import ModelConfig, Side
from tfexport.models.layers import DecoderLayer, EncoderLayer, KeyValue, WriteCache, norm_of, write_cache
from tfexport.models.positions import DistanceTable, PositionTable


def _embedding(vocab_size: int, d_model: int) -> nn.Embedding:
    """Token embeddings without values; `initialise` fills them."""
    return nn.Embedding(vocab_size, d_model, _weight=torch.empty(vocab_size, d_model))


class Stack(nn.Module):
    """Base of encoder and decoder: embeddings, positions and a final norm around the layers."""

    def __init__(self, config: ModelConfig, side: Side, max_length: int, vocab_size: int | None):
        super().__init__()
        self.tokens = _embedding(vocab_size, config.d_model) if vocab_size else None
        self.positions: DistanceTable | PositionTable | None = None
        if config.positions == "relative":
            self.positions = DistanceTable(config, side)
        elif config.has_position_table:
            self.positions = PositionTable(config, max_length)
        self.embedding_norm = norm_of(config, "embedding_norm") if config.has_embedding_norm(side) else nn.Identity()
        self.norm = norm_of(config, "norm") if config.has_final_norm(side) else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.scale = config.embedding_scale

    def embed(self, ids: Tensor, position: Tensor, table: Tensor) -> Tensor:
        """Embed `ids` [batch, length] at `position` [length] or [batch, length]; returns [batch, length, d_model]."""
        states = F.embedding(ids, table) * self.scale
        if isinstance(self.positions, PositionTable):
            states = states + self.positions(position)
        return self.dropout(self.embedding_norm(states))

    def biased(self, mask: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """The self-attention `mask`, which broadcasts to [.., heads, queries, keys], with the bias of relative positions."""
        if not isinstance(self.positions, DistanceTable):
            return mask
        return torch.where(mask, self.positions(queries, keys), -math.inf)


class Encoder(Stack):
    tokens: nn.Embedding

    def __init__(self, config: ModelConfig):
        super().__init__(config, "encoder", config.max_source_length, config.src_vocab_size)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.n_encoder_layers))

    def forward(self, src_ids: Tensor, src_len: Tensor) -> Tensor:
        """Encode `src_ids` [batch, src] of lengths `src_len` [batch] to states [batch, src, d_model].

        Ids after `src_len` are ignored.
        """
        position = torch.arange(src_ids.shape[1], device=src_ids.device)
        states = self.embed(src_ids, position, self.tokens.weight)
        mask = self.biased(length_mask(src_len, src_ids.shape[1]), position, position)
        for layer in self.layers:
            states = layer(states, mask)
        return self.norm(states)


class Decoder(Stack):
    def __init__(self, config: ModelConfig):
        own_vocab = None if config.tie_source_target else config.tgt_vocab_size
        super().__init__(config, "decoder", config.max_target_length, own_vocab)
        layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_decoder_layers))
        self.layers: Sequence[DecoderLayer] = layers  # type: ignore[assignment]


def length_mask(length: Tensor, size: int) -> Tensor:
    """A mask [batch, 1, 1, size] that is True for the first `length` [batch] positions."""
    return (torch.arange(size, device=length.device) < length[:, None])[:, None, None]


class Transformer(nn.Module):
    """The encoder-decoder Transformer that a `ModelConfig` describes.

    `forward` is for training, `encode` and `step` for decoding. The model keeps no state between calls.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.output_weight = None if config.tie_output else nn.Parameter(_like_output(config))
        self.output_bias = nn.Parameter(torch.zeros(config.tgt_vocab_size)) if config.output_bias else None
        initialise(self)

    def target_table(self) -> Tensor:
        return self.encoder.tokens.weight if self.decoder.tokens is None else self.decoder.tokens.weight

    def output_matrix(self) -> Tensor:
        """The output projection [vocab, d_model]; with `tie_output` it is the target embedding matrix."""
        return self.target_table() if self.output_weight is None else self.output_weight

    def logits(self, states: Tensor) -> Tensor:
        """Logits of `states` [..., d_model]: float64 for a model in float64, else float32, for any type of output matrix."""
        weight = self.output_matrix()
        logits = F.linear(self.decoder.norm(states).to(weight.dtype), weight, self.output_bias)
        return logits if logits.dtype == torch.float64 else logits.float()

    def encode(self, src_ids: Tensor, src_len: Tensor) -> list[KeyValue]:
        """Encode `src_ids` [batch, src] of lengths `src_len` [batch].

        Returns the cross-attention keys and values of each decoder layer, [batch, heads, src, head_dim].
        """
        states = self.encoder(src_ids, src_len)
        return [layer.cross_attention.key_value(states) for layer in self.decoder.layers]

    def forward(self, src_ids: Tensor, src_len: Tensor, tgt_ids: Tensor) -> Tensor:
        """Teacher forcing: `tgt_ids` [batch, tgt], which start with bos, to logits [batch, tgt, vocab].

        Logits at position t predict token t + 1. They do not depend on later tokens or on padding.
        """
        return self.logits(self.states(src_ids, src_len, tgt_ids))

    def states(self, src_ids: Tensor, src_len: Tensor, tgt_ids: Tensor) -> Tensor:
        """The states [batch, tgt, d_model] of `forward`, before `logits`: a large vocabulary may be computed in parts."""
        return self._forced(self.encode(src_ids, src_len), src_len, tgt_ids)[0]

    def _maps(self, queries: list[Tensor], cross: list[KeyValue], mask: Tensor) -> list[Tensor]:
        """The cross-attention weights [batch, heads, queries, src] of each layer."""
        return [
            layer.cross_attention.weights(query, memory, mask)
            for layer, query, memory in zip(self.decoder.layers, queries, cross, strict=True)
        ]

    def forward_with_attention(self, src_ids: Tensor, src_len: Tensor, tgt_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """`forward` that also returns the cross-attention weights [batch, heads, tgt, src] of each layer."""
        cross = self.encode(src_ids, src_len)
        states, queries = self._forced(cross, src_len, tgt_ids)
        return self.logits(states), self._maps(queries, cross, length_mask(src_len, src_ids.shape[1]))

    def forced(self, cross: list[KeyValue], src_len: Tensor, tgt_ids: Tensor) -> Tensor:
        """`forward` with `cross`, the result of `encode` for the same sources."""
        return self.logits(self._forced(cross, src_len, tgt_ids)[0])

    def _forced(self, cross: list[KeyValue], src_len: Tensor, tgt_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        position = torch.arange(tgt_ids.shape[1], device=tgt_ids.device)
        states = self.decoder.embed(tgt_ids, position, self.target_table())
        causal = self.decoder.biased((position[:, None] >= position)[None, None], position, position)
        cross_mask = length_mask(src_len, cross[0].key.shape[2])
        all_queries = []
        for layer, memory in zip(self.decoder.layers, cross, strict=True):
            states, _, queries = layer(states, causal, memory, cross_mask, None, position, write_cache)
            all_queries.append(queries)
        return states, all_queries

    def empty_cache(self, rows: int, cache: int) -> list[KeyValue]:
        """A zeroed self-attention cache of `cache` slots for each layer. A NaN in it would spread into the outputs."""
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
        """One decoder step: `tokens` [rows] at `position` [rows] to logits [rows, vocab] and the updated cache.

        `past` is [rows, heads, cache, head_dim] per layer, with slots 0 .. position - 1 filled. `cross` is the result of
        `encode` for batch = rows / beam sentences. Only `write_in_place` changes `past`.
        """
        return self._step(tokens, position, src_len, past, cross, write)[:2]

    def step_with_attention(
        self, tokens: Tensor, position: Tensor, src_len: Tensor, past: list[KeyValue], cross: list[KeyValue]
    ) -> tuple[Tensor, list[KeyValue], Tensor]:
        """`step` that also returns the cross-attention weights [layers, rows, heads, src] of the tokens."""
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
        states = self.decoder.embed(tokens[:, None], position[:, None], self.target_table())  # [rows, 1, d_model]
        slots = torch.arange(past[0].key.shape[2], device=position.device)
        mask = self.decoder.biased(length_mask(position + 1, len(slots)), position[:, None], slots)
        cross_mask = length_mask(src_len, cross[0].key.shape[2])
        present, all_queries = [], []
        for layer, old, memory in zip(self.decoder.layers, past, cross, strict=True):
            states, new, queries = layer(states, mask, memory, cross_mask, old, position, write)
            present.append(new)
            all_queries.append(queries)
        return self.logits(states[:, 0]), present, all_queries


def _like_output(config: ModelConfig) -> Tensor:
    return torch.empty(config.tgt_vocab_size, config.d_model)


def initialise(model: nn.Module) -> None:
    """Initialise matrices as Xavier-uniform, biases as 0, and embeddings with standard deviation d_model ** -0.5.

    Scaled by sqrt(d_model), the elements of an embedding have standard deviation 1.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # has no values, and initialising it makes PyTorch import its compiler (a second)
            continue
        if name.endswith(("tokens.weight", "positions.table", "output_weight")):
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
