"""Modules that stay in float32 within a graph in half precision.

    half ── Cast ──> nodes of such a module, with weights of the float32 file ── Cast ──> half

A value is cast where it is used: between two such modules it stays in float32, so that what is too large for half precision
gets through. Caches, and cross keys and values, have the types of the contract in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.graphs.emitter import Emitter, Linear, Value
from tfexport.graphs.projections import Projection
from tfexport.graphs.stored_weights import StoredWeights

_UNMOVED = ("TensorScatter", "Shape", "Cast")
"""Operators that stay as they are: what writes a cache in its own type, and what computes no floats or says itself in which
type."""


class MixedEmitter(Emitter):
    """An emitter of a half-precision graph in which the nodes of some modules compute in float32.

    Args:
        exact: the float32 weights.
        keep: the paths of these modules.
    """

    def __init__(
        self,
        graph: contract.GraphSpec,
        config: ModelConfig,
        stored: StoredWeights,
        projections: Iterable[Projection],
        linear: Linear,
        *,
        exact: StoredWeights,
        keep: Collection[str],
    ):
        super().__init__(graph, config, stored, projections, linear)
        self._exact, self._keep = exact, frozenset(keep)
        self._half = ir.DataType.FLOAT16 if graph.precision == "float16" else ir.DataType.BFLOAT16
        self._halves: set[Value] = set()  # what nodes made in half precision
        self._wide: set[Value] = set()  # what nodes of kept modules made, in float32
        self._casts: dict[Value, Value] = {}
        self.modules: dict[str, None] = {}
        """The paths at which something is computed in half precision, or would be."""

    def nodes(
        self,
        op_type: str,
        *inputs: Value | None,
        outputs: Sequence[str] | int,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> Sequence[Value]:
        if op_type == "Cast" and inputs[0] in self._wide:
            # To float32, which it is; under another name, by which those who use it know that they are to have it so.
            return super().nodes("Identity", *inputs, outputs=outputs, domain=domain)
        in_half = op_type not in _UNMOVED and any(value in self._wide or self._is_half(value) for value in inputs)
        if in_half:
            self.modules.setdefault(self._path)
        wide = in_half and self._path in self._keep
        given = [self._as(value, wide=wide) for value in inputs]
        made = super().nodes(
            op_type,
            *given,
            outputs=outputs if isinstance(outputs, int) or not wide else len(outputs),
            attributes=attributes,
            domain=domain,
        )
        if wide:
            self._wide.add(made[0])
            for value, name in zip(made, () if isinstance(outputs, int) else outputs, strict=False):
                if name:
                    self.is_output(self._casted(value, self._half), name)
        elif any(map(self._is_half, given)) and op_type not in ("Shape", "Cast"):
            self._halves.add(made[0])
        return made

    def number(self, value: float) -> Value:
        return self.constant(value, np.float32) if self._path in self._keep else super().number(value)

    def _is_half(self, value: Value | None) -> bool:
        if value is None:
            return False
        return value in self._halves or (value.type is not None and value.dtype == self._half)

    def _as(self, value: Value | None, *, wide: bool) -> Value | None:
        """`value` in float32 where it is a half, or in half precision where a kept module made it."""
        if value is None:
            return None
        if wide and self._is_half(value):
            if value.const_value is not None:
                assert value.name is not None
                return self._initializer(f"{value.name}.float32", self._exact.tensor(value.name))
            return self._casted(value, ir.DataType.FLOAT)
        return self._casted(value, self._half) if not wide and value in self._wide else value

    def _casted(self, value: Value, to: ir.DataType) -> Value:
        if value not in self._casts:
            with self.at("cast"):
                (cast,) = super().nodes("Cast", value, outputs=1, attributes={"to": int(to)})
            self._casts[value] = cast
            if to == self._half:
                self._halves.add(cast)
        return self._casts[value]
