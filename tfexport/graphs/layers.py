"""What the graphs of all dialects have in common: embeddings, and layers of residual branches.

It follows `models.transformer`, module by module; attention is each dialect's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from tfexport.graphs.emitter import Emitter, Value

HIDDEN = float(np.finfo(np.float32).min) / 2
"""Added to the score of a slot that is not to be seen, or put in its place: its weight is exactly 0, whatever the score. Not
-inf, which would be NaN in a row that sees nothing; half of the least number, so that a score added to it stays finite."""

Sublayer = Callable[[str, Value], Value]
"""What a layer at a path does to states in a residual branch."""


def source_embedded(emitter: Emitter) -> Value:
    """`src_ids` [batch, src] to states [batch, src, d_model]."""
    ids, offset = emitter.inputs["src_ids"], emitter.config.position_offset
    if emitter.config.positions == "relative":
        return _embedded(emitter, "encoder", ids, None)
    with emitter.at("encoder.positions"):
        start, end = emitter.sizes(offset), emitter.shape_of(ids, 1)
        end = emitter.shape_node("Add", end, start) if offset else end
        positions = emitter.node("Slice", emitter.weight("encoder.positions.table"), start, end, emitter.sizes(0))
    return _embedded(emitter, "encoder", ids, positions)


def target_embedded(emitter: Emitter) -> Value:
    """`tokens` at `position` to states [*tokens.shape, d_model]."""
    position, offset = emitter.inputs["position"], emitter.config.position_offset
    if emitter.config.positions == "relative":
        return _embedded(emitter, "decoder", emitter.inputs["tokens"], None)
    with emitter.at("decoder.positions"):
        if offset:
            dtype = np.int32 if emitter.graph.dialect == "ort" else np.int64
            position = emitter.node("Add", position, emitter.constant(offset, dtype))
        positions = emitter.node("Gather", emitter.weight("decoder.positions.table"), position)
    return _embedded(emitter, "decoder", emitter.inputs["tokens"], positions)


def _embedded(emitter: Emitter, side: str, ids: Value, positions: Value | None) -> Value:
    config = emitter.config
    table = "encoder" if config.tie_source_target else side
    with emitter.at(f"{side}.tokens"):
        states = emitter.node("Gather", emitter.weight(f"{table}.tokens.weight"), ids)
        if config.embedding_scale != 1.0:
            states = emitter.node("Mul", states, emitter.number(config.embedding_scale))
        if positions is not None:
            states = emitter.node("Add", states, positions)
    return emitter.normed(f"{side}.embedding_norm", states) if config.embedding_norm else states


def source_distances(emitter: Emitter) -> Value:
    """What relative positions add to the scores of the encoder's self-attention: [1, heads, src, src]."""
    with emitter.at("encoder.positions"):
        size = emitter.shape_node("Squeeze", emitter.shape_of(emitter.inputs["src_ids"], 1))
        every = emitter.node("Range", emitter.constant(0, np.int64), size, emitter.constant(1, np.int64))
        distance = emitter.node("Sub", emitter.node("Unsqueeze", every, emitter.sizes(1)), every)
        most = emitter.config.max_distance
        low, high = emitter.constant(-most, np.int64), emitter.constant(most, np.int64)
        rows = emitter.node("Add", emitter.node("Clip", distance, low, high), high)
        added = emitter.node("Gather", emitter.weight("encoder.positions.table"), rows)  # [src, src, heads]
        added = emitter.node("Transpose", added, attributes={"perm": (2, 0, 1)})
        return emitter.node("Unsqueeze", added, emitter.sizes(0))


def target_distances(emitter: Emitter, distance: Value) -> Value:
    """The same for the decoder, where a key is `distance` [rows, queries, keys] (int64, not below 0) before a query:
    [rows, heads, queries, keys]."""
    with emitter.at("decoder.positions"):
        most = emitter.constant(emitter.config.max_distance, np.int64)
        rows = emitter.node("Clip", distance, emitter.constant(0, np.int64), most)
        added = emitter.node("Gather", emitter.weight("decoder.positions.table"), rows)
        return emitter.node("Transpose", added, attributes={"perm": (0, 3, 1, 2)})


def encoder_stack(emitter: Emitter, states: Value, attention: Sublayer) -> Value:
    """All encoder layers, whose self-attention is `attention`, and the norm after them."""
    sublayers = (attention, partial(_fed_forward, emitter))
    return _stack(emitter, "encoder", emitter.config.n_encoder_layers, states, sublayers)


def decoder_stack(emitter: Emitter, states: Value, own: Sublayer, cross: Sublayer) -> Value:
    """All decoder layers, whose self- and cross-attention are `own` and `cross`, and the norm after them."""
    sublayers = (own, cross, partial(_fed_forward, emitter))
    return _stack(emitter, "decoder", emitter.config.n_decoder_layers, states, sublayers)


def attention_weights(emitter: Emitter, path: str, query: Value, key: Value, mask: Value) -> Value:
    """The weights that the cross-attention at `path` mixes its values with, computed beside it: a fused operator keeps them.

    They are softmax(query * key / sqrt(head_dim)) in float32, whatever the graph computes in.

    Args:
        query: [batch, heads, beam, head_dim].
        key: [batch, heads, src, head_dim].
        mask: bool, which broadcasts to [batch, heads, beam, src], True for what may be attended to.

    Returns:
        [1, batch * beam, heads, src].
    """
    with emitter.at(f"{path}/attention"):
        query, key = emitter.float32(query), emitter.float32(key)
        scores = emitter.node("MatMul", query, emitter.node("Transpose", key, attributes={"perm": (0, 1, 3, 2)}))
        scores = emitter.node("Mul", scores, emitter.constant(emitter.config.head_dim**-0.5, np.float32))
        scores = emitter.node("Where", mask, scores, emitter.constant(HIDDEN, np.float32))
        weights = emitter.node("Softmax", scores, attributes={"axis": -1})
        weights = emitter.node("Transpose", weights, attributes={"perm": (0, 2, 1, 3)})
        return emitter.reshaped(weights, 1, -1, 0, 0)


def tell_attention(emitter: Emitter, weights: Sequence[Value]) -> None:
    """The `attention_weights` of all layers are the graph's output."""
    emitter.node("Concat", *weights, attributes={"axis": 0}, output="attention")


def _stack(emitter: Emitter, side: str, n_layers: int, states: Value, sublayers: Sequence[Sublayer]) -> Value:
    """The layers of a side and the norm after them, their norms before or after the sublayers, as `models.transformer.Layer`
    has them."""
    config = emitter.config
    last = f"{side}.norm" if config.final_norm else None
    branches = [
        (f"{side}.layers.{i}", f"{side}.layers.{i}.norms.{0 if config.shared_norm else index}", sublayer)
        for i in range(n_layers)
        for index, sublayer in enumerate(sublayers)
    ]
    if not config.norm_first:
        for layer, norm, sublayer in branches:
            _, states = emitter.added_and_normed(layer, norm, states, sublayer(layer, states))
        return emitter.normed(last, states) if last else states
    # The norm after a sum is that of the next sublayer.
    inner = emitter.normed(branches[0][1], states)
    for (layer, _, sublayer), (_, norm, _) in pairwise(branches):
        states, inner = emitter.added_and_normed(layer, norm, states, sublayer(layer, inner))
    layer, _, sublayer = branches[-1]
    branch = sublayer(layer, inner)
    if last:
        return emitter.added_and_normed(layer, last, states, branch)[1]
    with emitter.at(layer):
        return emitter.added(states, branch)


def _fed_forward(emitter: Emitter, path: str, inner: Value) -> Value:
    hidden = emitter.projected(f"{path}.feed_forward.hidden", inner)
    with emitter.at(f"{path}.feed_forward"):
        hidden = emitter.activated(hidden)
    if emitter.config.gated:
        gate = emitter.projected(f"{path}.feed_forward.gate", inner)
        with emitter.at(f"{path}.feed_forward"):
            hidden = emitter.node("Mul", hidden, gate)
    return emitter.projected(f"{path}.feed_forward.output", hidden)
