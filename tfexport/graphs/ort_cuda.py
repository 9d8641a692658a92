"""The graphs of the dialect `ort-cuda`, emitted from the config with few launches on ONNX Runtime's CUDA provider.

They compute the same as `models.transformer`. Differences from the standard graphs:

    states       [n, d_model], so that a projection is one Gemm, which includes its bias and reads weights as they are stored
    projections  one for query, key and value of self-attention, which files in half precision store as one tensor
    norms        SkipLayerNormalization: the bias of the projection before, the residual sum and the norm
    heads        are side by side, as projections return them; Attention accepts this layout and transposes nothing
    greedy       GroupQueryAttention: writes the cache in place and reads its filled slots only; each row has its own cache
    beams        the hypotheses of a sentence are queries to one cache that only grows; a mask has the past of each
    best tokens  TopK of the logits; their log-probabilities from LogSoftmax

The CPU provider also has all of these operators, so graphs are checked there. If an operator does not support a model or a
precision, the standard form replaces it, as it does around modules that a budget keeps in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.dialects import groups_queries_on_cuda
from tfexport.graphs import layers
from tfexport.graphs.emitter import Emitter, Value
from tfexport.graphs.mixed_precision import MixedPrecision
from tfexport.graphs.projections import PARTS, STACKED, Projection, decoder_projections, encoder_projections
from tfexport.graphs.stored_weights import StoredWeights


def emit(graph: contract.GraphSpec, config: ModelConfig, stored: StoredWeights, keep: Collection[str] = ()) -> ir.Model:
    """A graph of the dialect `ort-cuda` over the weights in `stored`; in half precision, the modules `keep` are float32."""
    mixed = MixedPrecision(graph, StoredWeights(stored.folder / contract.WEIGHTS_FILE), keep) if keep else None
    emitter = Emitter(graph, config, stored, _projections(graph, config), _linear, mixed)
    _EMIT[graph.role](emitter)
    return emitter.model()


def _projections(graph: contract.GraphSpec, config: ModelConfig) -> list[Projection]:
    """The projections. Query, key and value have both a joint projection and three separate ones; a graph uses either."""
    own_output = graph.precision != "float32"  # half precision has a separate output projection in float32
    together = list(decoder_projections(config, own_output=own_output))
    encoder = [part for projection in encoder_projections(config) for part in projection.split()]
    return [*encoder, *together, *(part for projection in together for part in projection.split())]


def _linear(emitter: Emitter, projection: Projection, states: Value) -> Value:
    """States [n, in] to [n, out]. A node that adds a bias itself may use the product and the bias separately."""
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
        valid = {"mask": bias, "length": emitter.inputs["src_len"]}
        mixed = _attention(emitter, path, config.encoder_heads, query, key, value, **valid)
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
    grouped = groups_queries_on_cuda(config, emitter.graph.precision)

    def self_attention(path: str, inner: Value) -> Value:
        path = f"{path}.self_attention"
        if emitter.graph.step == "beam_step":
            mixed = _beam_attention(emitter, path, inner)
        elif grouped and not emitter.keeps(path):
            mixed = _grouped_attention(emitter, path, inner)
        else:
            mixed = _standard_attention(emitter, path, inner)
        return emitter.project(f"{path}.output", mixed)

    def cross_attention(path: str, inner: Value) -> Value:
        layer, path = path.rpartition(".")[2], f"{path}.cross_attention"
        query = _reshaped(emitter, path, emitter.project(f"{path}.query", inner), _rows_by_sentence(emitter))
        key, value = (inputs[f"cross.{layer}.{part}"] for part in ("key", "value"))
        mixed = _attention(emitter, path, config.n_heads, query, key, value, length=inputs["src_len"])
        return emitter.project(f"{path}.output", mixed)

    states = layers.embed_target(emitter)
    if emitter.graph.step == "beam_step":
        states = emitter.reshape(states, -1, config.d_model)
    states = layers.decoder_stack(emitter, states, self_attention, cross_attention)
    logits = emitter.project("output", emitter.to_float32(states))
    emitter.set_output(logits, "logits")
    _best_tokens(emitter, logits)


def _rows_by_sentence(emitter: Emitter) -> Value:
    """The shape [batch, hypotheses, all numbers of a row]."""
    if emitter.graph.step == "beam_step":
        return _shape(emitter, emitter.shape_of(emitter.inputs["tokens"]), -1)
    return emitter.sizes(-1, 1, emitter.config.d_attention)


def _grouped_attention(emitter: Emitter, path: str, inner: Value) -> Value:
    """Self-attention of the states [rows, d_model] to the caches of the rows, which have `position` filled slots.

        query, key, value [rows, 1, 3 * d_attention] > GroupQueryAttention > [rows, 1, d_attention]
        past [rows, heads, cache, head_dim] ──────────>                     ──> present, the same buffer, one slot more

    There are as many key heads as query heads: the operator is used because it updates the cache in place and reads no empty
    slot. Its total length is the length of the cache instead of the longest row: a shape, which the host knows.
    """
    config, inputs, layer = emitter.config, emitter.inputs, path.split(".")[2]
    apart = emitter.keeps(*(f"{path}.{part}" for part in PARTS))
    projected = [emitter.project(f"{path}.{part}", inner) for part in (PARTS if apart else [STACKED])]
    with emitter.module(path):
        rows: list[Value | None] = [emitter.node("Unsqueeze", part, emitter.sizes(1)) for part in projected]
        length = emitter.shape_of(inputs["past.0.key"], 2, 3)
        total = emitter.shape_node("Cast", length, attributes={"to": int(ir.DataType.INT32)})
        mixed, *_ = emitter.contrib(
            "GroupQueryAttention",
            *(rows if apart else [*rows, None, None]),
            *(inputs[f"past.{layer}.key"], inputs[f"past.{layer}.value"], inputs["position"], total),
            outputs=("", f"present.{layer}.key", f"present.{layer}.value"),
            attributes={"num_heads": config.n_heads, "kv_num_heads": config.n_heads},
        )
        return emitter.reshape(mixed, -1, config.d_attention)


def _standard_attention(emitter: Emitter, path: str, inner: Value) -> Value:
    """`_grouped_attention` in standard operators."""
    config, inputs, layer = emitter.config, emitter.inputs, path.split(".")[2]
    with emitter.module("decoder"):
        position = emitter.node("Cast", inputs["position"], attributes={"to": int(ir.DataType.INT64)})
        filled = emitter.node("Add", position, emitter.constant(1, np.int64))
    bias = _cache_position_bias(emitter, position) if config.positions == "relative" else None
    states = _query_key_value(emitter, path, inner)
    with emitter.module(path):
        query, *new = (emitter.reshape(part, -1, config.n_heads, 1, config.head_dim) for part in states)
        key, value = (
            _written(emitter, f"{layer}.{part}", slot, position, axis=-2)
            for part, slot in zip(("key", "value"), new, strict=True)
        )
        valid = (bias, None, None, filled)
        scale = {"scale": config.head_dim**-0.5}
        mixed = emitter.node("Attention", query, key, value, *valid, attributes=scale)
        return emitter.reshape(mixed, -1, config.d_attention)


def _written(emitter: Emitter, name: str, slots: Value, place: Value, *, axis: int) -> Value:
    """The cache `name` with `slots` written from `place` on; in place if past and present share a buffer."""
    attributes = {"axis": axis, "mode": "linear"}
    cache = (emitter.inputs[f"past.{name}"], slots, place)
    return emitter.node("TensorScatter", *cache, attributes=attributes, output=f"present.{name}", floats="stored")


def _cache_position_bias(emitter: Emitter, position: Value) -> Value:
    """The relative position bias of a row's cache: [rows, heads, 1, cache]."""
    with emitter.module("decoder.positions"):
        places = layers.key_places(emitter, emitter.shape_of(emitter.inputs["past.0.key"], 2, 3))
        queries = emitter.node("Unsqueeze", position, emitter.sizes(1, 2))
        return layers.target_position_bias(emitter, emitter.node("Sub", queries, places))


def _beam_attention(emitter: Emitter, path: str, inner: Value) -> Value:
    """The hypotheses of a sentence share one cache; `mask` has the slots of each hypothesis' past.

    query, key, value ── Split ── query ─────────────────────────────> Attention [batch, beam, d_attention]
                              ── key, value ── TensorScatter at `slot` ──> keys, values [batch, cache, d_attention]
    mask ── Where(mask, 0 or bias, masked), once a step ───────────────> mask [batch, 1, beam, cache]
    """
    layer, grid = path.split(".")[2], _rows_by_sentence(emitter)
    query, *new = (_reshaped(emitter, path, part, grid) for part in _query_key_value(emitter, path, inner))
    with emitter.module(path):
        key, value = (
            _written(emitter, f"{layer}.{part}", slots, emitter.inputs["slot"], axis=1)
            for part, slots in zip(("key", "value"), new, strict=True)
        )
    return _attention(emitter, path, emitter.config.n_heads, query, key, value, mask=_slot_mask(emitter))


def _slot_mask(emitter: Emitter) -> Value:
    """The number that is added to the scores of a shared cache's slots: [batch, 1 or heads, beam, cache]."""
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
    heads: int,
    query: Value,
    key: Value,
    value: Value,
    *,
    mask: Value | None = None,
    length: Value | None = None,
) -> Value:
    """Attention of `query` [batch, queries, d_attention] with so many `heads`; returns [batch * queries, d_attention].

    Args:
        key, value: [batch, keys, d_attention].
        mask: added to the scores, [batch, heads or 1, queries, keys].
        length: int64 [batch], the number of valid keys; all if None.
    """
    scale = (emitter.config.d_attention // heads) ** -0.5
    attributes = {"scale": scale, "q_num_heads": heads, "kv_num_heads": heads}
    valid = (mask, None, None, length) if length is not None else (mask,)
    with emitter.module(path):
        mixed = emitter.node("Attention", query, key, value, *valid, attributes=attributes)
        return emitter.reshape(mixed, -1, emitter.config.d_attention)


def _best_tokens(emitter: Emitter, logits: Value) -> None:
    """The best tokens of each row of `logits` and their log-probabilities."""
    count = emitter.sizes(min(contract.BEST_TOKENS, emitter.config.tgt_vocab_size))
    _, ids = emitter.nodes("TopK", logits, count, outputs=("", "best.ids"))
    log_probs = emitter.node("LogSoftmax", logits, attributes={"axis": -1})
    emitter.node("GatherElements", log_probs, ids, attributes={"axis": 1}, output="best.log_probs")


_EMIT: dict[contract.Role, Callable[[Emitter], None]] = {
    "encoder": _encoder,
    "decoder_step": _step,
    "beam_step": _step,
}
