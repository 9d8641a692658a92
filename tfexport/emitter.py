"""What the graphs of the dialect `ort` are written with: nodes, weights by reference, and the projections of a model.

Nothing here knows how a layer is computed; that is in `ort_graphs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.stored_weights import StoredWeights

CONTRIB = "com.microsoft"
OPSET = 24
HIDDEN = float(np.finfo(np.float32).min) / 2
"""Added to the score of a slot that is not to be seen: its weight is exactly 0, whatever the score. Not -inf, which would be
NaN in a row that sees nothing; half of the least number, so that a score added to it stays finite."""

Value: TypeAlias = ir.Value


@dataclass(frozen=True)
class Projection:
    """A linear layer of the graph, made of one or more of the model's, one under the other."""

    name: str
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    """Empty where the model has no biases here."""

    @property
    def modules(self) -> list[str]:
        """The paths of the modules that it is made of."""
        return [name.removesuffix(".weight") for name in self.weights]

    @classmethod
    def of(cls, name: str, modules: Sequence[str], *, bias: bool) -> Projection:
        return cls(name, tuple(f"{m}.weight" for m in modules), tuple(f"{m}.bias" for m in modules) if bias else ())


Linear = Callable[["Emitter", Projection, Value], Value]
"""Emits a projection of states [n, in] to [n, out]."""


def encoder_projections(config: ModelConfig) -> Iterator[Projection]:
    """The projections of the encoder graph, the cross keys and values of the decoder among them."""
    for i in range(config.n_encoder_layers):
        for part in ("query", "key", "value", "output"):
            path = f"encoder.layers.{i}.self_attention.{part}"
            yield Projection.of(path, [path], bias=config.attention_bias)
        yield from _feed_forward(config, f"encoder.layers.{i}")
    parts = [
        f"decoder.layers.{i}.cross_attention.{p}" for i in range(config.n_decoder_layers) for p in ("key", "value")
    ]
    yield Projection.of("cross", parts, bias=config.attention_bias)


def decoder_projections(config: ModelConfig) -> Iterator[Projection]:
    """The projections of a decoder step."""
    for i in range(config.n_decoder_layers):
        own, cross = f"decoder.layers.{i}.self_attention", f"decoder.layers.{i}.cross_attention"
        modules = [f"{own}.{part}" for part in ("query", "key", "value")]
        yield Projection.of(f"{own}.query_key_value", modules, bias=config.attention_bias)
        for path in (f"{own}.output", f"{cross}.query", f"{cross}.output"):
            yield Projection.of(path, [path], bias=config.attention_bias)
        yield from _feed_forward(config, f"decoder.layers.{i}")
    weight = "output_weight"
    if config.tie_output:
        weight = "encoder.tokens.weight" if config.tie_source_target else "decoder.tokens.weight"
    yield Projection("output", (weight,), ("output_bias",) if config.output_bias else ())


def _feed_forward(config: ModelConfig, layer: str) -> Iterator[Projection]:
    for part in ("hidden", "output"):
        path = f"{layer}.feed_forward.{part}"
        yield Projection.of(path, [path], bias=config.feed_forward_bias)


class Emitter:
    """Collects the nodes of a graph, named by the module that they belong to. Equal nodes are one node."""

    def __init__(self, graph: contract.GraphSpec, config: ModelConfig, stored: StoredWeights, linear: Linear):
        self.config, self.role = config, graph.role
        self._graph, self._stored = graph, stored
        sides = (encoder_projections, decoder_projections)
        self._projections = {p.name: p for side in sides for p in side(config)}
        self._linear = linear
        # Gemm takes two axes. The quantized operators take the three that attention has, which saves the changes between.
        self.flat = graph.precision == "float32"
        self._path = ""
        self._nodes: list[ir.Node] = []
        self._known: dict[Any, Value] = {}
        self._initializers: dict[str, Value] = {}
        self.inputs = {tensor.name: self._boundary(tensor) for tensor in graph.inputs}
        self._outputs: dict[str, Value] = {}
        self._rectified: set[Value] = set()

    def _boundary(self, tensor: contract.TensorSpec, value: Value | None = None) -> Value:
        value = value or ir.Value()
        value.name = tensor.name
        value.shape = ir.Shape(contract.shape(tensor, self.config))
        types = {"float32": "FLOAT", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}
        value.type = ir.TensorType(ir.DataType[types[tensor.dtype]])
        return value

    @contextmanager
    def at(self, path: str) -> Iterator[None]:
        """Nodes made within are named by the module `path`."""
        outer, self._path = self._path, path
        yield
        self._path = outer

    def node(
        self,
        op_type: str,
        *inputs: Value | None,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
        output: str = "",
    ) -> Value:
        """The one output of a node, which may be an `output` of the graph."""
        attributes = attributes or {}
        key = (op_type, domain, tuple(map(id, inputs)), tuple(sorted(attributes.items())), output)
        if key not in self._known:
            outputs = (output,) if output else 1
            (self._known[key],) = self.nodes(op_type, *inputs, attributes=attributes, domain=domain, outputs=outputs)
        return self._known[key]

    def nodes(
        self,
        op_type: str,
        *inputs: Value | None,
        outputs: Sequence[str] | int,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> Sequence[Value]:
        """The outputs of a node: so many, or these of the graph (an empty name is no output of it)."""
        name = f"{self._path}/{op_type}_{len(self._nodes)}".removeprefix("/")
        count = outputs if isinstance(outputs, int) else len(outputs)
        node = ir.node(op_type, list(inputs), dict(attributes or {}), domain=domain, num_outputs=count, name=name)
        for index, value in enumerate(node.outputs):
            value.name = f"{name}.{index}"
            if not isinstance(outputs, int) and outputs[index]:
                self.is_output(value, outputs[index])
        self._nodes.append(node)
        return node.outputs

    def is_output(self, value: Value, name: str) -> None:
        """`value` is the output `name` of the graph."""
        (tensor,) = (tensor for tensor in self._graph.outputs if tensor.name == name)
        self._outputs[name] = self._boundary(tensor, value)

    def weight(self, name: str) -> Value:
        """A tensor of the weights files."""
        return self._initializer(name, self._stored.tensor(name, squeezed=True))

    def has(self, name: str) -> bool:
        """Whether the weights files have a tensor of this name."""
        return name in self._stored

    def projection_size(self, projection: Projection) -> tuple[int, int]:
        """Numbers that go in and come out."""
        shapes = [self._stored.shape(name) for name in projection.weights]
        return shapes[0][1], sum(shape[0] for shape in shapes)

    def constant(self, value: Any, dtype: Any) -> Value:
        array = np.asarray(value, dtype)
        return self._initializer(f"constant.{array.dtype}.{array.shape}.{array.tolist()}", ir.tensor(array))

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> Value:
        if name not in self._initializers:
            tensor.name = name
            self._initializers[name] = ir.Value(
                name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
            )
        return self._initializers[name]

    def joined(self, names: Sequence[str]) -> Value:
        """Tensors of the weights files one under the other: ONNX Runtime joins them when it loads the graph."""
        parts = [self.weight(name) for name in names]
        return parts[0] if len(parts) == 1 else self.node("Concat", *parts, attributes={"axis": 0})

    def projected(self, name: str, states: Value) -> Value:
        """`states` [n, in] through the projection of this name, [n, out]."""
        with self.at(name):
            return self._linear(self, self._projections[name], states)

    def reshaped(self, states: Value, *shape: int) -> Value:
        return self.node("Reshape", states, self.constant(shape, np.int64))

    def two_axes(self, states: Value) -> Value:
        """States of attention as projections take them: [n, d_model] in float32."""
        return self.reshaped(states, -1, self.config.d_model) if self.flat else states

    def three_axes(self, states: Value, shape: Value) -> Value:
        """States of projections as attention takes them, of this shape."""
        return self.node("Reshape", states, shape) if self.flat else states

    def activated(self, states: Value) -> Value:
        if self.config.activation == "gelu":
            return self.node("Gelu", states)
        rectified = self.node("Relu", states)  # in float32 ONNX Runtime makes it a part of the Gemm before it
        self._rectified.add(rectified)
        return rectified

    def is_rectified(self, states: Value) -> bool:
        """Whether `states` have no negative numbers."""
        return states in self._rectified

    def normed(self, path: str, states: Value) -> Value:
        """LayerNorm of the module at `path`."""
        with self.at(path):
            scale, bias = self.weight(f"{path}.weight"), self.weight(f"{path}.bias")
            attributes = {"axis": -1, "epsilon": float(self.config.norm_eps)}
            return self.node("LayerNormalization", states, scale, bias, attributes=attributes)

    def attention(self, query: Value, key: Value, value: Value, *, length: Value | None, bias: Value | None) -> Value:
        """Attention of `query` [batch, queries, d_model], to states for a projection.

        Keys and values are [batch, keys, d_model] or, as caches are, [batch, heads, keys, head_dim]. `length` int32
        [batch] says how many of them count, `bias` [batch, 1, queries, keys] is added to the scores.
        """
        mixed = self.node(
            "MultiHeadAttention",
            *(query, key, value, None, length, bias),
            attributes={"num_heads": self.config.n_heads, "mask_filter_value": HIDDEN},
            domain=CONTRIB,
        )
        return self.two_axes(mixed)

    def model(self) -> ir.Model:
        graph = ir.Graph(
            list(self.inputs.values()),
            [self._outputs[tensor.name] for tensor in self._graph.outputs],
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": OPSET, CONTRIB: 1},
            name=self._graph.role,
        )
        return ir.Model(graph, ir_version=10)


def float32_linear(emitter: Emitter, projection: Projection, states: Value) -> Value:
    """Gemm with the weights as they lie in the file, [out, in]; ONNX Runtime packs them once, when it loads them."""
    bias = [emitter.joined(projection.biases)] if projection.biases else []
    return emitter.node("Gemm", states, emitter.joined(projection.weights), *bias, attributes={"transB": 1})
