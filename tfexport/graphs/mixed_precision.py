"""Half-precision graphs in which some modules compute in float32.

    half ── Cast ──> nodes of such a module, with weights of the float32 file ── Cast ──> half

A value is cast where it is used. Between two such modules it stays in float32, so values may exceed the range of half
precision. Caches, and cross keys and values, always have the types of the contract.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from tfexport import contract
from tfexport.graphs.emitter import Emitter, Floats, NodePrecision, Value
from tfexport.graphs.stored_weights import StoredWeights


class MixedPrecision(NodePrecision):
    """The types of a half-precision graph in which the nodes of some modules compute in float32.

    Args:
        exact: the float32 weights.
        keep: the paths of the float32 modules.
    """

    def __init__(self, graph: contract.GraphSpec, exact: StoredWeights, keep: Collection[str]):
        self._exact, self._keep = exact, frozenset(keep)
        self._half = ir.DataType.FLOAT16 if graph.precision == "float16" else ir.DataType.BFLOAT16
        self._made_in_half: set[Value] = set()
        self._made_in_float32: set[Value] = set()  # by nodes of the modules `keep`
        self._casts: dict[Value, Value] = {}
        self.modules: dict[str, None] = {}
        """The paths at which nodes compute in half precision, or would without `keep`, in their order."""

    def inputs(
        self, emitter: Emitter, inputs: Sequence[Value | None], floats: Floats
    ) -> tuple[Sequence[Value | None], bool]:
        if floats == "none":
            return inputs, False
        computes = floats == "computed" and any(
            value in self._made_in_float32 or self._is_half(value) for value in inputs
        )
        if computes:
            self.modules.setdefault(emitter.path)
        in_float32 = computes and emitter.path in self._keep
        take = self._in_float32 if in_float32 else self._in_half
        return [None if value is None else take(emitter, value) for value in inputs], in_float32

    def created(
        self, inputs: Sequence[Value | None], outputs: Sequence[Value], floats: Floats, in_float32: bool
    ) -> None:
        producer = outputs[0].producer()
        is_ranked = producer is not None and producer.op_type == "TopK"  # its second output is ids
        made = outputs[:1] if is_ranked else outputs
        if in_float32:
            self._made_in_float32.update(made)
        elif floats != "none" and any(map(self._is_half, inputs)):
            self._made_in_half.update(made)

    def keeps(self, path: str) -> bool:
        return path in self._keep

    def output(self, emitter: Emitter, value: Value) -> Value:
        return self._in_half(emitter, value)

    def to_float32(self, emitter: Emitter, value: Value) -> Value:
        if value not in self._made_in_float32:
            return super().to_float32(emitter, value)
        # A separate value, so that its users get float32 and not half precision.
        return emitter.node("Identity", value, floats="none")

    def scalar(self, emitter: Emitter, value: float) -> Value:
        if emitter.path in self._keep:
            return emitter.constant(value, np.float32)
        return super().scalar(emitter, value)

    def _is_half(self, value: Value | None) -> bool:
        if value is None:
            return False
        return value in self._made_in_half or (value.type is not None and value.dtype == self._half)

    def _in_float32(self, emitter: Emitter, value: Value) -> Value:
        """`value` for a node in float32, cast if necessary."""
        if not self._is_half(value):
            return value
        if value.const_value is None:
            return self._cast(emitter, value, ir.DataType.FLOAT)
        assert value.name is not None
        return emitter.initializer(f"{value.name}.float32", self._exact.tensor(value.name))

    def _in_half(self, emitter: Emitter, value: Value) -> Value:
        """`value` for a node in half precision, cast if necessary."""
        return self._cast(emitter, value, self._half) if value in self._made_in_float32 else value

    def _cast(self, emitter: Emitter, value: Value, to: ir.DataType) -> Value:
        if value not in self._casts:
            with emitter.module("cast"):
                (cast,) = emitter.nodes("Cast", value, outputs=1, attributes={"to": int(to)}, floats="none")
            self._casts[value] = cast
            if to == self._half:
                self._made_in_half.add(cast)
        return self._casts[value]
