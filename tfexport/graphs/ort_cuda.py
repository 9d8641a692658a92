"""The graphs of the dialect `ort-cuda`, emitted from the config with few launches on ONNX Runtime's CUDA provider.

They compute what `models.transformer` computes. What differs from the standard graphs:

    states       [n, d_model], so that a projection is one Gemm, which includes its bias and reads weights as they are stored
    projections  one for query, key and value of self-attention, which files in half precision store as one tensor
    norms        SkipLayerNormalization: the bias of the projection before, the residual sum and the norm
    heads        lie side by side, as projections leave them: Attention takes them so, and transposes nothing
    greedy       GroupQueryAttention: writes the cache in place and reads its filled slots only; each row has its own cache
    beams        the hypotheses of a sentence are queries to one cache that only grows; a mask has the past of each
    best tokens  TopK of the logits; their log-probabilities from LogSoftmax

The CPU provider has all of these operators too, so that a graph is checked there. Where an operator does not take a model or
a precision, the standard form takes its place. So it does around modules that a budget keeps in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.graphs import layers
from tfexport.graphs.emitter import Emitter, Value
from tfexport.graphs.mixed_precision import MixedPrecision
from tfexport.graphs.projections import PARTS, STACKED, Projection, decoder_projections, encoder_projections
from tfexport.graphs.stored_weights import StoredWeights


def emit(graph: contract.GraphSpec, config: ModelConfig, stored: StoredWeights, keep: Collection[str] = ()) -> ir.Model:
    """A graph of the dialect `ort-cuda` over the weights in `stored`; of half precision, the modules `keep` are float32."""
    mixed = MixedPrecision(graph, StoredWeights(stored.folder / contract.WEIGHTS_FILE), keep) if keep else None
    emitter = Emitter(graph, config, stored, _projections(graph, config), _linear, mixed)
    _EMIT[graph.role](emitter)
    return emitter.model()


def _projections(graph: contract.GraphSpec, config: ModelConfig) -> list[Projection]:
    """Of query, key and value both the one projection and the three: a graph takes either."""
    own_output = graph.precision != "float32"  # half precision has the output projection apart, in float32
    together = list(decoder_projections(config, own_output=own_output))
    encoder = [part for projection in encoder_projections(config) for part in projection.split()]
    return [*encoder, *together, *(part for projection in together for part in projection.split())]


def _linear(emitter: Emitter, projection: Projection, states: Value) -> Value:
    """States [n, in] to [n, out]. A node that adds a bias by itself may take the product and the bias apart."""
    name = f"{projection.name}.weight"
    weight = emitter.weight(name) if emitter.has_weight(name) else emitter.stacked(projection.weights)
    transposed = {"transB": 1}
    if not projection.biases:
        return emitter.node("Gemm", states, weight, attributes=transposed)
    name = f"{projection.name}.bias"
    bias = emitter.weight(name) if emitter.has_weight(name) else emitter.stacked(projection.biases)
    biased = emitter.node("Gemm", states, weight, bias, attributes=transposed)
    if emitter.keeps(emitter.path):
        return biased
    return emitter.add_bias(biased, emitter.node("Gemm", states, weight, attributes=transposed), bias)


def _encoder(emitter: Emitter) -> None:
    """src_ids [batch, src] and src_len [batch] to the cross keys and values of each layer [batch, src, d_attention]."""
    config = emitter.config
    size = emitter.shape_of(emitter.inputs["src_ids"])
    grid = _shape(emitter, size, config.d_attention)
    bias = layers.source_position_bias(emitter) if config.positions == "relative" else None

    def self_attention(path: str, inner: Value) -> Value:
        path = f"{path}.self_attention"
        query, key, value = (_reshaped(emitter, path, emitter.project(f"{path}.{part}", inner), grid) for part in PARTS)
        mixed = _attention(emitter, path, query, key, value, mask=bias, length=emitter.inputs["src_len"])
        return emitter.project(f"{path}.output", mixed)

    states = emitter.reshape(layers.embed_source(emitter), -1, config.d_model)
    states = layers.encoder_stack(emitter, states, self_attention)
    for i in range(config.n_decoder_layers):
        for part in ("key", "value"):
            path = f"decoder.layers.{i}.cross_attention"
            flat = emitter.project(f"{path}.{part}", states)
            with emitter.module(path):
                emitter.node("Reshape", flat, grid, output=f"cross.{i}.{part}", floats="stored")


def _step(emitter: Emitter) -> None:
    """One token of each row to logits, best tokens and the cache. States are [rows, d_model]."""
    config, inputs = emitter.config, emitter.inputs
    tokens = inputs["tokens"]
    if emitter.graph.step == "beam_step":
        grid = _shape(emitter, emitter.shape_of(tokens), -1)  # [batch, beam, all of a row]
        own_attention = _beam_attention(emitter)
    else:
        grid = emitter.sizes(-1, 1, config.d_attention)
        own_attention = _greedy_attention(emitter)

    def self_attention(path: str, inner: Value) -> Value:
        path = f"{path}.self_attention"
        return emitter.project(f"{path}.output", own_attention(path, inner, grid))

    def cross_attention(path: str, inner: Value) -> Value:
        layer, path = path.rpartition(".")[2], f"{path}.cross_attention"
        query = _reshaped(emitter, path, emitter.project(f"{path}.query", inner), grid)
        key, value = (inputs[f"cross.{layer}.{part}"] for part in ("key", "value"))
        mixed = _attention(emitter, path, query, key, value, length=inputs["src_len"])
        return emitter.project(f"{path}.output", mixed)

    states = layers.embed_target(emitter)
    if emitter.graph.step == "beam_step":
        states = emitter.reshape(states, -1, config.d_model)
    states = layers.decoder_stack(emitter, states, self_attention, cross_attention)
    logits = emitter.project("output", emitter.to_float32(states))
    emitter.set_output(logits, "logits")
    _best_tokens(emitter, logits)


OwnAttention = Callable[[str, Value, Value], Value]
"""Emits the self-attention at a path: from its states [rows, d_model] and a shape [.., one or all of a row's numbers] to
[rows, d_attention], without the output projection."""


def _greedy_attention(emitter: Emitter) -> OwnAttention:
    """Each row has a cache of its own, of which `position` slots are filled."""
    config, position = emitter.config, emitter.inputs["position"]
    total = _cache_length(emitter)
    grouped = contract.groups_queries_on_cuda(config, emitter.graph.precision)

    def grouped_attention(path: str, inner: Value, grid: Value) -> Value:
        layer = path.split(".")[2]
        if emitter.keeps(*(f"{path}.{part}" for part in PARTS)):
            query, key, value = (_row(emitter, path, emitter.project(f"{path}.{part}", inner)) for part in PARTS)
        else:
            query, key, value = _row(emitter, path, emitter.project(f"{path}.{STACKED}", inner)), None, None
        with emitter.module(path):
            mixed, *_ = emitter.contrib(
                "GroupQueryAttention",
                *(query, key, value, emitter.inputs[f"past.{layer}.key"], emitter.inputs[f"past.{layer}.value"]),
                *(position, total),
                outputs=("", f"present.{layer}.key", f"present.{layer}.value"),
                attributes={"num_heads": config.n_heads, "kv_num_heads": config.n_heads},
            )
            return emitter.reshape(mixed, -1, config.d_attention)

    standard = _standard_greedy_attention(emitter)

    def attention(path: str, inner: Value, grid: Value) -> Value:
        emit_attention = grouped_attention if grouped and not emitter.keeps(path) else standard
        return emit_attention(path, inner, grid)

    return attention


def _row(emitter: Emitter, path: str, states: Value) -> Value:
    """[rows, n] to [rows, 1, n]."""
    with emitter.module(path):
        return emitter.node("Unsqueeze", states, emitter.sizes(1))


def _cache_length(emitter: Emitter) -> Value:
    """The slots of a cache, int32 [1]: as many as any row can have filled. It is a shape, which the host knows."""
    length = emitter.shape_of(emitter.inputs["past.0.key"], 2, 3)
    return emitter.shape_node("Cast", length, attributes={"to": int(ir.DataType.INT32)})


def _standard_greedy_attention(emitter: Emitter) -> OwnAttention:
    """`_greedy_attention` in standard operators."""
    config, inputs = emitter.config, emitter.inputs

    def attention(path: str, inner: Value, grid: Value) -> Value:
        layer = path.split(".")[2]
        with emitter.module("decoder"):
            position = emitter.node("Cast", inputs["position"], attributes={"to": int(ir.DataType.INT64)})
            filled = emitter.node("Add", position, emitter.constant(1, np.int64))
        bias = _cache_position_bias(emitter, position) if config.positions == "relative" else None
        states = _query_key_value(emitter, path, inner)
        with emitter.module(path):
            query, *new = (emitter.reshape(part, -1, config.n_heads, 1, config.head_dim) for part in states)
            key, value = (
                emitter.node(
                    "TensorScatter",
                    *(inputs[f"past.{layer}.{part}"], slot, position),
                    attributes={"axis": -2, "mode": "linear"},
                    output=f"present.{layer}.{part}",
                    floats="stored",
                )
                for part, slot in zip(("key", "value"), new, strict=True)
            )
            valid = (bias, None, None, filled)
            scale = {"scale": config.head_dim**-0.5}
            mixed = emitter.node("Attention", query, key, value, *valid, attributes=scale)
            return emitter.reshape(mixed, -1, config.d_attention)

    return attention


def _cache_position_bias(emitter: Emitter, position: Value) -> Value:
    """The relative position bias of a row's cache: [rows, heads, 1, cache]."""
    with emitter.module("decoder.positions"):
        places = layers.key_places(emitter, emitter.shape_of(emitter.inputs["past.0.key"], 2, 3))
        queries = emitter.node("Unsqueeze", position, emitter.sizes(1, 2))
        return layers.target_position_bias(emitter, emitter.node("Sub", queries, places))


def _beam_attention(emitter: Emitter) -> OwnAttention:
    """The hypotheses of a sentence share one cache; `mask` has the slots of each hypothesis' past.

    query, key, value ── Split ── query ─────────────────────────────> Attention [batch, beam, d_attention]
                              ── key, value ── TensorScatter at `slot` ──> keys, values [batch, cache, d_attention]
    mask ── Where(mask, 0 or bias, masked), once a step ───────────────> mask [batch, 1, beam, cache]
    """
    config, inputs = emitter.config, emitter.inputs
    mask = _slot_mask(emitter)

    def attention(path: str, inner: Value, grid: Value) -> Value:
        layer = path.split(".")[2]
        query, *new = (_reshaped(emitter, path, part, grid) for part in _query_key_value(emitter, path, inner))
        with emitter.module(path):
            key, value = (
                emitter.node(
                    "TensorScatter",
                    *(inputs[f"past.{layer}.{part}"], slots, inputs["slot"]),
                    attributes={"axis": 1, "mode": "linear"},
                    output=f"present.{layer}.{part}",
                    floats="stored",
                )
                for part, slots in zip(("key", "value"), new, strict=True)
            )
        return _attention(emitter, path, query, key, value, mask=mask)

    assert config.n_decoder_layers > 0
    return attention


def _slot_mask(emitter: Emitter) -> Value:
    """What is added to the scores of a shared cache's slots: [batch, 1 or heads, beam, cache]."""
    seen = emitter.scalar(0.0)
    if emitter.config.positions == "relative":
        seen = layers.slot_position_bias(emitter)
    with emitter.module("mask"):
        masked = emitter.scalar(layers.masked_score(emitter.graph.precision))
        return emitter.node("Where", emitter.inputs["mask"], seen, masked)


def _query_key_value(emitter: Emitter, path: str, inner: Value) -> list[Value]:
    """Query, key and value [rows, d_attention] of the self-attention at `path`."""
    if emitter.keeps(*(f"{path}.{part}" for part in PARTS)):
        return [emitter.project(f"{path}.{part}", inner) for part in PARTS]
    together = emitter.project(f"{path}.{STACKED}", inner)
    with emitter.module(path):
        return list(emitter.nodes("Split", together, outputs=3, attributes={"axis": -1, "num_outputs": 3}))


def _shape(emitter: Emitter, size: Value, *more: int) -> Value:
    """`size` with `more` axes after it."""
    return emitter.shape_node("Concat", size, emitter.sizes(*more), attributes={"axis": 0})


def _reshaped(emitter: Emitter, path: str, states: Value, shape: Value) -> Value:
    with emitter.module(path):
        return emitter.node("Reshape", states, shape)


def _attention(
    emitter: Emitter,
    path: str,
    query: Value,
    key: Value,
    value: Value,
    *,
    mask: Value | None = None,
    length: Value | None = None,
) -> Value:
    """Attention of `query` [batch, queries, d_attention]; returns [batch * queries, d_attention].

    Args:
        key, value: [batch, keys, d_attention].
        mask: added to the scores, [batch, heads or 1, queries, keys].
        length: int64 [batch], the number of valid keys; all if None.
    """
    heads = emitter.config.n_heads
    attributes = {"scale": emitter.config.head_dim**-0.5, "q_num_heads": heads, "kv_num_heads": heads}
    valid = (mask, None, None, length) if length is not None else (mask,)
    with emitter.module(path):
        mixed = emitter.node("Attention", query, key, value, *valid, attributes=attributes)
        return emitter.reshape(mixed, -1, emitter.config.d_attention)


def _best_tokens(emitter: Emitter, logits: Value) -> None:
    """The best tokens of each row of `logits` and their log-probabilities."""
    count = emitter.sizes(min(contract.BEST, emitter.config.tgt_vocab_size))
    _, ids = emitter.nodes("TopK", logits, count, outputs=("", "best.ids"))
    log_probs = emitter.node("LogSoftmax", logits, attributes={"axis": -1})
    emitter.node("GatherElements", log_probs, ids, attributes={"axis": 1}, output="best.log_probs")


_EMIT: dict[contract.Role, Callable[[Emitter], None]] = {
    "encoder": _encoder,
    "decoder_step": _step,
    "beam_step": _step,
}
