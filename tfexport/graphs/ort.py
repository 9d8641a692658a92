"""The graphs of the dialect `ort`, emitted from the config in the form that is fastest on ONNX Runtime's CPU provider.

They compute the same as `models.transformer`, from the same weights file. Differences from the standard graphs:

    states       in float32 [n, d_model] between attentions, so that a projection is one product that includes its bias
    projections  one for query, key and value, one for the cross keys/values of all layers; with the ReLU before it
    greedy       GroupQueryAttention: writes the cache in place and reads its filled slots only; each row has its own cache
    beams        the hypotheses of a sentence are queries to one cache that only grows (see `_beam_attention`)
    best tokens  log-softmax and top-k, as many as the runtime requests; without scores, by `graphs/screening.py`
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import onnx_ir as ir

from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.contract import is_screened
from tfexport.dialects import calls_attention_functions
from tfexport.graphs import layers
from tfexport.graphs.emitter import CONTRIB, Emitter, Linear, Value
from tfexport.graphs.linear_float32 import float32_linear, matmul_linear
from tfexport.graphs.linear_quantized import int4_linear, int8_linear, unsigned_columns
from tfexport.graphs.projections import Projection, decoder_projections, encoder_projections
from tfexport.graphs.screening import screen
from tfexport.graphs.stored_weights import StoredWeights
from tfexport.shortlist_contract import LISTED


def emit(graph: contract.GraphSpec, config: ModelConfig, stored: StoredWeights, keep: Collection[str] = ()) -> ir.Model:
    """A graph of the dialect `ort` over the weights in `stored`; the projections `keep` are in float32."""
    # Shortlists gather from the output projection, which has its own matrix even if it is tied to embeddings.
    own_output = graph.role in contract.SHORTLIST_ROLES.values()
    projections = (*encoder_projections(config), *decoder_projections(config, own_output=own_output))

    def linear(emitter: Emitter, projection: Projection, states: Value) -> Value:
        emit_linear = matmul_linear if projection.name in keep else _LINEARS[graph.precision]
        return emit_linear(emitter, projection, states)

    emitter = Emitter(graph, config, stored, projections, linear)
    if graph.role == "encoder":
        _encoder(emitter)
    elif graph.role == "shortlist":
        _gather_output_projection(emitter, projections[-1])
    else:
        _step(emitter, projections[-1])
    return emitter.model()


_LINEARS: dict[contract.Precision, Linear] = {
    "float32": float32_linear,
    "int8": int8_linear,
    "int4": int4_linear,
}


def _encoder(emitter: Emitter) -> None:
    """src_ids [batch, src] and src_len [batch] to `cross`, the cross keys and values of all layers."""
    config = emitter.config
    length, size = emitter.inputs["src_len"], emitter.shape_of(emitter.inputs["src_ids"])
    grid = _shape(emitter, size, config.d_attention)
    heads = _shape(emitter, size, config.encoder_heads, config.encoder_head_dim)
    bias = layers.source_position_bias(emitter) if config.positions == "relative" else None

    def self_attention(path: str, inner: Value) -> Value:
        parts = [emitter.project(f"{path}.self_attention.{part}", inner) for part in ("query", "key", "value")]
        with emitter.module(f"{path}.self_attention"):
            if calls_attention_functions(config, emitter.graph.role):
                rows = [parts[0], *(emitter.node("Reshape", part, heads) for part in parts[1:])]
                (mixed,) = emitter.call("SourceAttention", *rows, length, body=_source_attention, outputs=("",))
            else:
                query, key, value = (_three_axes(emitter, part, grid) for part in parts)
                mixed = _attention(emitter, config.encoder_heads, query, key, value, length=length, bias=bias)
        return emitter.project(f"{path}.self_attention.output", mixed)

    states = layers.encoder_stack(emitter, _two_axes(emitter, layers.embed_source(emitter)), self_attention)
    cross = emitter.project("cross", states)
    with emitter.module("decoder"):
        layout = _shape(emitter, size, 2 * config.n_decoder_layers, config.n_heads, config.head_dim)
        cross = emitter.node("Reshape", cross, layout)  # [batch, src, keys_values, heads, head_dim]
        emitter.node("Transpose", cross, attributes={"perm": (2, 0, 3, 1, 4)}, output="cross")


def _gather_output_projection(emitter: Emitter, output: Projection) -> None:
    """The weights of the output projection for some candidates."""
    stored = {"output_weight": output.weights[0]}  # in float32 it may be tied to embeddings
    for tensor in emitter.graph.outputs:
        name = tensor.name.removeprefix(LISTED)
        axis = tensor.axes.index("candidates")
        weight = emitter.weight(stored.get(name, name))
        if name == "output.int8":
            weight = unsigned_columns(emitter, weight, emitter.weight("output.scale"), emitter.config.d_model)
        emitter.node("Gather", weight, emitter.inputs["candidates"], attributes={"axis": axis}, output=tensor.name)


def _step(emitter: Emitter, output: Projection) -> None:
    """One token of each row to logits, best tokens and the cache."""
    config, inputs = emitter.config, emitter.inputs
    states = layers.embed_target(emitter)
    # The hypotheses of a sentence are queries to the same cross keys and values.
    if emitter.graph.step == "beam_step":
        states = _two_axes(emitter, states)
    else:
        states = states if _projections_take_two_axes(emitter) else emitter.reshape(states, -1, 1, config.d_model)

    def self_attention(path: str, inner: Value) -> Value:
        layer = int(path.rpartition(".")[2])
        own = emitter.project(f"{path}.self_attention.query_key_value", inner)
        with emitter.module(f"{path}.self_attention"):
            mixed = _self_attention(emitter, layer, own)
        return emitter.project(f"{path}.self_attention.output", mixed)

    def cross_attention(path: str, inner: Value) -> Value:
        layer = path.rpartition(".")[2]
        query = emitter.project(f"{path}.cross_attention.query", inner)
        with emitter.module(f"{path}.cross_attention"):
            key, value = (inputs[f"cross.{layer}.{part}"] for part in ("key", "value"))
            rows = (query, key, value, inputs["src_len"])
            (mixed,) = _call_attention(emitter, "CrossAttention", *rows, body=_cross_attention, outputs=("",))
        if emitter.graph.tells_attention:
            grid = _shape(emitter, emitter.shape_of(key, 0, 1), -1, config.d_attention)
            weights.append(
                _cross_attention_weights(emitter, f"{path}.cross_attention", _three_axes(emitter, query, grid), key)
            )
        return emitter.project(f"{path}.cross_attention.output", mixed)

    weights: list[Value] = []
    states = layers.decoder_stack(emitter, states, self_attention, cross_attention)
    if weights:
        layers.output_attention(emitter, weights)
    states = states if _projections_take_two_axes(emitter) else emitter.reshape(states, -1, config.d_model)
    if emitter.graph.role == "greedy_step":
        _argmax(emitter, output, states)
        return
    logits = emitter.project("output", states)
    if "left_out" in inputs:
        logits = emitter.node("Add", logits, inputs["left_out"])
    emitter.set_output(logits, "logits")
    emitter.call(
        "BestTokens",
        *(logits, inputs["count"]),
        body=_best_tokens,
        outputs=("best.log_probs", "best.ids"),
        dtypes=("float32", "int64"),
    )


def _best_tokens(emitter: Emitter, logits: Value, count: Value) -> Sequence[Value]:
    log_probs = emitter.node("LogSoftmax", logits, attributes={"axis": -1})
    return emitter.nodes("TopK", log_probs, count, outputs=2)


def _argmax(emitter: Emitter, output: Projection, states: Value) -> None:
    """States [rows, d_model] to the best token that is not banned, and its logit."""
    banned = emitter.inputs["banned"]
    if is_screened(emitter.config, emitter.graph.precision):
        logits, ids = screen(emitter, output, states, banned)
    else:
        logits, ids = emitter.call(
            "BestToken",
            *(emitter.project("output", states), banned),
            body=_best_token,
            outputs=("", ""),
            dtypes=("float32", "int64"),
        )
    emitter.set_output(logits, "best.logits")
    emitter.set_output(ids, "best.ids")


def _best_token(emitter: Emitter, logits: Value, banned: Value) -> Sequence[Value]:
    shape = emitter.shape_node(
        "Concat", emitter.shape_of(logits, 0, 1), emitter.shape_of(banned), attributes={"axis": 0}
    )
    hidden = emitter.node("Expand", emitter.constant(-np.inf, np.float32), shape)
    columns = emitter.node("Expand", banned, shape)
    logits = emitter.node("ScatterElements", logits, columns, hidden, attributes={"axis": 1})
    return emitter.nodes("TopK", logits, emitter.sizes(1), outputs=2)


def _cross_attention_weights(emitter: Emitter, path: str, query: Value, key: Value) -> Value:
    """`layers.attention_weights` of `query` [batch, beam, d_attention]."""
    config, inputs = emitter.config, emitter.inputs
    with emitter.module(f"{path}/attention"):
        query = emitter.reshape(query, 0, 0, config.n_heads, config.head_dim)
        query = emitter.node("Transpose", query, attributes={"perm": (0, 2, 1, 3)})
        places = layers.key_places(emitter, emitter.shape_of(inputs["cross.0.key"], 2, 3))
        length = emitter.node("Cast", inputs["src_len"], attributes={"to": int(ir.DataType.INT64)})
        mask = layers.length_mask(emitter, places, length)
    return layers.attention_weights(emitter, path, query, key, mask)


def _projections_take_two_axes(emitter: Emitter) -> bool:
    """Whether projections need states with two axes, as Gemm does. Quantized operators also accept attention's three."""
    return emitter.graph.precision == "float32"


def _two_axes(emitter: Emitter, states: Value) -> Value:
    """States [.., d_model] in the form for projections: [n, d_model] if they need two axes."""
    return emitter.reshape(states, -1, emitter.config.d_model) if _projections_take_two_axes(emitter) else states


def _attention_output(emitter: Emitter, states: Value) -> Value:
    """The result of attention, [.., d_attention], in the form for projections: [n, d_attention] if they need two axes."""
    return emitter.reshape(states, -1, emitter.config.d_attention) if _projections_take_two_axes(emitter) else states


def _three_axes(emitter: Emitter, states: Value, shape: Value) -> Value:
    """The result of a projection in the `shape` for attention."""
    return emitter.node("Reshape", states, shape) if _projections_take_two_axes(emitter) else states


def _shape(emitter: Emitter, size: Value, *more: int) -> Value:
    """`size` with `more` axes after it."""
    return emitter.shape_node("Concat", size, emitter.sizes(*more), attributes={"axis": 0})


def _attention(
    emitter: Emitter, heads: int, query: Value, key: Value, value: Value, *, length: Value | None, bias: Value | None
) -> Value:
    """Attention of `query` [batch, queries, d_attention] with so many `heads`; returns states for a projection.

    Args:
        key, value: [batch, keys, d_attention], or [batch, heads, keys, head_dim] in the layout of caches.
        length: int32 [batch], the number of valid keys; all if None.
        bias: [batch, 1, queries, keys], added to the scores.
    """
    mixed = emitter.node(
        "MultiHeadAttention",
        *(query, key, value, None, length, bias),
        attributes={"num_heads": heads, "mask_filter_value": layers.masked_score("float32")},
        domain=CONTRIB,
    )
    return _attention_output(emitter, mixed)


def _call_attention(
    emitter: Emitter, name: str, *inputs: Value, body: Callable[..., Sequence[Value]], outputs: Sequence[str]
) -> Sequence[Value]:
    """The outputs of `body(emitter, *inputs)`, in a function if it may have a kernel; see `Emitter.call`."""
    if calls_attention_functions(emitter.config, emitter.graph.role):
        return emitter.call(name, *inputs, body=body, outputs=outputs)
    results = body(emitter, *inputs)
    for value, output in zip(results, outputs, strict=True):
        if output:
            emitter.set_output(value, output)
    return results


def _source_attention(emitter: Emitter, query: Value, key: Value, value: Value, length: Value) -> Sequence[Value]:
    """Attention of all tokens of a source: `query` [.., d_attention], `key`, `value` [batch, src, heads, head_dim]."""
    grid = _shape(emitter, emitter.shape_of(key, 0, 2), emitter.config.d_attention)
    rows = (emitter.node("Reshape", part, grid) for part in (query, key, value))
    return (_attention(emitter, emitter.config.encoder_heads, *rows, length=length, bias=None),)


def _cross_attention(emitter: Emitter, query: Value, key: Value, value: Value, length: Value) -> Sequence[Value]:
    """Cross-attention of all hypotheses of a sentence; `query` is [batch, queries, d_attention] or [n, d_attention]."""
    config = emitter.config
    query = _three_axes(emitter, query, _shape(emitter, emitter.shape_of(key, 0, 1), -1, config.d_attention))
    return (_attention(emitter, config.n_heads, query, key, value, length=length, bias=None),)


def _self_attention(emitter: Emitter, layer: int, query_key_value: Value) -> Value:
    """Write the new keys and values of a layer to its cache and attend to it.

    Args:
        query_key_value: [.., 3 * d_attention].

    Returns:
        [.., d_attention].
    """
    inputs = emitter.inputs
    body: Callable[..., Sequence[Value]]
    if emitter.graph.step == "decoder_step":
        name, more, body = "GreedyAttention", ("position", "total"), _greedy_attention
    else:
        name, more, body = "BeamAttention", ("slot", "mask"), _beam_attention
    mixed, *_ = _call_attention(
        emitter,
        name,
        *(query_key_value, inputs[f"past.{layer}.key"], inputs[f"past.{layer}.value"]),
        *(inputs[each] for each in more),
        body=body,
        outputs=("", f"present.{layer}.key", f"present.{layer}.value"),
    )
    return mixed


def _greedy_attention(
    emitter: Emitter, query_key_value: Value, past_key: Value, past_value: Value, position: Value, total: Value
) -> Sequence[Value]:
    """Each row has its own cache with `position` filled slots.

        query_key_value [rows, 1, 3 * d_attention] > GroupQueryAttention > [rows, 1, d_attention]
        past [rows, heads, cache, head_dim] ─────>                     ──> present, the same buffer, one slot more

    There are as many key heads as query heads: the operator is used because it updates the cache in place and reads no empty
    slot.
    """
    config = emitter.config
    mixed, *present = emitter.nodes(
        "GroupQueryAttention",
        _three_axes(emitter, query_key_value, emitter.sizes(-1, 1, 3 * config.d_attention)),
        *(None, None, past_key, past_value, position, total),
        outputs=3,
        attributes={"num_heads": config.n_heads, "kv_num_heads": config.n_heads},
        domain=CONTRIB,
    )
    return _attention_output(emitter, mixed), *present


def _beam_attention(
    emitter: Emitter, query_key_value: Value, past_key: Value, past_value: Value, slot: Value, mask: Value
) -> Sequence[Value]:
    """The hypotheses of a sentence share one cache; `mask` has the slots of each hypothesis' past.

    Split ── query ──────────────────────────────────────────> MultiHeadAttention [batch, beam, d_attention]
          ── key, value [batch, heads, beam, head_dim] ── TensorScatter at `slot` ──>    keys, values [.., cache, ..]
    mask ── Where(mask, 0, masked) ───────────────────────────────────────────────>      bias [batch, 1, beam, cache]
    """
    config = emitter.config
    parts = emitter.nodes("Split", query_key_value, outputs=3, attributes={"axis": -1, "num_outputs": 3})
    batch = emitter.shape_of(past_key, 0, 1)
    query = _three_axes(emitter, parts[0], _shape(emitter, batch, -1, config.d_attention))
    heads = _shape(emitter, batch, -1, config.n_heads, config.head_dim)
    present = []
    for past, new in zip((past_key, past_value), parts[1:], strict=True):
        new = emitter.node("Transpose", emitter.node("Reshape", new, heads), attributes={"perm": (0, 2, 1, 3)})
        present.append(emitter.node("TensorScatter", past, new, slot, attributes={"axis": -2, "mode": "linear"}))
    masked = emitter.constant(layers.masked_score("float32"), np.float32)
    seen = layers.slot_position_bias(emitter) if config.positions == "relative" else emitter.constant(0.0, np.float32)
    bias = emitter.node("Where", mask, seen, masked)
    return _attention(emitter, config.n_heads, query, *present, length=None, bias=bias), *present
