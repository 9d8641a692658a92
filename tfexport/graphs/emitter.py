"""Emission of ONNX graphs: nodes, weights by reference, functions, and the projections of a model.

The layers are in `graphs/layers.py` and in the modules of the dialects: `graphs/portable.py`, `graphs/ort.py` and
`graphs/ort_cuda.py`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import onnx_ir as ir

from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.graphs.projections import Projection
from tfexport.graphs.stored_weights import StoredWeights
from tfexport.shortlist_contract import LISTED

CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
FUNCTIONS = "tfexport"
"""The domain of functions that may have a kernel; see `kernels`."""
OPSET = 24

Value: TypeAlias = ir.Value

_TYPES = {
    "int64": ir.DataType.INT64,
    "int32": ir.DataType.INT32,
    "bool": ir.DataType.BOOL,
    "int8": ir.DataType.INT8,
    "uint8": ir.DataType.UINT8,
    "float64": ir.DataType.DOUBLE,
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
_HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

Linear = Callable[["Emitter", Projection, Value], Value]
"""Emits a projection of states [.., in] to [.., out]."""

Floats = Literal["computed", "stored", "none"]
"""The use of a node's float inputs. `computed`: the node computes with them. `stored`: it writes them to an output of the
graph, in the type of the contract. `none`: it uses them in any type, such as for their shape."""


class NodePrecision:
    """The types in which the nodes of a graph compute. In this class, all compute in the precision of the graph.

    In `mixed_precision.MixedPrecision`, some modules compute in float32.
    """

    def inputs(
        self, emitter: Emitter, inputs: Sequence[Value | None], floats: Floats
    ) -> tuple[Sequence[Value | None], bool]:
        """The `inputs` of a node, cast if necessary, and whether its module computes in float32."""
        return inputs, False

    def created(
        self, inputs: Sequence[Value | None], outputs: Sequence[Value], floats: Floats, in_float32: bool
    ) -> None:
        """Called with each new node; `inputs` and `in_float32` are what `inputs` returned."""

    def output(self, emitter: Emitter, value: Value) -> Value:
        """`value` as an output of the graph, in the type of the graph."""
        return value

    def to_float32(self, emitter: Emitter, value: Value) -> Value:
        """`value` in float32, for a graph in half precision."""
        return emitter.node("Cast", value, attributes={"to": int(ir.DataType.FLOAT)}, floats="none")

    def keeps(self, path: str) -> bool:
        """Whether the module at `path` computes in float32 within a graph in half precision."""
        return False

    def scalar(self, emitter: Emitter, value: float) -> Value:
        """A constant in the type of the nodes at `emitter.path`."""
        array = np.asarray(value, _HALVES.get(emitter.graph.precision, np.float32))
        return emitter.initializer(f"number.{value}", ir.tensor(array))  # the same name in every precision


class Emitter:
    """Builds a graph node by node. Nodes are named by the module that they belong to; equal nodes are one node.

    Args:
        stored: the weights, which the graph references.
        projections: the linear layers of the graph.
        linear: emits a projection.
        precision: the types that nodes compute in.
    """

    def __init__(
        self,
        graph: contract.GraphSpec,
        config: ModelConfig,
        stored: StoredWeights,
        projections: Iterable[Projection],
        linear: Linear,
        precision: NodePrecision | None = None,
    ):
        self.graph, self.config = graph, config
        self._stored, self._linear, self._precision = stored, linear, precision or NodePrecision()
        self._projections = {projection.name: projection for projection in projections}
        self.path = ""
        """The module that new nodes belong to; see `module`."""
        self._nodes: list[ir.Node] = []
        self._name_counts: Counter[str] = Counter()
        self._values: dict[Any, Value] = {}  # outputs of nodes, by all properties that make nodes equal
        self._initializers: dict[str, Value] = {}
        self._functions: dict[str, ir.Function] = {}
        self.inputs = {tensor.name: self._with_spec(ir.Value(), tensor) for tensor in graph.inputs}
        self._outputs: dict[str, Value] = {}
        self._relu_inputs: dict[Value, Value] = {}
        self._products: dict[Value, tuple[Value, Value]] = {}

    def _with_spec(self, value: Value, tensor: contract.TensorSpec) -> Value:
        value.name = tensor.name
        value.shape = ir.Shape(contract.shape(tensor, self.config))
        value.type = ir.TensorType(_TYPES[tensor.dtype])
        return value

    @contextmanager
    def module(self, path: str) -> Iterator[None]:
        """A context in which new nodes belong to the module at `path`. Their names begin with the path."""
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
        """Emit a node with one output and return it. The output may be the graph's `output` of this name."""
        attributes = attributes or {}
        key = (op_type, domain, tuple(map(id, inputs)), tuple(sorted(attributes.items())), output)
        if key not in self._values:
            outputs = (output,) if output else 1
            (self._values[key],) = self.nodes(
                op_type, *inputs, attributes=attributes, domain=domain, outputs=outputs, floats=floats
            )
        return self._values[key]

    def nodes(
        self,
        op_type: str,
        *inputs: Value | None,
        outputs: Sequence[str] | int,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
        floats: Floats = "computed",
    ) -> Sequence[Value]:
        """Emit a node and return its outputs.

        Args:
            outputs: number of outputs, or the name of the graph's output for each, empty for none.
        """
        operands, in_float32 = self._precision.inputs(self, inputs, floats)
        name = f"{self.path}/{op_type}".removeprefix("/")
        self._name_counts[name] += 1
        name = f"{name}_{self._name_counts[name]}"
        count = outputs if isinstance(outputs, int) else len(outputs)
        typed = {  # else a tuple is compared with all protocols of onnx_ir, which takes longer than the rest of a node
            attribute: ir.AttrInt64s(attribute, value) if isinstance(value, tuple) else value
            for attribute, value in (attributes or {}).items()
        }
        node = ir.node(op_type, list(operands), typed, domain=domain, num_outputs=count, name=name)
        for index, value in enumerate(node.outputs):
            value.name = f"{name}.{index}"
        self._nodes.append(node)
        self._precision.created(operands, node.outputs, floats, in_float32)
        for value, output in zip(node.outputs, () if isinstance(outputs, int) else outputs, strict=False):
            if output:
                self.set_output(self._precision.output(self, value), output)
        return node.outputs

    def call(
        self,
        name: str,
        *inputs: Value,
        body: Callable[..., Sequence[Value]],
        outputs: Sequence[str],
        dtypes: Sequence[contract.DType] = (),
        attributes: Mapping[str, float] | None = None,
    ) -> Sequence[Value]:
        """Call a function and return its outputs. ONNX Runtime uses a kernel for the function if it has one; see `kernels`.

        Args:
            body: emits the definition of the function and returns its outputs. It is called once per `name` in a graph,
                with an emitter of the function's nodes and the function's inputs. It must use no other values.
            outputs: as in `nodes`.
            dtypes: types of the outputs; float32 if empty.
            attributes: attributes of the call; `body` refers to them (`ir.RefAttr`).
        """
        if name not in self._functions:
            self._functions[name] = self._function(name, len(inputs), body, attributes or ())
        values = self.nodes(name, *inputs, outputs=outputs, domain=FUNCTIONS, attributes=attributes)
        for value, dtype in zip(values, dtypes or ["float32"] * len(values), strict=True):
            # ONNX infers no types through a function with unknown operators.
            value.type = ir.TensorType(_TYPES[dtype])
        return values

    def _function(
        self, name: str, n_inputs: int, body: Callable[..., Sequence[Value]], attributes: Iterable[str]
    ) -> ir.Function:
        inner = copy.copy(self)  # shares the model, the path and the counts of names, but has its own nodes
        inner._nodes, inner._values, inner._initializers = [], {}, {}
        inputs = [ir.Value(name=f"input.{index}") for index in range(n_inputs)]
        outputs = body(inner, *inputs)
        constants = [
            ir.node("Constant", [], {"value": value.const_value}, outputs=[value], name=value.name)
            for value in inner._initializers.values()
        ]
        graph = ir.Graph(inputs, outputs, nodes=[*constants, *inner._nodes], opset_imports={"": OPSET, CONTRIB: 1})
        declared = [ir.Attr(attribute, ir.AttributeType.FLOAT, None) for attribute in attributes]
        return ir.Function(FUNCTIONS, name, graph=graph, attributes=declared)

    def set_output(self, value: Value, name: str) -> None:
        """Make `value` the output `name` of the graph."""
        (tensor,) = (tensor for tensor in self.graph.outputs if tensor.name == name)
        self._outputs[name] = self._with_spec(value, tensor)

    def weight(self, name: str) -> Value:
        """A tensor of the weights files, or the graph input that replaces it (see `shortlist_contract.py`)."""
        if (listed := self.inputs.get(f"{LISTED}{name}")) is not None:
            return listed
        return self.initializer(name, self._stored.tensor(name))

    def has_weight(self, name: str) -> bool:
        """Whether the weights files have a tensor of this name."""
        return name in self._stored

    def is_input_weight(self, name: str) -> bool:
        """Whether a graph input replaces the tensor `name` of the weights files."""
        return f"{LISTED}{name}" in self.inputs

    def projection_size(self, projection: Projection) -> tuple[int, int]:
        """The numbers of inputs and outputs."""
        shapes = [self._stored.shape(name) for name in projection.weights]
        return shapes[0][1], sum(shape[0] for shape in shapes)

    def constant(self, value: Any, dtype: Any) -> Value:
        """A constant array."""
        array = np.asarray(value, dtype)
        name = f"constant.{array.dtype}.{array.shape}.{array.tolist()}"
        return self._initializers[name] if name in self._initializers else self.initializer(name, ir.Tensor(array))

    def scalar(self, value: float) -> Value:
        """A constant number, in the type of the nodes at this path."""
        return self._precision.scalar(self, value)

    def sizes(self, *values: int) -> Value:
        """A constant shape or part of one, int64 [n]."""
        return self.constant(values, np.int64)

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> Value:
        """The initializer of this name; if it is new, `tensor` becomes its value."""
        if name not in self._initializers:
            tensor.name = name
            self._initializers[name] = ir.Value(
                name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
            )
        return self._initializers[name]

    def stacked(self, names: Sequence[str]) -> Value:
        """Tensors of the weights files, concatenated. ONNX Runtime computes this once, when it loads the graph."""
        parts = [self.weight(name) for name in names]
        return parts[0] if len(parts) == 1 else self.node("Concat", *parts, attributes={"axis": 0})

    def project(self, name: str, states: Value) -> Value:
        """The projection of this name, applied to `states` [.., in]: [.., out]."""
        with self.module(name):
            return self._linear(self, self._projections[name], states)

    def shape_of(self, tensor: Value, start: int = 0, end: int | None = None) -> Value:
        """The sizes [n] of the axes of `tensor` from `start` to before `end`."""
        attributes = {"start": start} if end is None else {"start": start, "end": end}
        return self.shape_node("Shape", tensor, attributes=attributes)

    def shape_node(self, op_type: str, *inputs: Value, attributes: Mapping[str, Any] | None = None) -> Value:
        """The output of a node that computes shapes; its name begins with `contract.SHAPE_NODE`."""
        with self.module(contract.SHAPE_NODE.removesuffix("/")):
            return self.node(op_type, *inputs, attributes=attributes, floats="none")

    def numbers_below(self, size: Value) -> Value:
        """The numbers from 0 to `size` [1] - 1: int64 [size]."""
        zero, one = self.constant(0, np.int64), self.constant(1, np.int64)
        return self.node("Range", zero, self.shape_node("Squeeze", size), one)

    def to_float32(self, states: Value) -> Value:
        """`states` in float32, in graphs of any precision."""
        if self.graph.precision not in _HALVES:
            return states
        return self._precision.to_float32(self, states)

    def reshape(self, states: Value, *shape: int) -> Value:
        """Reshape `states`; -1 stands for one inferred size, and 0 for an unchanged size."""
        return self.node("Reshape", states, self.sizes(*shape))

    def relu(self, states: Value) -> Value:
        """max(0, `states`). A projection of the result may use `states` instead; see `input_of_relu`."""
        rectified = self.node("Relu", states)
        self._relu_inputs[rectified] = states
        return rectified

    def input_of_relu(self, states: Value) -> Value | None:
        """The value whose ReLU is `states`, or None. The graph omits an unused ReLU."""
        return self._relu_inputs.get(states)

    def add_bias(self, biased: Value, product: Value, bias: Value) -> Value:
        """Record that `biased` is the sum of `product` and `bias`, for nodes that add a bias themselves; see `parts_of`."""
        self._products[biased] = (product, bias)
        return biased

    def parts_of(self, states: Value) -> tuple[Value, Value | None]:
        """The product and the bias whose sum is `states`; `states` and None if it is no such sum. The graph omits an unused
        sum."""
        return self._products.get(states, (states, None))

    def keeps(self, *paths: str) -> bool:
        """Whether one of the modules at `paths` computes in float32 within a graph in half precision."""
        return any(map(self._precision.keeps, paths))

    def contrib(
        self,
        op_type: str,
        *inputs: Value | None,
        outputs: Sequence[str] | int = 1,
        attributes: Mapping[str, Any] | None = None,
    ) -> Sequence[Value]:
        """Emit a node of ONNX Runtime's own operators and return its outputs, all in the precision of the graph."""
        values = self.nodes(op_type, *inputs, outputs=outputs, attributes=attributes, domain=CONTRIB)
        for value in values:
            if value.type is None:  # ONNX infers no types through unknown operators
                value.type = ir.TensorType(_TYPES[self.graph.precision])
        return values

    def model(self) -> ir.Model:
        """The finished graph, without nodes whose outputs are unused."""
        outputs = [self._outputs[tensor.name] for tensor in self.graph.outputs]
        needed: set[Value] = set(outputs)
        nodes: list[ir.Node] = []
        for node in reversed(self._nodes):
            if needed.intersection(node.outputs):
                needed.update(value for value in node.inputs if value is not None)
                nodes.insert(0, node)
                _drop_optional(node, needed)
        domains = {node.domain for node in nodes}
        graph = ir.Graph(
            list(self.inputs.values()),
            outputs,
            nodes=nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": OPSET} | {domain: 1 for domain in (CONTRIB, FUNCTIONS) if domain in domains},
            name=self.graph.role,
        )
        return ir.Model(graph, ir_version=10, functions=self._functions.values())


_OPTIONAL_OUTPUTS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
"""Operators that only compute the outputs that have names."""


def _drop_optional(node: ir.Node, needed: Collection[Value]) -> None:
    """Remove the names of unused outputs."""
    if node.op_type in _OPTIONAL_OUTPUTS:
        taken = [value in needed for value in node.outputs]
        node.resize_outputs(len(taken) - taken[::-1].index(True))
        for value in node.outputs:
            if value not in needed:
                value.name, value.type = "", None
