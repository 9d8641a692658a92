"""The passes over a graph do what they say, leave alone what they do not recognise, and change no result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from tfexport import contract
from tfexport.bundle import open_bundle
from tfexport.errors import TfexportError
from tfexport.graph_modules import random_inputs
from tfexport.optimize import require_no_masks, shape_nodes, simplify, use_lengths

SIZES = [
    {"batch": 1, "rows": 1, "src": 1, "cache": 1, "from": 1},
    {"batch": 3, "rows": 12, "src": 7, "cache": 9, "from": 1},
    {"batch": 4, "rows": 4, "src": 20, "cache": 16, "from": 1},
    {"batch": 2, "rows": 10, "src": 3, "cache": 20, "from": 1},
]

LENGTHS = """
    column = Unsqueeze(length, one1)
    less = Less(counted, column)
    wide = Unsqueeze(less, inner)
    mask = Expand(wide, shape)
"""
"""The mask [batch, 1, queries, keys] of the first `length` keys, as our models make it."""


def attention(mask: str = LENGTHS, *, extra: str = "", given: str = "mask", attributes: str = "") -> ir.Model:
    """A graph of one attention, with the mask that the nodes `mask` make."""
    return ir.from_onnx_text(f"""
<ir_version: 10, opset_import: ["" : 24]>
attend (float[batch,2,n,4] q, float[batch,2,k,4] key, float[batch,2,k,4] value, int64[batch] length{extra})
    => (float[batch,2,n,4] out)
<int64 zero = {{0}}, int64 one = {{1}}, int64 two = {{2}}, int64[1] one1 = {{1}}, int64[2] inner = {{1, 2}},
 int64[3] three = {{0, 1, 2}},
 int64[2] outer = {{0, 1}}, int64[1] minus = {{-1}}, float nothing = {{0}}, float far = {{-10000}}>
{{
    of_key = Shape(key)
    size = Gather(of_key, two)
    of_query = Shape(q)
    queries = Gather(of_query, two)
    queries1 = Unsqueeze(queries, minus)
    shape = Concat<axis = 0>(one1, one1, queries1, one1)
    counted = Range(zero, size, one)
    {mask}
    out = Attention{attributes}(q, key, value, {given})
}}
""")


def run(model: ir.Model | Path, inputs: Mapping[str, Any], *, outputs: list[str] | None = None) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    content = model if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return session.run(outputs, inputs)


def inputs(lengths: list[int], queries: int, keys: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    shapes = {"q": queries, "key": keys, "value": keys}
    tensors = {name: random.standard_normal((len(lengths), 2, size, 4), np.float32) for name, size in shapes.items()}
    return {**tensors, "length": np.array(lengths)}


# --- lengths instead of masks


def test_the_mask_of_the_first_keys_becomes_lengths_and_changes_nothing() -> None:
    cases = [inputs([5, 1, 7], 3, 7), inputs([1], 1, 1), inputs([2, 2], 5, 3)]
    expected = [run(attention(), case) for case in cases]
    model = attention()
    assert use_lengths(model) == 1
    (node,) = [node for node in model.graph if node.op_type == "Attention"]
    assert [value and value.name for value in node.inputs] == ["q", "key", "value", None, None, None, "length"]
    assert {node.op_type for node in model.graph} == {"Attention"}  # nothing is left of the mask
    for case, wanted in zip(cases, expected, strict=True):
        np.testing.assert_allclose(run(model, case)[0], wanted[0], atol=1e-6)


@pytest.mark.parametrize("dialect", ["", ".fp16", ".bf16"])
@pytest.mark.parametrize("role", ["encoder", "decoder_step"])
def test_all_attentions_of_our_graphs_are_told_lengths(half_bundle: Path, role: str, dialect: str) -> None:
    model = ir.load(half_bundle / f"{role}{dialect}.onnx")
    before = Counter(node.op_type for node in model.graph)
    assert use_lengths(model) == before["Attention"] == 2
    require_no_masks(model)
    after = Counter(node.op_type for node in model.graph)
    assert after["Attention"] == 2
    assert not {"Less", "Expand"} & set(after)
    told = [node.inputs[6].name for node in model.graph if node.op_type == "Attention"]
    assert told[-1] == "src_len"  # of the encoder, or of the cross-attention
    assert (told[0] == "src_len") == (role == "encoder")


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())))
@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("role", ["encoder", "decoder_step"])
def test_both_dialects_compute_the_same(half_bundle: Path, role: Any, precision: Any, sizes: dict[str, int]) -> None:
    bundle = open_bundle(half_bundle)
    (spec,) = [spec for spec in contract.graphs_of(bundle.config, precision) if spec.role == role]
    given = random_inputs(spec, bundle.config, sizes, np.random.default_rng(sizes["rows"]))
    paths = [bundle.graph(role, precision, dialect) for dialect in ("onnx24", "onnx24-lengths")]
    masked, told = (run(path, given) for path in paths)
    assert len(masked) == len(told) == len(spec.outputs)
    for tensor, one, other in zip(spec.outputs, masked, told, strict=True):
        if tensor.name != "best.ids":  # equal logits may stand in any order
            np.testing.assert_allclose(one, other, atol=1e-5 if precision == "float32" else 1e-2, err_msg=tensor.name)


CAUSAL = """
    column = Unsqueeze(last, one1)
    less = Less(counted, column)
    wide = Unsqueeze(less, outer)
    mask = Expand(wide, shape)
"""
ROWS = "rows = Range(zero, queries, one)\n"

OTHER_MASKS = {
    "causal": ROWS + "last = Add(rows, one)\n" + CAUSAL,
    "causal, or equal": ROWS + CAUSAL.replace("last", "rows").replace("Less", "LessOrEqual"),
    "one length for each query": "last = Identity(length)\n" + CAUSAL,
    "counted from 1": "from_one = Range(one, size, one)\n" + LENGTHS.replace("counted", "from_one"),
    "every second": "every = Range(zero, size, two)\n" + LENGTHS.replace("counted", "every"),
    "counted down": "last = Sub(size, one)\nback = Neg(one)\ndown = Range(last, back, back)\n"
    + LENGTHS.replace("counted", "down"),
    "the other way round": LENGTHS.replace("Less(counted, column)", "Less(column, counted)"),
    "up to the length": LENGTHS.replace("Less", "LessOrEqual"),
    "all but the first": LENGTHS.replace("Less", "GreaterOrEqual"),
    "inverted": LENGTHS.replace("wide = Unsqueeze(less", "more = Not(less)\nwide = Unsqueeze(more"),
    "counted and moved": "moved = Add(counted, one)\n" + LENGTHS.replace("counted", "moved"),
    "one of two": LENGTHS.replace("wide = Unsqueeze(less", "both = And(less, less)\nwide = Unsqueeze(both"),
    "numbers": LENGTHS.replace("mask = Expand(wide", "penalty = Where(wide, nothing, far)\nmask = Expand(penalty"),
    "one length for all": LENGTHS.replace("Unsqueeze(length, one1)", "Gather(length, zero)").replace("inner", "three"),
}


@pytest.mark.parametrize("mask", OTHER_MASKS.values(), ids=OTHER_MASKS)
def test_any_other_mask_stays(mask: str) -> None:
    model = attention(mask)
    assert use_lengths(model) == 0
    (node,) = [node for node in model.graph if node.op_type == "Attention"]
    assert [value and value.name for value in node.inputs] == ["q", "key", "value", "mask"]
    with pytest.raises(TfexportError, match="kept a mask that tells no lengths"):
        require_no_masks(model)


@pytest.mark.parametrize("type_", ["bool[batch,1,n,k]", "float[batch,1,n,k]"])
def test_a_mask_that_is_an_input_stays(type_: str) -> None:
    model = attention("", extra=f", {type_} given", given="given")
    assert use_lengths(model) == 0
    with pytest.raises(TfexportError, match="kept a mask"):
        require_no_masks(model)


def test_a_mask_beside_a_causal_attention_stays() -> None:
    """Told lengths, such an attention counts its queries from the end of the keys, not from their beginning."""
    model = attention(attributes="<is_causal = 1>")
    case = inputs([5, 3], 2, 6)
    expected = run(model, case)
    use_lengths(model)
    np.testing.assert_allclose(run(model, case)[0], expected[0], atol=1e-6)


def test_an_attention_with_its_own_cache_stays() -> None:
    past = ", float[batch,2,p,4] past_key, float[batch,2,p,4] past_value"
    model = attention(extra=past, given="mask, past_key, past_value")
    assert use_lengths(model) == 0


def test_an_attention_without_a_mask_stays() -> None:
    model = attention("", given="")
    node = next(node for node in model.graph if node.op_type == "Attention")
    node.resize_inputs(3)
    assert use_lengths(model) == 0
    require_no_masks(model)  # it has none to lose


def test_of_two_attentions_only_the_one_with_lengths_changes() -> None:
    first = "other = Attention(q, key, value, given)\n"
    model = attention(first + LENGTHS, extra=", bool[batch,1,n,k] given")
    other, attend = (node for node in model.graph if node.op_type == "Attention")
    other.name = "encoder/other"
    model.graph.outputs.append(other.outputs[0])
    assert use_lengths(model) == 1
    assert [value and value.name for value in other.inputs] == ["q", "key", "value", "given"]
    assert len(attend.inputs) == 7
    with pytest.raises(TfexportError, match=r"^encoder/other kept a mask"):
        require_no_masks(model)


# --- arithmetic on shapes


def is_shape(name: str) -> bool:
    return name.startswith(contract.SHAPE_NODE)


@pytest.mark.parametrize("role", ["encoder", "decoder_step"])
def test_shape_nodes_of_our_graphs_depend_on_shapes_alone(half_bundle: Path, role: Any) -> None:
    """Their values are the same whatever numbers the inputs hold, and they are integers."""
    bundle = open_bundle(half_bundle)
    (spec,) = [spec for spec in contract.graphs_of(bundle.config) if spec.role == role]
    model = onnx.load(bundle.graph(role))
    outputs = [name for node in model.graph.node if is_shape(node.name) for name in node.output]
    assert len(outputs) > 5
    for name in outputs:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None))
    exposed = ir.from_proto(model)
    random = np.random.default_rng(0)
    found = [run(exposed, random_inputs(spec, bundle.config, SIZES[1], random), outputs=outputs) for _ in range(3)]
    for one, *others in zip(*found, strict=True):
        assert one.dtype == np.int64
        assert one.size <= 4
        assert all(np.array_equal(one, other) for other in others)


@pytest.mark.parametrize("role", ["encoder", "decoder_step", "select_rows", "encoder.fp16", "decoder_step.lengths"])
def test_no_node_that_computes_is_a_shape_node(half_bundle: Path, role: str) -> None:
    graph = onnx.load(half_bundle / f"{role}.onnx", load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL}
    inputs = {value.name for value in graph.input}
    for node in graph.node:
        if is_shape(node.name):
            assert node.op_type in ("Shape", "Squeeze", "Unsqueeze", "Concat", "Reshape", "Div", "Gather", "Cast")
            assert not weights & set(node.input)
            assert node.op_type == "Shape" or not inputs & set(node.input)
    computing = {node.op_type for node in graph.node if not is_shape(node.name)}
    assert "Gather" in computing  # of embeddings, or of rows
    if role != "select_rows":
        assert {"Attention", "MatMul", "LayerNormalization", "Add"} <= computing


def shapes_in(nodes: str) -> list[str]:
    """The outputs of the nodes that are arithmetic on shapes."""
    weight = ", ".join(str(index) for index in range(80))
    model = ir.from_onnx_text(f"""
<ir_version: 10, opset_import: ["" : 24]>
g (int64[batch] ids, float[batch,k] x) => (float[batch,k] out)
<int64 zero = {{0}}, int64 one = {{1}}, int64[1] one1 = {{1}}, float[80] weight = {{{weight}}}>
{{
    {nodes}
    out = Identity(x)
}}
""")
    return [str(node.outputs[0].name) for node in model.graph if node in shape_nodes(model)]


def test_what_is_computed_from_shapes_and_constants_is_shape_arithmetic() -> None:
    assert shapes_in("a = Shape(x)\n b = Gather(a, one)\n c = Add(b, one)\n d = Unsqueeze(c, zero)") == list("abcd")
    assert shapes_in("a = Shape(x)\n b = Shape(ids)\n c = Concat<axis = 0>(a, b, one1)") == list("abc")


def test_what_depends_on_the_numbers_of_an_input_is_not() -> None:
    assert shapes_in("a = Add(ids, one)\n b = Gather(ids, zero)\n c = Cast<to = 1>(ids)") == []
    assert shapes_in("a = Shape(ids)\n b = Add(a, ids)\n c = Mul(b, one)") == ["a"]
    assert shapes_in("a = Shape(x)\n b = Reshape(x, a)\n c = Add(b, b)") == ["a"]
    assert shapes_in("a = Add(one, one)") == []  # nor what is constant


def test_a_weight_looked_up_by_a_size_is_computed() -> None:
    assert shapes_in("a = Shape(ids)\n b = Gather(weight, a)") == ["a"]


# --- simplification


def test_what_is_known_is_folded_but_weights_stay_as_they_lie_in_their_file() -> None:
    weight = ", ".join(str(index) for index in range(96))
    model = ir.from_onnx_text(f"""
<ir_version: 10, opset_import: ["" : 24]>
g (float[batch,12] x) => (float[batch,8] out)
<float[8,12] weight = {{{weight}}}, float half = {{0.5}}, float[1] three = {{3}}>
{{
    turned = Transpose<perm = [1, 0]>(weight)
    product = MatMul(x, turned)
    scale = Mul(half, three)
    scaled = Mul(product, scale)
    again = Mul(product, scale)
    out = Add(scaled, again)
    unused = Exp(product)
}}
""")
    given = {"x": np.arange(24, dtype=np.float32).reshape(2, 12)}
    expected = run(model, given)
    simplify(model)
    assert Counter(node.op_type for node in model.graph) == {"Transpose": 1, "MatMul": 1, "Mul": 1, "Add": 1}
    kept = {value.name: value.const_value for value in model.graph.initializers.values() if value.const_value}
    assert {name for name, tensor in kept.items() if tensor.size > 1} == {"weight"}
    np.testing.assert_array_equal(kept["weight"].numpy(), np.arange(96, dtype=np.float32).reshape(8, 12))
    np.testing.assert_array_equal(run(model, given)[0], expected[0])
