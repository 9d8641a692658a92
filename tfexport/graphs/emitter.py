"""What graphs are written with: nodes, weights by reference, and the projections of a model.

Nothing here knows how a layer is computed; that is in `graphs/layers.py` and in the modules of the dialects.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeAlias

import ml_dtypes
import numpy as np
import onnx_ir as ir

from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.graphs.projections import Projection
from tfexport.graphs.stored_weights import StoredWeights
from tfexport.shortlist_contract import LISTED

CONTRIB = "com.microsoft"
OWN = "tfexport"
"""The domain of functions for which there may be a kernel; see `kernels`."""
OPSET = 24

Value: TypeAlias = ir.Value

_TYPES = {
    "int64": ir.DataType.INT64,
    "int32": ir.DataType.INT32,
    "bool": ir.DataType.BOOL,
    "int8": ir.DataType.INT8,
    "uint8": ir.DataType.UINT8,
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
_HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

Linear = Callable[["Emitter", Projection, Value], Value]
"""Emits a projection of states [.., in] to [.., out]."""

Floats = Literal["computed", "stored", "none"]
"""What a node does with floats among its inputs. `computed`: it computes with them. `stored`: it writes them to an output
of the graph, in the type that the contract has for it. `none`: it takes them as they are, such as for their shape."""


class Precision(Protocol):
    """The types that the nodes of a graph compute in."""

    def inputs(
        self, emitter: Emitter, inputs: Sequence[Value | None], floats: Floats
    ) -> tuple[Sequence[Value | None], bool]:
        """The inputs of a node in the types that it takes, and whether it computes in float32 though the graph does not."""
        ...

    def made(self, inputs: Sequence[Value | None], outputs: Sequence[Value], floats: Floats, in_float32: bool) -> None:
        """Called with each node that was made of what `inputs` returned."""
        ...

    def output(self, emitter: Emitter, value: Value) -> Value:
        """`value` in the type of the graph, as an output of it."""
        ...

    def float32(self, emitter: Emitter, value: Value) -> Value:
        """`value`, which is of the type of a graph in half precision or computed by its nodes, in float32."""
        ...

    def number(self, emitter: Emitter, value: float) -> Value:
        """A constant of the type that nodes compute in at `emitter.path`."""
        ...


class OnePrecision:
    """All nodes compute in the precision of the graph."""

    def inputs(
        self, emitter: Emitter, inputs: Sequence[Value | None], floats: Floats
    ) -> tuple[Sequence[Value | None], bool]:
        return inputs, False

    def made(self, inputs: Sequence[Value | None], outputs: Sequence[Value], floats: Floats, in_float32: bool) -> None:
        pass

    def output(self, emitter: Emitter, value: Value) -> Value:
        return value

    def float32(self, emitter: Emitter, value: Value) -> Value:
        return emitter.node("Cast", value, attributes={"to": int(ir.DataType.FLOAT)})

    def number(self, emitter: Emitter, value: float) -> Value:
        array = np.asarray(value, _HALVES.get(emitter.graph.precision, np.float32))
        return emitter.initializer(f"number.{value}", ir.tensor(array))  # the same name in every precision


class Emitter:
    """Collects the nodes of a graph, named by the module that they belong to. Equal nodes are one node.

    Args:
        stored: the weights, to which the graph points.
        projections: the linear layers of the graph.
        linear: how they are computed.
        precision: the types that nodes compute in.
    """

    def __init__(
        self,
        graph: contract.GraphSpec,
        config: ModelConfig,
        stored: StoredWeights,
        projections: Iterable[Projection],
        linear: Linear,
        precision: Precision | None = None,
    ):
        self.graph, self.config = graph, config
        self._stored, self._linear, self._precision = stored, linear, precision or OnePrecision()
        self._projections = {projection.name: projection for projection in projections}
        self.path = ""
        """The module that nodes are named by; see `at`."""
        self._nodes: list[ir.Node] = []
        self._numbers: Counter[str] = Counter()
        self._known: dict[Any, Value] = {}
        self._initializers: dict[str, Value] = {}
        self._functions: dict[str, ir.Function] = {}
        self.inputs = {tensor.name: self._boundary(tensor) for tensor in graph.inputs}
        self._outputs: dict[str, Value] = {}
        self._rectified: dict[Value, Value] = {}

    def _boundary(self, tensor: contract.TensorSpec, value: Value | None = None) -> Value:
        value = value or ir.Value()
        value.name = tensor.name
        value.shape = ir.Shape(contract.shape(tensor, self.config))
        value.type = ir.TensorType(_TYPES[tensor.dtype])
        return value

    @contextmanager
    def at(self, path: str) -> Iterator[None]:
        """Nodes made within are named by the module `path`."""
        outer, self.path = self.path, path
        yield
        self.path = outer

    def node(
        self,
        op_type: str,
        *inputs: Value | None,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
        output: str = "",
        floats: Floats = "computed",
    ) -> Value:
        """The one output of a node, which may be an `output` of the graph."""
        attributes = attributes or {}
        key = (op_type, domain, tuple(map(id, inputs)), tuple(sorted(attributes.items())), output)
        if key not in self._known:
            outputs = (output,) if output else 1
            (self._known[key],) = self.nodes(
                op_type, *inputs, attributes=attributes, domain=domain, outputs=outputs, floats=floats
            )
        return self._known[key]

    def nodes(
        self,
        op_type: str,
        *inputs: Value | None,
        outputs: Sequence[str] | int,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
        floats: Floats = "computed",
    ) -> Sequence[Value]:
        """The outputs of a node: so many, or these of the graph (an empty name is no output of it)."""
        given, in_float32 = self._precision.inputs(self, inputs, floats)
        name = f"{self.path}/{op_type}".removeprefix("/")
        self._numbers[name] += 1
        name = f"{name}_{self._numbers[name]}"
        count = outputs if isinstance(outputs, int) else len(outputs)
        node = ir.node(op_type, list(given), dict(attributes or {}), domain=domain, num_outputs=count, name=name)
        for index, value in enumerate(node.outputs):
            value.name = f"{name}.{index}"
        self._nodes.append(node)
        self._precision.made(given, node.outputs, floats, in_float32)
        for value, output in zip(node.outputs, () if isinstance(outputs, int) else outputs, strict=False):
            if output:
                self.set_output(self._precision.output(self, value), output)
        return node.outputs

    def called(
        self,
        name: str,
        *inputs: Value,
        body: Callable[..., Sequence[Value]],
        outputs: Sequence[str],
        dtypes: Sequence[contract.DType] = (),
        attributes: Mapping[str, float] | None = None,
    ) -> Sequence[Value]:
        """A call of a function, which ONNX Runtime computes by a kernel where it has one; see `kernels`.

        Args:
            body: emits the definition of the function. It is called with an emitter for the function and the function's
                inputs, at the first call of a `name` in a graph. So it must emit the same for all calls of the name, and use
                nothing but these inputs.
            outputs: as `nodes` takes them.
            dtypes: of the outputs; float32 when empty.
            attributes: of the call, to which `body` refers (`ir.RefAttr`).
        """
        if name not in self._functions:
            self._functions[name] = self._function(name, len(inputs), body, attributes or ())
        values = self.nodes(name, *inputs, outputs=outputs, domain=OWN, attributes=attributes)
        for value, dtype in zip(values, dtypes or ["float32"] * len(values), strict=True):
            # The checker cannot see through a function that has operators it does not know.
            value.type = ir.TensorType(_TYPES[dtype])
        return values

    def _function(
        self, name: str, n_inputs: int, body: Callable[..., Sequence[Value]], attributes: Iterable[str]
    ) -> ir.Function:
        inner = copy.copy(self)  # the same model, path and numbers of names; nodes of its own
        inner._nodes, inner._known, inner._initializers = [], {}, {}
        inputs = [ir.Value(name=f"input.{index}") for index in range(n_inputs)]
        outputs = body(inner, *inputs)
        constants = [
            ir.node("Constant", [], {"value": value.const_value}, outputs=[value], name=value.name)
            for value in inner._initializers.values()
        ]
        graph = ir.Graph(inputs, outputs, nodes=[*constants, *inner._nodes], opset_imports={"": OPSET, CONTRIB: 1})
        declared = [ir.Attr(attribute, ir.AttributeType.FLOAT, None) for attribute in attributes]
        return ir.Function(OWN, name, graph=graph, attributes=declared)

    def set_output(self, value: Value, name: str) -> None:
        """Make `value` the output `name` of the graph."""
        (tensor,) = (tensor for tensor in self.graph.outputs if tensor.name == name)
        self._outputs[name] = self._boundary(tensor, value)

    def weight(self, name: str) -> Value:
        """A tensor of the weights files, or the input of the graph that stands for it."""
        if (given := self.inputs.get(f"{LISTED}{name}")) is not None:
            return given
        return self.initializer(name, self._stored.tensor(name))

    def is_listed(self, name: str) -> bool:
        """Whether an input of the graph stands for the tensor `name` of the weights files."""
        return f"{LISTED}{name}" in self.inputs

    def has(self, name: str) -> bool:
        """Whether the weights files have a tensor of this name."""
        return name in self._stored

    def projection_size(self, projection: Projection) -> tuple[int, int]:
        """Numbers that go in and come out."""
        shapes = [self._stored.shape(name) for name in projection.weights]
        return shapes[0][1], sum(shape[0] for shape in shapes)

    def constant(self, value: Any, dtype: Any) -> Value:
        array = np.asarray(value, dtype)
        return self.initializer(f"constant.{array.dtype}.{array.shape}.{array.tolist()}", ir.tensor(array))

    def number(self, value: float) -> Value:
        """A constant of the type that nodes compute in at this path."""
        return self._precision.number(self, value)

    def hidden_score(self) -> Value:
        """What `blocks.HIDDEN` is, in the type that the graph computes in."""
        least = float(ml_dtypes.finfo(_HALVES.get(self.graph.precision, np.float32)).min)
        return self.number(least / 2)

    def sizes(self, *values: int) -> Value:
        """A constant shape, or a part of one."""
        return self.constant(values, np.int64)

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> Value:
        """A constant of the graph by its name; `tensor` is taken where it is new."""
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
        """`states` [.., in] through the projection of this name, [.., out]."""
        with self.at(name):
            return self._linear(self, self._projections[name], states)

    def shape_of(self, tensor: Value, start: int = 0, end: int | None = None) -> Value:
        """The sizes [n] of the axes of `tensor` from `start` to before `end`."""
        attributes = {"start": start} if end is None else {"start": start, "end": end}
        return self.shape_node("Shape", tensor, attributes=attributes)

    def shape_node(self, op_type: str, *inputs: Value, attributes: Mapping[str, Any] | None = None) -> Value:
        """The output of a node that computes nothing but shapes, and is named so."""
        with self.at(contract.SHAPE_NODE.removesuffix("/")):
            return self.node(op_type, *inputs, attributes=attributes, floats="none")

    def float32(self, states: Value) -> Value:
        """`states` in float32, also in a graph in half precision."""
        if self.graph.precision not in _HALVES:
            return states
        return self._precision.float32(self, states)

    def reshaped(self, states: Value, *shape: int) -> Value:
        """`states` in a shape of which a number may be -1, and 0 for what it was."""
        return self.node("Reshape", states, self.sizes(*shape))

    def activated(self, states: Value) -> Value:
        if self.config.activation == "silu":
            return self.node("Mul", states, self.node("Sigmoid", states))
        if self.config.activation != "relu":
            approximate = "tanh" if self.config.activation == "gelu_tanh" else "none"
            return self.node("Gelu", states, attributes={"approximate": approximate})
        rectified = self.node("Relu", states)  # in float32 ONNX Runtime makes it a part of the Gemm before it
        self._rectified[rectified] = states
        return rectified

    def before_relu(self, states: Value) -> Value | None:
        """What `states` are the ReLU of, if they are one. The ReLU is left out where nothing else takes it."""
        return self._rectified.get(states)

    def normed(self, path: str, states: Value) -> Value:
        """The norm of the module at `path`."""
        return self._norm(path, states, *self._norm_weights(path))

    def _norm_weights(self, path: str) -> list[Value]:
        return [
            self.weight(f"{path}.{part}") for part in (("weight",) if self.config.norm == "rms" else ("weight", "bias"))
        ]

    def _norm(self, path: str, states: Value, *weights: Value, epsilon: float | ir.RefAttr | None = None) -> Value:
        attributes = {"axis": -1, "epsilon": float(self.config.norm_eps) if epsilon is None else epsilon}
        with self.at(path):
            name = "RMSNormalization" if self.config.norm == "rms" else "LayerNormalization"
            return self.nodes(name, states, *weights, outputs=1, attributes=attributes)[0]

    def added(self, states: Value, branch: Value) -> Value:
        # Not SkipLayerNormalization, whose kernel in ONNX Runtime is slower than Add and LayerNormalization.
        return self.node("Add", states, branch)

    def added_and_normed(self, layer: str, norm: str, states: Value, branch: Value) -> tuple[Value, Value]:
        """What a residual branch of a layer gives: the sum, and the norm of it that follows."""
        if self.graph.dialect != "ort" or self.config.norm == "rms":
            with self.at(layer):
                total = self.added(states, branch)
            return total, self.normed(norm, total)

        with self.at(norm):
            inputs = (states, branch, *self._norm_weights(norm))
            epsilons = {"epsilon": float(self.config.norm_eps)}
            total, normed = self.called(
                "ResidualNorm", *inputs, body=Emitter._residual_norm, outputs=("", ""), attributes=epsilons
            )
        return total, normed

    def _residual_norm(self, states: Value, branch: Value, scale: Value, bias: Value) -> Sequence[Value]:
        total = self.added(states, branch)
        epsilon = ir.RefAttr("epsilon", "epsilon", ir.AttributeType.FLOAT)
        return total, self._norm("", total, scale, bias, epsilon=epsilon)

    def model(self) -> ir.Model:
        outputs = [self._outputs[tensor.name] for tensor in self.graph.outputs]
        needed: set[Value] = set(outputs)
        nodes: list[ir.Node] = []
        for node in reversed(self._nodes):
            if needed.intersection(node.outputs):
                needed.update(value for value in node.inputs if value is not None)
                nodes.insert(0, node)
        domains = {node.domain for node in nodes}
        graph = ir.Graph(
            list(self.inputs.values()),
            outputs,
            nodes=nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": OPSET} | {domain: 1 for domain in (CONTRIB, OWN) if domain in domains},
            name=self.graph.role,
        )
        return ir.Model(graph, ir_version=10, functions=self._functions.values())
