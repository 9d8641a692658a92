"""The common layers of all dialects: embeddings, norms, feed-forward blocks and residual branches.

They follow `models.layers`, module by module. Attention is in the modules of the dialects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import ml_dtypes
import numpy as np
import onnx_ir as ir

from tfexport.config import Side
from tfexport.contract import Precision
from tfexport.graphs.emitter import Emitter, Value

Sublayer = Callable[[str, Value], Value]
"""Function that emits a residual branch: it gets the path of the layer and its states, and returns the states to add."""


def masked_score(precision: Precision) -> float:
    """The attention score of a masked key, or the number added to its score. The weight of the key is then exactly 0.

    It is half of the type's least number, so that its sum with a score is finite. With -inf, rows without keys would be NaN.
    """
    return float(ml_dtypes.finfo(precision if precision in ("float16", "bfloat16") else "float32").min) / 2


def embed_source(emitter: Emitter) -> Value:
    """`src_ids` [batch, src] to states [batch, src, d_model]."""
    ids, offset = emitter.inputs["src_ids"], emitter.config.position_offset
    if not emitter.config.has_position_table:
        return _embedded(emitter, "encoder", ids, None)
    with emitter.module("encoder.positions"):
        start, end = emitter.sizes(offset), emitter.shape_of(ids, 1)
        end = emitter.shape_node("Add", end, start) if offset else end
        positions = emitter.node("Slice", emitter.weight("encoder.positions.table"), start, end, emitter.sizes(0))
    return _embedded(emitter, "encoder", ids, positions)


def embed_target(emitter: Emitter) -> Value:
    """`tokens` at `position` to states [*tokens.shape, d_model]."""
    position, offset = emitter.inputs["position"], emitter.config.position_offset
    if not emitter.config.has_position_table:
        return _embedded(emitter, "decoder", emitter.inputs["tokens"], None)
    with emitter.module("decoder.positions"):
        if offset:
            dtype = np.int32 if position.dtype == ir.DataType.INT32 else np.int64
            position = emitter.node("Add", position, emitter.constant(offset, dtype))
        positions = emitter.node("Gather", emitter.weight("decoder.positions.table"), position)
    return _embedded(emitter, "decoder", emitter.inputs["tokens"], positions)


def _embedded(emitter: Emitter, side: Side, ids: Value, positions: Value | None) -> Value:
    config = emitter.config
    table = "encoder" if config.tie_source_target else side
    with emitter.module(f"{side}.tokens"):
        states = emitter.node("Gather", emitter.weight(f"{table}.tokens.weight"), ids)
        if config.embedding_scale != 1.0:
            states = emitter.node("Mul", states, emitter.scalar(config.embedding_scale))
        if positions is not None:
            states = emitter.node("Add", states, positions)
    return norm(emitter, f"{side}.embedding_norm", states) if config.has_embedding_norm(side) else states


def source_position_bias(emitter: Emitter) -> Value:
    """The relative position bias of the encoder's self-attention: [1, heads, src, src], added to the scores."""
    with emitter.module("encoder.positions"):
        places = key_places(emitter, emitter.shape_of(emitter.inputs["src_ids"], 1))
        distance = emitter.node("Sub", emitter.node("Unsqueeze", places, emitter.sizes(1)), places)
        most = emitter.config.max_distance
        low, high = emitter.constant(-most, np.int64), emitter.constant(most, np.int64)
        rows = emitter.node("Add", emitter.node("Clip", distance, low, high), high)
        added = emitter.node("Gather", emitter.weight("encoder.positions.table"), rows)  # [src, src, heads]
        added = emitter.node("Transpose", added, attributes={"perm": (2, 0, 1)})
        return emitter.node("Unsqueeze", added, emitter.sizes(0))


def target_position_bias(emitter: Emitter, distance: Value) -> Value:
    """The relative position bias of the decoder's self-attention: [rows, heads, queries, keys], added to the scores.

    Args:
        distance: int64 [rows, queries, keys], the tokens from a key to a query, not below 0.
    """
    with emitter.module("decoder.positions"):
        most = emitter.constant(emitter.config.max_distance, np.int64)
        rows = emitter.node("Clip", distance, emitter.constant(0, np.int64), most)
        added = emitter.node("Gather", emitter.weight("decoder.positions.table"), rows)
        return emitter.node("Transpose", added, attributes={"perm": (0, 3, 1, 2)})


def slot_position_bias(emitter: Emitter) -> Value:
    """The relative position bias of the slots of a shared cache: [batch, heads, beam, cache].

    The slots of a hypothesis are in the order of its tokens. So the number of its slots in `mask` up to a slot is the
    position of that slot's token plus 1.
    """
    with emitter.module("decoder.positions"):
        ours = emitter.node("Cast", emitter.inputs["mask"], attributes={"to": int(ir.DataType.INT64)})
        ours = emitter.node("Squeeze", ours, emitter.sizes(1))  # [batch, beam, cache]
        upto = emitter.node("CumSum", ours, emitter.constant(2, np.int64))
        position = emitter.node("Cast", emitter.inputs["position"], attributes={"to": int(ir.DataType.INT64)})
        all_of_them = emitter.node("Add", position, emitter.constant(1, np.int64))
        all_of_them = emitter.node("Unsqueeze", all_of_them, emitter.sizes(2))
        return target_position_bias(emitter, emitter.node("Sub", all_of_them, upto))


def key_places(emitter: Emitter, keys: Value) -> Value:
    """The indices of `keys` [1] keys: int64 [keys]."""
    return emitter.numbers_below(keys)


def length_mask(emitter: Emitter, places: Value, length: Value) -> Value:
    """True for the first `length` (int64 [batch]) of the keys at `places` [keys]: bool [batch, 1, 1, keys]."""
    mask = emitter.node("Less", places, emitter.node("Unsqueeze", length, emitter.sizes(1)))
    return emitter.node("Unsqueeze", mask, emitter.sizes(1, 2))


def encoder_stack(emitter: Emitter, states: Value, attention: Sublayer) -> Value:
    """All encoder layers, with the self-attention `attention`, and the norm after them."""
    sublayers = (attention, partial(_feed_forward, emitter))
    return _stack(emitter, "encoder", emitter.config.n_encoder_layers, states, sublayers)


def decoder_stack(emitter: Emitter, states: Value, self_attention: Sublayer, cross_attention: Sublayer) -> Value:
    """All decoder layers, with these attentions, and the norm after them."""
    sublayers = (self_attention, cross_attention, partial(_feed_forward, emitter))
    return _stack(emitter, "decoder", emitter.config.n_decoder_layers, states, sublayers)


def attention_weights(emitter: Emitter, path: str, query: Value, key: Value, mask: Value) -> Value:
    """The weights of the cross-attention at `path`. They are computed separately: fused operators do not return them.

    softmax(query * key / sqrt(head_dim)), in float32 in graphs of any precision.

    Args:
        query: [batch, heads, beam, head_dim].
        key: [batch, heads, src, head_dim].
        mask: bool, broadcasts to [batch, heads, beam, src], True for keys that may be attended to.

    Returns:
        [1, batch * beam, heads, src].
    """
    with emitter.module(f"{path}/attention"):
        query, key = emitter.to_float32(query), emitter.to_float32(key)
        scores = emitter.node("MatMul", query, emitter.node("Transpose", key, attributes={"perm": (0, 1, 3, 2)}))
        scores = emitter.node("Mul", scores, emitter.constant(emitter.config.head_dim**-0.5, np.float32))
        scores = emitter.node("Where", mask, scores, emitter.constant(masked_score("float32"), np.float32))
        weights = emitter.node("Softmax", scores, attributes={"axis": -1})
        weights = emitter.node("Transpose", weights, attributes={"perm": (0, 2, 1, 3)})
        return emitter.reshape(weights, 1, -1, 0, 0)


def output_attention(emitter: Emitter, weights: Sequence[Value]) -> None:
    """Make the `attention_weights` of all layers the output `attention` of the graph."""
    emitter.node("Concat", *weights, attributes={"axis": 0}, output="attention")


def _stack(emitter: Emitter, side: Side, n_layers: int, states: Value, sublayers: Sequence[Sublayer]) -> Value:
    """The layers of a side and the norm after them, as in `models.layers.Layer`: pre-norm or post-norm."""
    config = emitter.config
    last = f"{side}.norm" if config.has_final_norm(side) else None
    branches = [
        (f"{side}.layers.{i}", f"{side}.layers.{i}.norms.{0 if config.shared_norm else index}", sublayer)
        for i in range(n_layers)
        for index, sublayer in enumerate(sublayers)
    ]
    if not config.norm_first:
        for layer, norm_path, sublayer in branches:
            _, states = add_and_norm(emitter, layer, norm_path, states, sublayer(layer, states))
        return norm(emitter, last, states) if last else states
    # The norm after a sum is that of the next sublayer.
    inner = norm(emitter, branches[0][1], states)
    for (layer, _, sublayer), (_, norm_path, _) in pairwise(branches):
        states, inner = add_and_norm(emitter, layer, norm_path, states, sublayer(layer, inner))
    layer, _, sublayer = branches[-1]
    branch = sublayer(layer, inner)
    if last:
        return add_and_norm(emitter, layer, last, states, branch)[1]
    with emitter.module(layer):
        return emitter.node("Add", states, branch)


def _feed_forward(emitter: Emitter, path: str, inner: Value) -> Value:
    hidden = emitter.project(f"{path}.feed_forward.hidden", inner)
    with emitter.module(f"{path}.feed_forward"):
        hidden = activation(emitter, hidden)
    if emitter.config.gated:
        gate = emitter.project(f"{path}.feed_forward.gate", inner)
        with emitter.module(f"{path}.feed_forward"):
            hidden = emitter.node("Mul", hidden, gate)
    return emitter.project(f"{path}.feed_forward.output", hidden)


def activation(emitter: Emitter, states: Value) -> Value:
    """The activation of feed-forward blocks."""
    config = emitter.config
    if config.activation == "relu":
        return emitter.relu(states)
    if emitter.graph.dialect == "ort-cuda" and not emitter.keeps(emitter.path):
        return _fused_activation(emitter, *emitter.parts_of(states))
    if config.activation == "silu":
        return emitter.node("Mul", states, emitter.node("Sigmoid", states))
    approximate = "tanh" if config.activation == "gelu_tanh" else "none"
    return emitter.node("Gelu", states, attributes={"approximate": approximate})


def _fused_activation(emitter: Emitter, product: Value, bias: Value | None) -> Value:
    """The activation of `product` + `bias` in one node."""
    kind = emitter.config.activation
    if kind == "silu":
        states = product if bias is None else emitter.node("Add", product, bias)
        return emitter.contrib("QuickGelu", states, attributes={"alpha": 1.0})[0]
    if kind == "gelu_tanh":
        return emitter.contrib("FastGelu", product, *([] if bias is None else [bias]))[0]
    if bias is None:
        return emitter.node("Gelu", product, attributes={"approximate": "none"})
    return emitter.contrib("BiasGelu", product, bias)[0]


def norm(emitter: Emitter, path: str, states: Value) -> Value:
    """The norm of the module at `path`."""
    return _norm(emitter, path, states, *_norm_weights(emitter, path))


def add_and_norm(emitter: Emitter, layer: str, path: str, states: Value, branch: Value) -> tuple[Value, Value]:
    """The sum of `states` and a residual branch of `layer`, and the norm at `path` of the sum."""
    if emitter.graph.dialect == "ort-cuda" and not emitter.keeps(layer, path):
        return _skip_norm(emitter, path, states, branch)
    if emitter.graph.dialect != "ort" or emitter.config.norm == "rms":
        with emitter.module(layer):
            total = emitter.node("Add", states, branch)
        return total, norm(emitter, path, total)
    with emitter.module(path):
        inputs = (states, branch, *_norm_weights(emitter, path))
        attributes = {"epsilon": float(emitter.config.norm_eps_of(path))}
        total, normed = emitter.call(
            "ResidualNorm", *inputs, body=_residual_norm, outputs=("", ""), attributes=attributes
        )
    return total, normed


def _skip_norm(emitter: Emitter, path: str, states: Value, branch: Value) -> tuple[Value, Value]:
    """`add_and_norm` in one node, which also adds the bias of the projection `branch`."""
    product, bias = emitter.parts_of(branch)
    kind = "SkipSimplifiedLayerNormalization" if emitter.config.norm == "rms" else "SkipLayerNormalization"
    inputs = [product, states, *_norm_weights(emitter, path), *([] if bias is None else [bias])]
    with emitter.module(path):
        attributes = {"epsilon": float(emitter.config.norm_eps_of(path))}
        normed, _, _, total = emitter.contrib(kind, *inputs, outputs=4, attributes=attributes)
    return total, normed


def _residual_norm(emitter: Emitter, states: Value, branch: Value, scale: Value, bias: Value) -> Sequence[Value]:
    # Not SkipLayerNormalization, whose kernel in ONNX Runtime is slower than Add and LayerNormalization.
    total = emitter.node("Add", states, branch)
    epsilon = ir.RefAttr("epsilon", "epsilon", ir.AttributeType.FLOAT)
    return total, _norm(emitter, "", total, scale, bias, epsilon=epsilon)


def _norm_weights(emitter: Emitter, path: str) -> list[Value]:
    parts = ("weight",) if emitter.config.norm == "rms" else ("weight", "bias")
    return [emitter.weight(f"{path}.{part}") for part in parts]


def _norm(
    emitter: Emitter, path: str, states: Value, *weights: Value, epsilon: float | ir.RefAttr | None = None
) -> Value:
    config = emitter.config
    attributes = {"axis": -1, "epsilon": float(config.norm_eps_of(path)) if epsilon is None else epsilon}
    with emitter.module(path):
        name = "RMSNormalization" if config.norm == "rms" else "LayerNormalization"
        return emitter.nodes(name, states, *weights, outputs=1, attributes=attributes)[0]
