"""The graphs of the standard dialects: operators of ONNX opset 24 alone, for TensorRT, CUDA and any other runtime.

Both are the same but for how attention is told which keys count, `length` of the first ones of each row:

    onnx24          Range(keys) < length ── Unsqueeze ── Expand over queries ──> Attention(q, k, v, mask)
    onnx24-lengths  length ────────────────────────────────────────────────────> Attention(q, k, v, nonpad_kv_seqlen)

What relative positions add to scores takes the place of the mask: in onnx24 with the mask in it, Where(mask, added, hidden).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.graphs.emitter import Emitter, Value
from tfexport.graphs.layers import (
    attention_weights,
    decoder_stack,
    encoder_stack,
    source_distances,
    source_embedded,
    target_distances,
    target_embedded,
    tell_attention,
)
from tfexport.graphs.mixed_precision import MixedPrecision
from tfexport.graphs.projections import Projection, decoder_projections, encoder_projections
from tfexport.graphs.stored_weights import StoredWeights


def emit(graph: contract.GraphSpec, config: ModelConfig, stored: StoredWeights, keep: Collection[str] = ()) -> ir.Model:
    """A graph of a standard dialect, its weights in `stored`; in half precision the modules `keep` are in float32."""
    projections = _projections(graph, config)
    mixed = MixedPrecision(graph, StoredWeights(stored.folder / contract.WEIGHTS_FILE), keep) if keep else None
    emitter = Emitter(graph, config, stored, projections, _linear, mixed)
    _EMIT[graph.role](emitter)
    return emitter.model()


def half_modules(graph: contract.GraphSpec, config: ModelConfig, stored: StoredWeights) -> list[str]:
    """The modules of a graph that compute in half precision, by their paths."""
    mixed = MixedPrecision(graph, stored, keep=())
    _EMIT[graph.role](Emitter(graph, config, stored, _projections(graph, config), _linear, mixed))
    return list(mixed.modules)


def _projections(graph: contract.GraphSpec, config: ModelConfig) -> list[Projection]:
    own_output = graph.precision != "float32"  # half precision has the output projection apart, in float32
    sides = (encoder_projections(config), decoder_projections(config, own_output=own_output))
    return [part for side in sides for projection in side for part in projection.apart()]


def _linear(emitter: Emitter, projection: Projection, states: Value) -> Value:
    """Weights as they lie in the file, [out, in]: every runtime transposes or packs them once, when it loads them."""
    (weight,) = projection.weights
    product = emitter.node(
        "MatMul", states, emitter.node("Transpose", emitter.weight(weight), attributes={"perm": (1, 0)})
    )
    return emitter.node("Add", product, emitter.weight(projection.biases[0])) if projection.biases else product


def _encoder(emitter: Emitter) -> None:
    """src_ids [batch, src] and src_len [batch] to the cross keys and values of each layer."""
    states = _encoded(emitter)
    for i in range(emitter.config.n_decoder_layers):
        for part in ("key", "value"):
            path = f"decoder.layers.{i}.cross_attention"
            _heads(emitter, path, emitter.projected(f"{path}.{part}", states), output=f"cross.{i}.{part}")


def _classifier(emitter: Emitter) -> None:
    """src_ids [batch, src] and src_len [batch] to the logits of the classes, from the state of the first token."""
    first = emitter.node("Gather", _encoded(emitter), emitter.constant(0, np.int64), attributes={"axis": 1})
    emitter.set_output(emitter.projected("head", emitter.float32(first)), "logits")


def _encoded(emitter: Emitter) -> Value:
    """The encoder's states [batch, src, d_model]."""
    keys = emitter.shape_of(emitter.inputs["src_ids"], 1)

    def attended(path: str, inner: Value) -> Value:
        path = f"{path}.self_attention"
        query, key, value = (
            _heads(emitter, path, emitter.projected(f"{path}.{part}", inner)) for part in ("query", "key", "value")
        )
        added = source_distances(emitter) if emitter.config.positions == "relative" else None
        length = emitter.inputs["src_len"]
        mixed = _attention(emitter, path, query, key, value, length, keys=keys, queries=keys, added=added)
        with emitter.at(path):
            mixed = emitter.node("Transpose", mixed, attributes={"perm": (0, 2, 1, 3)})
            mixed = emitter.reshaped(mixed, 0, 0, emitter.config.d_attention)
        return emitter.projected(f"{path}.output", mixed)

    return encoder_stack(emitter, source_embedded(emitter), attended)


def _decoder_step(emitter: Emitter) -> None:
    """One token of each row to logits, best tokens and the cache. States are [rows, d_model]."""
    config, inputs = emitter.config, emitter.inputs
    with emitter.at("decoder"):
        filled = emitter.node("Add", inputs["position"], emitter.constant(1, np.int64))
    cache, src = emitter.shape_of(inputs["past.0.key"], 2, 3), emitter.shape_of(inputs["cross.0.key"], 2, 3)
    batch = emitter.shape_of(inputs["src_len"])
    # The hypotheses of a sentence are so many queries to its one set of cross keys and values.
    beam = emitter.shape_node("Div", emitter.shape_of(inputs["tokens"]), batch)
    beams = emitter.shape_node(
        "Concat", batch, beam, emitter.sizes(config.n_heads, config.head_dim), attributes={"axis": 0}
    )

    added = _cache_distances(emitter, cache) if config.positions == "relative" else None

    def attended(path: str, inner: Value) -> Value:
        layer, path = path.rpartition(".")[2], f"{path}.self_attention"
        query, *new = (emitter.projected(f"{path}.{part}", inner) for part in ("query", "key", "value"))
        with emitter.at(path):
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
        mixed = _attention(emitter, path, query, key, value, filled, keys=cache, queries=None, added=added)
        with emitter.at(path):
            mixed = emitter.reshaped(mixed, -1, config.d_attention)
        return emitter.projected(f"{path}.output", mixed)

    def crossed(path: str, inner: Value) -> Value:
        layer, path = path.rpartition(".")[2], f"{path}.cross_attention"
        query = emitter.projected(f"{path}.query", inner)
        key, value = (inputs[f"cross.{layer}.{part}"] for part in ("key", "value"))
        with emitter.at(path):
            query = emitter.node("Reshape", query, beams)
            query = emitter.node("Transpose", query, attributes={"perm": (0, 2, 1, 3)})
        mixed = _attention(emitter, path, query, key, value, inputs["src_len"], keys=src, queries=beam)
        if emitter.graph.tells_attention:
            mask = _mask(emitter, inputs["src_len"], src, beam)
            weights.append(attention_weights(emitter, path, query, key, mask))
        with emitter.at(path):
            mixed = emitter.node("Transpose", mixed, attributes={"perm": (0, 2, 1, 3)})
            mixed = emitter.reshaped(mixed, -1, config.d_attention)
        return emitter.projected(f"{path}.output", mixed)

    weights: list[Value] = []
    states = decoder_stack(emitter, target_embedded(emitter), attended, crossed)
    if weights:
        tell_attention(emitter, weights)
    logits = emitter.projected("output", emitter.float32(states))
    emitter.set_output(logits, "logits")
    _best(emitter, logits)


def _cache_distances(emitter: Emitter, keys: Value) -> Value:
    """What relative positions add to the scores of the cache's slots: [rows, heads, 1, cache]."""
    zero, one = emitter.constant(0, np.int64), emitter.constant(1, np.int64)
    with emitter.at("decoder.positions"):
        every = emitter.node("Range", zero, emitter.shape_node("Squeeze", keys), one)
        position = emitter.node("Unsqueeze", emitter.inputs["position"], emitter.sizes(1, 2))
        return target_distances(emitter, emitter.node("Sub", position, every))


def _one_slot(emitter: Emitter, states: Value) -> Value:
    """[rows, d_model] to [rows, heads, 1, head_dim]."""
    return emitter.reshaped(states, -1, emitter.config.n_heads, 1, emitter.config.head_dim)


def _heads(emitter: Emitter, path: str, states: Value, *, output: str = "") -> Value:
    """[batch, length, d_model] to [batch, heads, length, head_dim]."""
    with emitter.at(path):
        states = emitter.reshaped(states, 0, 0, emitter.config.n_heads, emitter.config.head_dim)
        return emitter.node("Transpose", states, attributes={"perm": (0, 2, 1, 3)}, output=output)


def _attention(
    emitter: Emitter,
    path: str,
    query: Value,
    key: Value,
    value: Value,
    length: Value,
    *,
    keys: Value,
    queries: Value | None,
    added: Value | None = None,
) -> Value:
    """Attention [.., heads, queries, head_dim] to the first `length` [batch] of [.., heads, keys, head_dim].

    Args:
        keys, queries: their numbers [1]; no `queries` where there is one.
        added: to the scores, [.., heads, queries, keys].
    """
    if emitter.graph.dialect == "onnx24-lengths":
        told: tuple[Value | None, ...] = (added, None, None, length)
    else:
        mask = _mask(emitter, length, keys, queries)
        if added is not None:
            with emitter.at("mask"):
                mask = emitter.node("Where", mask, added, emitter.hidden_score())
        told = (mask,)
    with emitter.at(path):
        scale = {"scale": emitter.config.head_dim**-0.5}
        return emitter.node("Attention", query, key, value, *told, attributes=scale)


def _mask(emitter: Emitter, length: Value, keys: Value, queries: Value | None) -> Value:
    """True for the first `length` [batch] of the keys: [batch, 1, queries, keys]."""
    zero, one = emitter.constant(0, np.int64), emitter.constant(1, np.int64)
    with emitter.at("mask"):
        every = emitter.node("Range", zero, emitter.shape_node("Squeeze", keys), one)
        mask = emitter.node("Less", every, emitter.node("Unsqueeze", length, emitter.sizes(1)))
        mask = emitter.node("Unsqueeze", mask, emitter.sizes(1, 2))
        if queries is None:
            return mask
        # ONNX Runtime's CPU kernel takes no mask that broadcasts over the query axis.
        shape = emitter.shape_node("Concat", emitter.sizes(1, 1), queries, emitter.sizes(1), attributes={"axis": 0})
        return emitter.node("Expand", mask, shape)


def _best(emitter: Emitter, logits: Value) -> None:
    """The best tokens of each row of `logits` and their log-probabilities, as `models.transformer.best_tokens`."""
    count, last = emitter.sizes(min(contract.BEST, emitter.config.tgt_vocab_size)), emitter.sizes(-1)
    values, _ = emitter.nodes("TopK", logits, count, outputs=("", "best.ids"))
    peak = emitter.node("Slice", values, emitter.sizes(0), emitter.sizes(1), last)  # out of the sum: nothing overflows
    powers = emitter.node("Exp", emitter.node("Sub", logits, peak))
    total = emitter.node("Log", emitter.node("ReduceSum", powers, last))
    emitter.node("Sub", emitter.node("Sub", values, peak), total, output="best.log_probs")


def _select_rows(emitter: Emitter) -> None:
    """Rows `index` of tensors [blocks, from, width]."""
    tensors, index = emitter.inputs["tensors"], emitter.inputs["index"]
    emitter.node("Gather", tensors, index, attributes={"axis": 1}, output="selected")


_EMIT: dict[contract.Role, Callable[[Emitter], None]] = {
    "encoder": _encoder,
    "decoder_step": _decoder_step,
    "decoder_step_attention": _decoder_step,
    "select_rows": _select_rows,
    "encoder_classifier": _classifier,
}
