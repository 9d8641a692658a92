"""The graphs of the dialect `ort`, emitted from the config in the form that is fastest on ONNX Runtime's CPU provider.

They compute what `models.transformer` computes, from the same weights file. What differs from the exported graphs:

    states       in float32 [n, d_model] between attentions, so that every projection is one Gemm with its bias in it
    projections  query, key and value are one Gemm; ReLU is in the Gemm; the cross keys/values of all layers are one Gemm
    greedy       GroupQueryAttention: writes the cache in place and reads its filled slots only, each row its own
    beams        the hypotheses of a sentence are queries to one cache that only grows (see `_shared_cache`)
    best tokens  log-softmax and top-k of as many as are asked for

Measured against the exported graphs in docs/design.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.emitter import CONTRIB, HIDDEN, Emitter, Linear, Value
from tfexport.stored_weights import StoredWeights


def emit(graph: contract.GraphSpec, config: ModelConfig, stored: StoredWeights, linear: Linear) -> ir.Model:
    """A graph of the dialect `ort`, its weights in `stored`, its projections made by `linear`."""
    emitter = Emitter(graph, config, stored, linear)
    if graph.role == "encoder":
        _encoder(emitter)
    else:
        _step(emitter, _own_caches if graph.role == "decoder_step" else _shared_cache)
    return emitter.model()


def _encoder(emitter: Emitter) -> None:
    """src_ids [batch, src] and src_len [batch] to `cross`, the cross keys and values of all layers."""
    config = emitter.config
    ids, length = emitter.inputs["src_ids"], emitter.inputs["src_len"]
    size = emitter.node("Shape", ids)
    positions = _first_positions(emitter, emitter.node("Shape", ids, attributes={"start": 1}))
    states = emitter.two_axes(_embedded(emitter, "encoder", ids, positions))
    grid = emitter.node("Concat", size, emitter.constant([config.d_model], np.int64), attributes={"axis": 0})

    def attended(path: str, inner: Value) -> Value:
        query, key, value = (
            emitter.three_axes(emitter.projected(f"{path}.self_attention.{part}", inner), grid)
            for part in ("query", "key", "value")
        )
        mixed = emitter.attention(query, key, value, length=length, bias=None)
        return emitter.projected(f"{path}.self_attention.output", mixed)

    for i in range(config.n_encoder_layers):
        path = f"encoder.layers.{i}"
        states = _layer(emitter, path, states, (attended, partial(_fed_forward, emitter)))
    if config.final_norm:
        states = emitter.normed("encoder.norm", states)
    layout = emitter.constant([2 * config.n_decoder_layers, config.n_heads, config.head_dim], np.int64)
    shape = emitter.node("Concat", size, layout, attributes={"axis": 0})
    cross = emitter.node("Reshape", emitter.projected("cross", states), shape)  # [batch, src, tensors, heads, head_dim]
    emitter.node("Transpose", cross, attributes={"perm": (2, 0, 3, 1, 4)}, output="cross")


def _first_positions(emitter: Emitter, count: Value) -> Value:
    """The position vectors [count, d_model] of the first `count` [1] positions."""
    offset = emitter.config.position_offset
    start = emitter.constant([offset], np.int64)
    end = emitter.node("Add", count, start) if offset else count
    return emitter.node("Slice", emitter.weight("encoder.positions.table"), start, end)


def _embedded(emitter: Emitter, side: str, ids: Value, positions: Value) -> Value:
    """Token vectors [*ids.shape, d_model] with `positions` added."""
    config = emitter.config
    table = "encoder" if config.tie_source_target else side
    with emitter.at(f"{side}.tokens"):
        states = emitter.node("Gather", emitter.weight(f"{table}.tokens.weight"), ids)
        if config.embedding_scale != 1.0:
            states = emitter.node("Mul", states, emitter.constant(config.embedding_scale, np.float32))
        return emitter.node("Add", states, positions)


Sublayer = Callable[[str, Value], Value]
"""What a layer at a path does to states in a residual branch."""


def _layer(emitter: Emitter, path: str, states: Value, sublayers: Sequence[Sublayer]) -> Value:
    """A layer, its norms before or after the sublayers, as `models.transformer.Layer` has them."""
    config = emitter.config
    for index, sublayer in enumerate(sublayers):
        norm = f"{path}.norms.{0 if config.shared_norm else index}"
        inner = emitter.normed(norm, states) if config.norm_first else states
        branch = sublayer(path, inner)
        with emitter.at(path):
            # Not SkipLayerNormalization, whose kernel is the slower of the two.
            states = emitter.node("Add", states, branch)
        if not config.norm_first:
            states = emitter.normed(norm, states)
    return states


def _fed_forward(emitter: Emitter, path: str, inner: Value) -> Value:
    hidden = emitter.projected(f"{path}.feed_forward.hidden", inner)
    with emitter.at(f"{path}.feed_forward"):
        hidden = emitter.activated(hidden)
    return emitter.projected(f"{path}.feed_forward.output", hidden)


SelfAttention = Callable[["Emitter", int, Value], Value]
"""Writes the new keys and values of a layer to its cache and attends to it: `query_key_value` [.., 3 * d_model] to
[.., d_model]."""


def _step(emitter: Emitter, self_attention: SelfAttention) -> None:
    """One token of each row to logits, best tokens and the cache."""
    config, inputs = emitter.config, emitter.inputs
    position = inputs["position"]
    if config.position_offset:
        position = emitter.node("Add", position, emitter.constant(config.position_offset, np.int32))
    positions = emitter.node("Gather", emitter.weight("decoder.positions.table"), position)
    states = _embedded(emitter, "decoder", inputs["tokens"], positions)
    # The hypotheses of a sentence are so many queries to its one set of cross keys and values.
    if emitter.role == "beam_step":
        states, grid = emitter.two_axes(states), _shape(emitter, inputs["tokens"], config.d_model)
    else:
        grid = emitter.constant([-1, 1, config.d_model], np.int64)
        states = states if emitter.flat else emitter.node("Reshape", states, grid)

    def attended(path: str, inner: Value) -> Value:
        layer = int(path.rpartition(".")[2])
        own = emitter.projected(f"{path}.self_attention.query_key_value", inner)
        with emitter.at(f"{path}.self_attention"):
            mixed = self_attention(emitter, layer, own)
        return emitter.projected(f"{path}.self_attention.output", mixed)

    def crossed(path: str, inner: Value) -> Value:
        layer = path.rpartition(".")[2]
        query = emitter.projected(f"{path}.cross_attention.query", inner)
        with emitter.at(f"{path}.cross_attention"):
            query = emitter.three_axes(query, grid)
            key, value = (inputs[f"cross.{layer}.{part}"] for part in ("key", "value"))
            mixed = emitter.attention(query, key, value, length=inputs["src_len"], bias=None)
        return emitter.projected(f"{path}.cross_attention.output", mixed)

    for i in range(config.n_decoder_layers):
        states = _layer(emitter, f"decoder.layers.{i}", states, (attended, crossed, partial(_fed_forward, emitter)))
    if config.final_norm:
        states = emitter.normed("decoder.norm", states)
    logits = emitter.projected("output", states if emitter.flat else emitter.reshaped(states, -1, config.d_model))
    emitter.is_output(logits, "logits")
    log_probs = emitter.node("LogSoftmax", logits, attributes={"axis": -1})
    emitter.nodes("TopK", log_probs, inputs["count"], outputs=("best.log_probs", "best.ids"))


def _shape(emitter: Emitter, tensor: Value, *more: int) -> Value:
    """The shape of `tensor` with `more` axes after it."""
    axes = (emitter.node("Shape", tensor), emitter.constant(more, np.int64))
    return emitter.node("Concat", *axes, attributes={"axis": 0})


def _own_caches(emitter: Emitter, layer: int, query_key_value: Value) -> Value:
    """Each row has a cache of its own, of which `position` slots are filled.

        query_key_value [rows, 1, 3 * d_model] ──> GroupQueryAttention ──> [rows, 1, d_model]
        past [rows, heads, cache, head_dim] ─────>                     ──> present, the same buffer, one slot more

    As many key heads as query heads: the operator is taken for its in-place cache, and because it reads no empty slot.
    """
    config, inputs = emitter.config, emitter.inputs
    mixed, *_ = emitter.nodes(
        "GroupQueryAttention",
        emitter.three_axes(query_key_value, emitter.constant([-1, 1, 3 * config.d_model], np.int64)),
        *(None, None, inputs[f"past.{layer}.key"], inputs[f"past.{layer}.value"]),
        *(inputs["position"], inputs["total"]),
        outputs=("", f"present.{layer}.key", f"present.{layer}.value"),
        attributes={"num_heads": config.n_heads, "kv_num_heads": config.n_heads},
        domain=CONTRIB,
    )
    return emitter.two_axes(mixed)


def _shared_cache(emitter: Emitter, layer: int, query_key_value: Value) -> Value:
    """The hypotheses of a sentence share one cache; `mask` tells each its own past in it.

    Split ── query ──────────────────────────────────────────> MultiHeadAttention [batch, beam, d_model]
          ── key, value [batch, heads, beam, head_dim] ── TensorScatter at `slot` ──>    keys, values [.., cache, ..]
    mask ── Where(mask, 0, HIDDEN) ───────────────────────────────────────────────>      bias [batch, 1, beam, cache]
    """
    config, inputs = emitter.config, emitter.inputs
    parts = emitter.nodes("Split", query_key_value, outputs=3, attributes={"axis": -1, "num_outputs": 3})
    query = emitter.three_axes(parts[0], _shape(emitter, inputs["tokens"], config.d_model))
    heads = _shape(emitter, inputs["tokens"], config.n_heads, config.head_dim)
    present = []
    for part, new in zip(("key", "value"), parts[1:], strict=True):
        new = emitter.node("Transpose", emitter.node("Reshape", new, heads), attributes={"perm": (0, 2, 1, 3)})
        present.append(
            emitter.node(
                "TensorScatter",
                *(inputs[f"past.{layer}.{part}"], new, inputs["slot"]),
                attributes={"axis": -2, "mode": "linear"},
                output=f"present.{layer}.{part}",
            )
        )
    seen, hidden = emitter.constant(0.0, np.float32), emitter.constant(HIDDEN, np.float32)
    bias = emitter.node("Where", inputs["mask"], seen, hidden)
    return emitter.attention(query, present[0], present[1], length=None, bias=bias)
