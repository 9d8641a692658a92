"""The functions of int8 graphs of the dialect `ort`, with the sums of their kernels, so that both have the same bits.

In 8 bits the last bit of an activation can decide how it is rounded, and then a token. The sums of MultiHeadAttention,
GroupQueryAttention and LayerNormalization have orders of their own, also one for each CPU. So these definitions consist of:

    additions and multiplications of single numbers, which are exact to the last bit on every CPU
    CumSum, for sums over a count that depends on the input: each number is added to the sum of those before it
    no Exp, which is another function on each system, but the polynomial of `exp_of_negative` in kernels/floats.h

The kernels (kernels/attention.h and kernels/rows.h) add in `LANES` sums side by side, number i to sum i % 16, and then the
16 sums in pairs. In the shapes here, `places` are the rows of greedy search, or the sentences; `queries` are 1, or their
hypotheses. A number that is not there has the weight 0, which changes no bit of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from tfexport.dialects import calls_attention_functions
from tfexport.graphs.emitter import Emitter, Value

LANES = 16
"""Sums side by side, `kLanes` in kernels/floats.h."""

COLUMNS = 4
"""Numbers of a head that the encoder's attention multiplies at a time. More need more memory, and fewer more nodes."""

Definition = Callable[..., Sequence[Value]]
"""Emits the body of a function; see `Emitter.call`."""

_INT64 = int(ir.DataType.INT64)


def is_used(emitter: Emitter) -> bool:
    """Whether these are the definitions of the functions in a graph of the dialect `ort`."""
    return emitter.graph.precision == "int8" and calls_attention_functions(emitter.config, emitter.graph.role)


def or_plain(emitter: Emitter, ordered: Definition, plain: Definition) -> Definition:
    """The definition of a function in this graph: `ordered` in int8, or else `plain`, of ONNX Runtime's own operators."""
    return ordered if is_used(emitter) else plain


def residual_norm(emitter: Emitter, states: Value, branch: Value, scale: Value, bias: Value) -> Sequence[Value]:
    """The sum of two tensors [.., d_model] and its LayerNorm, as `add_and_norm` in kernels/rows.h."""
    size = emitter.config.d_model
    total = emitter.node("Add", states, branch)
    rows = emitter.reshape(total, -1, size)
    count = _number(emitter, size)
    mean = emitter.node("Div", _sum_of_row(emitter, rows, size), count)
    off = emitter.node("Sub", rows, emitter.node("Squeeze", mean, emitter.sizes(-1)))
    squares = emitter.node("Mul", off, off)
    variance = emitter.node("Div", _sum_of_row(emitter, squares, size), count)
    reference = ir.RefAttr("value_float", "epsilon", ir.AttributeType.FLOAT)
    (epsilon,) = emitter.nodes("Constant", outputs=1, attributes={"value_float": reference})
    factor = _inverse(emitter, emitter.node("Sqrt", emitter.node("Add", variance, epsilon)), -1)
    normed = emitter.node("Mul", off, factor)
    normed = emitter.node("Reshape", normed, emitter.shape_of(total))
    return total, emitter.node("Add", emitter.node("Mul", normed, scale), bias)


def _sum_of_row(emitter: Emitter, rows: Value, size: int) -> Value:
    """The sums of `rows` [n, size], [n, 1, 1]: blocks of 16 numbers side by side, and then the rest of the row, in order."""
    rest = size % LANES
    blocks = rows
    if rest and size > LANES:
        blocks = emitter.node("Slice", rows, emitter.sizes(0), emitter.sizes(size - rest), emitter.sizes(1))
    if size >= LANES:
        lanes = _sum_in_order(emitter, emitter.reshape(blocks, -1, size // LANES, LANES), 1)
        total = _sum_of_lanes(emitter, lanes, 2)
    if not rest:
        return total
    last = emitter.node("Slice", rows, emitter.sizes(size - rest), emitter.sizes(size), emitter.sizes(1))
    last = emitter.node("Unsqueeze", _sum_in_order(emitter, last, 1), emitter.sizes(-1))
    return emitter.node("Add", total, last) if size >= LANES else last


def greedy_attention(
    emitter: Emitter, query_key_value: Value, past_key: Value, past_value: Value, position: Value, total: Value
) -> Sequence[Value]:
    """Each row [.., 3 * d_attention] has its own cache [rows, heads, slots, head_dim] with `position` filled slots."""
    config = emitter.config
    parts = emitter.nodes("Split", query_key_value, outputs=3, attributes={"axis": -1, "num_outputs": 3})
    query, key, value = (emitter.reshape(part, -1, config.n_heads, 1, config.head_dim) for part in parts)
    slot = emitter.node("Cast", position, attributes={"to": _INT64})
    present = [_written(emitter, *each, slot) for each in ((past_key, key), (past_value, value))]
    used = emitter.node("Cast", total, attributes={"to": _INT64})
    places, numbers = _blocks(emitter, emitter.shape_of(past_key, 2, 3), used)
    seen = emitter.node("Less", numbers, _of_places(emitter, emitter.node("Add", slot, _integer(emitter, 1))))
    return _attend(emitter, query, _read(emitter, present, places), seen), *present


def cross_attention(emitter: Emitter, query: Value, key: Value, value: Value, length: Value) -> Sequence[Value]:
    """Cross-attention of all hypotheses of a sentence: `query` [.., d_attention] to the first `length` of the keys and
    values [batch, heads, src, head_dim]."""
    query = _heads(emitter, query, key)
    size = emitter.shape_of(key, 2, 3)
    places, numbers = _blocks(emitter, size, size)
    length = emitter.node("Cast", length, attributes={"to": _INT64})
    seen = emitter.node("Less", numbers, _of_places(emitter, length))
    return (_attend(emitter, query, _read(emitter, (key, value), places), seen),)


def beam_attention(
    emitter: Emitter, query_key_value: Value, past_key: Value, past_value: Value, slot: Value, mask: Value
) -> Sequence[Value]:
    """The hypotheses of a sentence share a cache [batch, heads, slots, head_dim]; `mask` [batch, 1, beam, slots] has the
    slots that each of them sees. As in the kernel, a hypothesis reads the list of its slots."""
    parts = emitter.nodes("Split", query_key_value, outputs=3, attributes={"axis": -1, "num_outputs": 3})
    query, key, value = (_heads(emitter, part, past_key) for part in parts)
    present = [_written(emitter, *each, slot) for each in ((past_key, key), (past_value, value))]
    size = emitter.shape_of(past_key, 2, 3)
    ours = emitter.node("Cast", mask, attributes={"to": _INT64})
    count = emitter.node("ReduceSum", ours, emitter.sizes(-1), attributes={"keepdims": 1})  # [batch, 1, beam, 1]
    longest = emitter.node("ReduceMax", emitter.reshape(count, -1), emitter.sizes(0), attributes={"keepdims": 1})
    places, numbers = _blocks(emitter, size, emitter.node("Clip", longest, _integer(emitter, 1)))
    seen = emitter.node("Less", numbers, count)

    slots = emitter.node("Where", mask, emitter.numbers_below(size), size)  # those that are not seen come last
    slots, _ = emitter.nodes("TopK", slots, size, outputs=2, attributes={"largest": 0})
    slots = emitter.node("Gather", slots, emitter.reshape(places, -1), attributes={"axis": -1})
    slots = emitter.node("Where", seen, slots, _integer(emitter, 0))  # [batch, 1, beam, numbers]
    heads = emitter.constant(np.arange(emitter.config.n_heads)[:, None, None], np.int64)
    sentences = _of_places(emitter, emitter.numbers_below(emitter.shape_of(past_key, 0, 1)))
    first = emitter.node("Mul", sentences, _integer(emitter, emitter.config.n_heads))
    rows = emitter.node("Mul", emitter.node("Add", first, heads), size)  # the first slot of each head
    rows = emitter.node("Add", rows, slots)  # [batch, heads, beam, numbers]
    flat = (emitter.reshape(tensor, -1, emitter.config.head_dim) for tensor in present)
    found = [emitter.node("Gather", tensor, rows) for tensor in flat]
    return _attend(emitter, query, found, seen), *present


def _heads(emitter: Emitter, rows: Value, cache: Value) -> Value:
    """Rows [.., d_attention] of all queries of the places of `cache`: [places, heads, queries, head_dim]."""
    config = emitter.config
    shape = (emitter.shape_of(cache, 0, 1), emitter.sizes(-1, config.n_heads, config.head_dim))
    heads = emitter.node("Reshape", rows, emitter.shape_node("Concat", *shape, attributes={"axis": 0}))
    return emitter.node("Transpose", heads, attributes={"perm": (0, 2, 1, 3)})


def _written(emitter: Emitter, past: Value, new: Value, slot: Value) -> Value:
    return emitter.node("TensorScatter", past, new, slot, attributes={"axis": -2, "mode": "linear"})


def _blocks(emitter: Emitter, size: Value, end: Value) -> tuple[Value, Value]:
    """The numbers from 0 to before `end` [1], and after them as many as complete a block of 16: [numbers].

    Returns:
        The numbers, of which those above `size` [1] are replaced by the last below it; and the numbers themselves.
    """
    zero = emitter.sizes(0)
    starts = emitter.node("Slice", emitter.numbers_below(size), zero, end, zero, emitter.sizes(LANES))
    numbers = emitter.node("Add", emitter.node("Unsqueeze", starts, emitter.sizes(1)), emitter.sizes(*range(LANES)))
    numbers = emitter.reshape(numbers, -1)
    last = emitter.node("Sub", emitter.shape_node("Squeeze", size), _integer(emitter, 1))
    return emitter.node("Clip", numbers, None, last), numbers


def _of_places(emitter: Emitter, numbers: Value) -> Value:
    """[places, 1, 1, 1]"""
    return emitter.node("Unsqueeze", numbers, emitter.sizes(1, 2, 3))


def _read(emitter: Emitter, tensors: Sequence[Value], places: Value) -> Sequence[Value]:
    """The slots `places` [numbers] of tensors [places, heads, slots, head_dim], for all queries together:
    [places, heads, 1, numbers, head_dim]."""
    places = emitter.reshape(places, 1, -1)
    return [emitter.node("Gather", tensor, places, attributes={"axis": 2}) for tensor in tensors]


def _attend(emitter: Emitter, query: Value, pair: Sequence[Value], seen: Value) -> Value:
    """softmax(query * keys / sqrt(head_dim)) * values, as `attend` in kernels/attention.h; 0 for a query that sees nothing.

    Args:
        query: [places, heads, queries, head_dim].
        pair: the keys and the values, [places, heads, queries or 1, numbers, head_dim], of a multiple of 16 numbers.
        seen: bool [places, 1, queries or 1, numbers].

    Returns:
        [places, queries, d_attention].
    """
    dim, (keys, values) = emitter.config.head_dim, pair
    queries = emitter.node("Unsqueeze", _scaled(emitter, query, dim), emitter.sizes(3))
    pairs = zip(*(_split(emitter, tensor, -1, dim // LANES) for tensor in (queries, keys)), strict=True)
    scores = _added(emitter, [emitter.node("Mul", *each) for each in pairs])  # [.., queries, numbers, 16]
    scores = emitter.node("Squeeze", _sum_of_lanes(emitter, scores, -1), emitter.sizes(-1))
    weights = _weights(emitter, scores, seen, -1)
    lanes = _sum_in_order(emitter, emitter.reshape(weights, 0, 0, 0, -1, LANES), 3)
    norm = _inverse_of_total(emitter, _sum_of_lanes(emitter, lanes, -1), 3)  # [places, heads, queries, 1]

    last = emitter.sizes(-1)
    values = emitter.node("Where", emitter.node("Unsqueeze", seen, last), values, _number(emitter, 0))
    products = emitter.node("Mul", emitter.node("Unsqueeze", weights, last), values)
    # The sums of every second number, side by side.
    sums = _sum_in_order(emitter, emitter.reshape(products, 0, 0, 0, -1, 2 * dim), 3)
    mixed = emitter.node("Squeeze", emitter.node("Add", *_split(emitter, sums, -1, 2)), emitter.sizes(3))
    mixed = emitter.node("Transpose", emitter.node("Mul", mixed, norm), attributes={"perm": (0, 2, 1, 3)})
    return emitter.reshape(mixed, 0, 0, emitter.config.d_attention)


def source_attention(emitter: Emitter, query: Value, key: Value, value: Value, length: Value) -> Sequence[Value]:
    """Attention of all tokens of a source, as `attend_source` in kernels/attention.h: `query` [.., d_attention], `key` and
    `value` [batch, src, heads, head_dim].

    `COLUMNS` of the numbers of a head are multiplied at a time. So no tensor is much larger than the scores [batch, heads,
    src, src]. These have the keys first, because CumSum is slow along the last axis.
    """
    dim = emitter.config.encoder_head_dim
    size = emitter.shape_of(key, 1, 2)
    places, numbers = _blocks(emitter, size, size)
    keys, values = (emitter.node("Gather", tensor, places, attributes={"axis": 1}) for tensor in (key, value))
    keys, values = (emitter.node("Transpose", each, attributes={"perm": (0, 2, 1, 3)}) for each in (keys, values))
    query = emitter.node("Reshape", query, emitter.shape_of(key))
    query = _scaled(emitter, emitter.node("Transpose", query, attributes={"perm": (0, 2, 3, 1)}), dim)
    query = emitter.node("Unsqueeze", query, emitter.sizes(3))
    keys = emitter.node(
        "Unsqueeze", emitter.node("Transpose", keys, attributes={"perm": (0, 1, 3, 2)}), emitter.sizes(4)
    )
    scores: Value | None = None
    for part, row in zip(*(_split(emitter, tensor, 2, dim // COLUMNS) for tensor in (keys, query)), strict=True):
        if scores is None:
            products = emitter.node("Mul", part, row)  # [batch, heads, COLUMNS, keys, src]
        else:
            # A size of the sum so far makes these products wait for it. Otherwise all would be in memory together.
            size = emitter.shape_of(scores, 4, 5)
            row = emitter.node("Slice", row, emitter.sizes(0), size, emitter.sizes(4))
            products = emitter.node("Concat", scores, emitter.node("Mul", part, row), attributes={"axis": 2})
        scores = _sum_in_order(emitter, products, 2)
    scores = emitter.node("Squeeze", scores, emitter.sizes(2))
    length = _of_places(emitter, emitter.node("Cast", length, attributes={"to": _INT64}))
    seen = emitter.node("Less", emitter.node("Unsqueeze", numbers, emitter.sizes(1)), length)  # [batch, 1, keys, 1]
    weights = _weights(emitter, scores, seen, 2)

    shape = (emitter.shape_of(weights, 0, 2), emitter.sizes(-1, LANES), emitter.shape_of(weights, 3, 4))
    lanes = emitter.node("Reshape", weights, emitter.shape_node("Concat", *shape, attributes={"axis": 0}))
    total = _sum_of_lanes(emitter, _sum_in_order(emitter, lanes, 2), 3)
    norm = _inverse_of_total(emitter, total, 3)  # [batch, heads, 1, src]

    values = emitter.node("Where", seen, values, _number(emitter, 0))
    values, weights = (
        emitter.node("Unsqueeze", values, emitter.sizes(4)),
        emitter.node("Unsqueeze", weights, emitter.sizes(3)),
    )
    parts = (emitter.node("Mul", part, weights) for part in _split(emitter, values, 3, dim // COLUMNS))
    sums = [_sum_in_order(emitter, products, 2) for products in parts]  # [batch, heads, 1, COLUMNS, src]
    mixed = emitter.node("Squeeze", emitter.node("Concat", *sums, attributes={"axis": 3}), emitter.sizes(2))
    mixed = emitter.node("Transpose", emitter.node("Mul", mixed, norm), attributes={"perm": (0, 3, 1, 2)})
    return (emitter.reshape(mixed, 0, 0, emitter.config.d_attention),)


def _scaled(emitter: Emitter, query: Value, head_dim: int) -> Value:
    scale = np.float32(1) / np.sqrt(np.float32(head_dim))
    return emitter.node("Mul", query, _number(emitter, scale))


def _weights(emitter: Emitter, scores: Value, seen: Value, axis: int) -> Value:
    """e^(score - the largest), and 0 where nothing is `seen`."""
    scores = emitter.node("Where", seen, scores, _number(emitter, -np.inf))
    most = emitter.node("ReduceMax", scores, emitter.sizes(axis), attributes={"keepdims": 1})
    weights = _exp_of_negative(emitter, emitter.node("Sub", scores, most))
    return emitter.node("Where", seen, weights, _number(emitter, 0))


def _exp_of_negative(emitter: Emitter, x: Value) -> Value:
    """e^x for x <= 0, step by step as `exp_of_negative` in kernels/floats.h."""

    def step(op_type: str, a: Value, b: Value | float) -> Value:
        return emitter.node(op_type, a, b if isinstance(b, ir.Value) else _number(emitter, b))

    drops_fraction = 12582912.0
    x = step("Max", x, -87.0)
    whole = step("Add", step("Mul", x, 1.44269504), drops_fraction)
    n = step("Sub", whole, drops_fraction)
    r = step("Add", step("Sub", x, step("Mul", n, 0.693359375)), step("Mul", n, 2.12194440e-4))
    p = step("Add", step("Mul", r, 1.9875691500e-4), 1.3981999507e-3)
    for coefficient in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = step("Add", step("Mul", p, r), coefficient)
    p = step("Add", step("Add", step("Mul", step("Mul", p, r), r), r), 1.0)
    power = emitter.node("Cast", step("Sub", whole, drops_fraction - 126), attributes={"to": _INT64})
    power = emitter.node("Clip", power, _integer(emitter, 0), _integer(emitter, 126))  # NaN is no index
    return emitter.node("Mul", p, emitter.node("Gather", _powers_of_two(emitter), power))


def _powers_of_two(emitter: Emitter) -> Value:
    """2^-126, 2^-125, .. [128]. ONNX Runtime computes it once, when it loads the graph."""
    large = emitter.constant(2.0 ** np.arange(-126, 2, 16)[:, None], np.float32)
    small = emitter.constant(2.0 ** np.arange(16), np.float32)
    return emitter.reshape(emitter.node("Mul", large, small), -1)


def _inverse_of_total(emitter: Emitter, total: Value, axis: int) -> Value:
    """`_inverse` of the sum of a query's weights. It is at least the largest weight, which is 1; or 0 if the query sees
    nothing, and then the weighted sum is 0, too."""
    return _inverse(emitter, emitter.node("Max", total, _number(emitter, 1)), axis)


def _inverse(emitter: Emitter, numbers: Value, axis: int) -> Value:
    """1 / `numbers`, without an axis of size 1."""
    # The Squeeze also keeps ONNX Runtime from replacing (1 / a) * b by b / a, which has other bits.
    return emitter.node("Squeeze", emitter.node("Div", _number(emitter, 1), numbers), emitter.sizes(axis))


def _sum_of_lanes(emitter: Emitter, lanes: Value, axis: int) -> Value:
    """The sum of 16 numbers along an axis, as `sum` in kernels/floats.h: 8 + 8, 4 + 4, 2 + 2 and 1 + 1. The axis stays."""
    for _ in range(4):
        lanes = emitter.node("Add", *_split(emitter, lanes, axis, 2))
    return lanes


def _sum_in_order(emitter: Emitter, numbers: Value, axis: int) -> Value:
    """The sum along an axis, each number added to the sum of those before it. The axis stays."""
    sums = emitter.node("CumSum", numbers, _integer(emitter, axis))
    return emitter.node("Gather", sums, emitter.sizes(-1), attributes={"axis": axis})


def _split(emitter: Emitter, tensor: Value, axis: int, count: int) -> Sequence[Value]:
    if count == 1:
        return [tensor]
    return emitter.nodes("Split", tensor, outputs=count, attributes={"axis": axis, "num_outputs": count})


def _added(emitter: Emitter, numbers: Sequence[Value]) -> Value:
    total, *more = numbers
    for number in more:
        total = emitter.node("Add", total, number)
    return total


def _number(emitter: Emitter, value: float | np.floating) -> Value:
    return emitter.constant(value, np.float32)


def _integer(emitter: Emitter, value: int) -> Value:
    return emitter.constant(value, np.int64)
