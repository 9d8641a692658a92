"""The graphs of the dialect `onnx24`: only standard operators of ONNX opset 24, for TensorRT, Triton and any other runtime.

Attention gets the number of valid keys of each row, `length`, as a mask:

    Range(keys) < length ── Unsqueeze ── Expand over queries ──> Attention(q, k, v, mask)

A relative position bias includes the mask: Where(mask, bias, masked score).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from tfexport import contract, graph_contract
from tfexport.config import ModelConfig
from tfexport.graphs import layers, search
from tfexport.graphs.emitter import Emitter, Value
from tfexport.graphs.mixed_precision import MixedPrecision
from tfexport.graphs.projections import Projection, decoder_projections, encoder_projections
from tfexport.graphs.stored_weights import StoredWeights


def emit(graph: contract.GraphSpec, config: ModelConfig, stored: StoredWeights, keep: Collection[str] = ()) -> ir.Model:
    """A graph of the dialect `onnx24` over the weights in `stored`; in half precision, the modules `keep` are in float32."""
    projections = _projections(graph, config)
    mixed = None
    if keep and graph.role not in graph_contract.WITHOUT_MODULES:
        mixed = MixedPrecision(graph, StoredWeights(stored.folder / contract.WEIGHTS_FILE), keep)
    emitter = Emitter(graph, config, stored, projections, _linear, mixed)
    _EMIT[graph.role](emitter)
    return emitter.model()


def modules_in_half(graph: contract.GraphSpec, config: ModelConfig, stored: StoredWeights) -> list[str]:
    """The modules of a graph that compute in half precision, by their paths."""
    if graph.role in graph_contract.WITHOUT_MODULES:
        return []
    mixed = MixedPrecision(graph, stored, keep=())
    _EMIT[graph.role](Emitter(graph, config, stored, _projections(graph, config), _linear, mixed))
    return list(mixed.modules)


def _projections(graph: contract.GraphSpec, config: ModelConfig) -> list[Projection]:
    own_output = graph.precision != "float32"  # half precision has a separate output projection in float32
    sides = (encoder_projections(config), decoder_projections(config, own_output=own_output))
    return [part for side in sides for projection in side for part in projection.split()]


def _linear(emitter: Emitter, projection: Projection, states: Value) -> Value:
    """A projection with weights [out, in], as in the file. Every runtime transposes or packs them once, during loading."""
    (weight,) = projection.weights
    product = emitter.node(
        "MatMul", states, emitter.node("Transpose", emitter.weight(weight), attributes={"perm": (1, 0)})
    )
    return emitter.node("Add", product, emitter.weight(projection.biases[0])) if projection.biases else product


def _encoder(emitter: Emitter) -> None:
    """src_ids [batch, src] and src_len [batch] to the cross keys and values of each layer."""
    states = _encoder_states(emitter)
    for i in range(emitter.config.n_decoder_layers):
        for part in ("key", "value"):
            path, heads = f"decoder.layers.{i}.cross_attention", emitter.config.n_heads
            _split_heads(emitter, path, emitter.project(f"{path}.{part}", states), heads, output=f"cross.{i}.{part}")


def _classifier(emitter: Emitter) -> None:
    """src_ids [batch, src] and src_len [batch] to the logits of the classes, from the state of the first token."""
    first = emitter.node("Gather", _encoder_states(emitter), emitter.constant(0, np.int64), attributes={"axis": 1})
    emitter.set_output(emitter.project("head", emitter.to_float32(first)), "logits")


def _encoder_states(emitter: Emitter) -> Value:
    """The encoder's states [batch, src, d_model]."""
    keys = emitter.shape_of(emitter.inputs["src_ids"], 1)

    def self_attention(path: str, inner: Value) -> Value:
        path = f"{path}.self_attention"
        query, key, value = (
            _split_heads(emitter, path, emitter.project(f"{path}.{part}", inner), emitter.config.encoder_heads)
            for part in ("query", "key", "value")
        )
        bias = layers.source_position_bias(emitter) if emitter.config.positions == "relative" else None
        length = emitter.inputs["src_len"]
        head_dim = emitter.config.encoder_head_dim
        mixed = _attention(emitter, path, query, key, value, length, keys, keys, bias=bias, head_dim=head_dim)
        with emitter.module(path):
            mixed = emitter.node("Transpose", mixed, attributes={"perm": (0, 2, 1, 3)})
            mixed = emitter.reshape(mixed, 0, 0, emitter.config.d_attention)
        return emitter.project(f"{path}.output", mixed)

    return layers.encoder_stack(emitter, layers.embed_source(emitter), self_attention)


def _decoder_step(emitter: Emitter) -> None:
    """One token of each row to logits, best tokens and the cache. States are [rows, d_model]."""
    config, inputs = emitter.config, emitter.inputs
    with emitter.module("decoder"):
        filled = emitter.node("Add", inputs["position"], emitter.constant(1, np.int64))
    cache, src = emitter.shape_of(inputs["past.0.key"], 2, 3), emitter.shape_of(inputs["cross.0.key"], 2, 3)
    batch = emitter.shape_of(inputs["src_len"])
    # The hypotheses of a sentence are queries to the same cross keys and values.
    beam = emitter.shape_node("Div", emitter.shape_of(inputs["tokens"]), batch)
    beams = emitter.shape_node(
        "Concat", batch, beam, emitter.sizes(config.n_heads, config.head_dim), attributes={"axis": 0}
    )

    bias = _cache_position_bias(emitter, cache) if config.positions == "relative" else None

    def self_attention(path: str, inner: Value) -> Value:
        layer, path = path.rpartition(".")[2], f"{path}.self_attention"
        query, *new = (emitter.project(f"{path}.{part}", inner) for part in ("query", "key", "value"))
        with emitter.module(path):
            key, value = (
                emitter.node(
                    "TensorScatter",
                    *(inputs[f"past.{layer}.{part}"], _one_slot(emitter, states), inputs["position"]),
                    attributes={"axis": -2, "mode": "linear"},
                    output=f"present.{layer}.{part}",
                    floats="stored",
                )
                for part, states in zip(("key", "value"), new, strict=True)
            )
            query = _one_slot(emitter, query)
        mixed = _attention(emitter, path, query, key, value, filled, cache, None, bias=bias, head_dim=config.head_dim)
        with emitter.module(path):
            mixed = emitter.reshape(mixed, -1, config.d_attention)
        return emitter.project(f"{path}.output", mixed)

    def cross_attention(path: str, inner: Value) -> Value:
        layer, path = path.rpartition(".")[2], f"{path}.cross_attention"
        query = emitter.project(f"{path}.query", inner)
        key, value = (inputs[f"cross.{layer}.{part}"] for part in ("key", "value"))
        with emitter.module(path):
            query = emitter.node("Reshape", query, beams)
            query = emitter.node("Transpose", query, attributes={"perm": (0, 2, 1, 3)})
        length = inputs["src_len"]
        mixed = _attention(emitter, path, query, key, value, length, src, beam, bias=None, head_dim=config.head_dim)
        if emitter.graph.tells_attention:
            mask = _mask(emitter, length, src, beam)
            weights.append(layers.attention_weights(emitter, path, query, key, mask))
        with emitter.module(path):
            mixed = emitter.node("Transpose", mixed, attributes={"perm": (0, 2, 1, 3)})
            mixed = emitter.reshape(mixed, -1, config.d_attention)
        return emitter.project(f"{path}.output", mixed)

    weights: list[Value] = []
    states = layers.decoder_stack(emitter, layers.embed_target(emitter), self_attention, cross_attention)
    if weights:
        layers.output_attention(emitter, weights)
    logits = emitter.project("output", emitter.to_float32(states))
    emitter.set_output(logits, "logits")
    count = emitter.sizes(min(contract.BEST_TOKENS, emitter.config.tgt_vocab_size))
    search.tell_best_tokens(emitter, logits, count)


def _cache_position_bias(emitter: Emitter, keys: Value) -> Value:
    """The relative position bias of the cache's slots: [rows, heads, 1, cache]."""
    with emitter.module("decoder.positions"):
        places = layers.key_places(emitter, keys)
        position = emitter.node("Unsqueeze", emitter.inputs["position"], emitter.sizes(1, 2))
        return layers.target_position_bias(emitter, emitter.node("Sub", position, places))


def _one_slot(emitter: Emitter, states: Value) -> Value:
    """[rows, d_model] to [rows, heads, 1, head_dim]."""
    return emitter.reshape(states, -1, emitter.config.n_heads, 1, emitter.config.head_dim)


def _split_heads(emitter: Emitter, path: str, states: Value, heads: int, *, output: str = "") -> Value:
    """[batch, length, d_attention] to [batch, heads, length, head_dim]."""
    with emitter.module(path):
        states = emitter.reshape(states, 0, 0, heads, emitter.config.d_attention // heads)
        return emitter.node("Transpose", states, attributes={"perm": (0, 2, 1, 3)}, output=output)


def _attention(
    emitter: Emitter,
    path: str,
    query: Value,
    key: Value,
    value: Value,
    length: Value,
    keys: Value,
    queries: Value | None,
    *,
    bias: Value | None,
    head_dim: int,
) -> Value:
    """Attention of `query` [.., heads, queries, head_dim] to the first `length` [batch] of the keys.

    Args:
        key, value: [.., heads, keys, head_dim].
        keys, queries: their numbers [1]; `queries` is None for one query.
        bias: added to the scores, [.., heads, queries, keys].
    """
    mask = _mask(emitter, length, keys, queries)
    if bias is not None:
        with emitter.module("mask"):
            mask = emitter.node("Where", mask, bias, emitter.scalar(layers.masked_score(emitter.graph.precision)))
    with emitter.module(path):
        return emitter.node("Attention", query, key, value, mask, attributes={"scale": head_dim**-0.5})


def _mask(emitter: Emitter, length: Value, keys: Value, queries: Value | None) -> Value:
    """True for the first `length` [batch] of the keys: bool [batch, 1, queries, keys]."""
    with emitter.module("mask"):
        mask = layers.length_mask(emitter, layers.key_places(emitter, keys), length)
        if queries is None:
            return mask
        # ONNX Runtime's CPU kernel does not support a mask that broadcasts over the queries.
        shape = emitter.shape_node("Concat", emitter.sizes(1, 1), queries, emitter.sizes(1), attributes={"axis": 0})
        return emitter.node("Expand", mask, shape)


def _select_rows(emitter: Emitter) -> None:
    """The rows `index` of tensors [blocks, from, width]."""
    tensors, index = emitter.inputs["tensors"], emitter.inputs["index"]
    emitter.node("Gather", tensors, index, attributes={"axis": 1}, output="selected")


_EMIT: dict[contract.Role, Callable[[Emitter], None]] = {
    "encoder": _encoder,
    "decoder_step": _decoder_step,
    "decoder_step_attention": _decoder_step,
    "select_rows": _select_rows,
    "greedy_search": search.greedy_search,
    "beam_search": search.beam_search,
    "best_tokens": search.best_tokens,
    "encoder_classifier": _classifier,
}
