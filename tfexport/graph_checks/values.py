"""Finds the values within a graph that PyTorch also has, and lets PyTorch follow the graph from value to value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tfexport import contract
from tfexport.graph_checks.cases_portable import Case, Outputs
from tfexport.graph_checks.definition import Definition
from tfexport.graph_checks.rounding import Rounding, slack_of_hopeless
from tfexport.graphs.projections import projections_of
from tfexport.models.float64 import InFloat64, WithRandomRounding
from tfexport.models.layers import PointwiseConv
from tfexport.models.model import Model
from tfexport.models.positions import PositionTable

COMPARED = (nn.Linear, PointwiseConv, nn.LayerNorm, nn.RMSNorm, PositionTable)

Value = tuple[str, int, int]
"""The path of a module, 0 for its input or 1 for its output, and the number of the call."""


@dataclass(frozen=True)
class TracedValue:
    """A value of a graph, and its place in PyTorch."""

    value: str
    node: str
    modules: tuple[str, ...]
    """The modules of the value. There are several if the graph computes them together, with outputs side by side."""
    side: int
    """0 for the input of the modules, 1 for the output."""
    call: int
    """The number of the module's call; a shared norm has several."""
    without_bias: bool = False
    """The value is the module's output without its bias, which another node adds."""

    @property
    def about(self) -> str:
        without = ", without its bias" if self.without_bias else ""
        return f"{('input', 'output')[self.side]} of {' + '.join(self.modules)}{without}"


_LAYOUT = ("Reshape", "Transpose", "Identity")
"""Operators that compute nothing: an error in their output was already in their input."""


def places_of(graph: onnx.GraphProto, model: Model) -> list[TracedValue]:
    """The places of a graph's values in the order of their computation, without duplicates."""
    paths = {path for path, module in model.named_modules() if isinstance(module, COMPARED)}
    joined = {projection.name: tuple(projection.modules) for projection in projections_of(model.config)}
    groups: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        groups.setdefault(node.name.rpartition("/")[0], []).append(node)
    weights = {tensor.name for tensor in graph.initializer}
    makers = {name: (index, node.name) for index, node in enumerate(graph.node) for name in node.output}
    feeds = {name: node.input[0] for node in graph.node if node.op_type in _LAYOUT for name in node.output}
    places: dict[str, TracedValue] = {}

    def add(value: str, modules: tuple[str, ...], side: int, call: int = 0, *, without_bias: bool = False) -> None:
        if value and value in makers and value not in places:
            computed = value
            while computed in feeds and feeds[computed] in makers:
                computed = feeds[computed]
            places[value] = TracedValue(value, makers[computed][1], modules, side, call, without_bias)

    for path, nodes in groups.items():
        modules = joined.get(path, (path,))
        if not paths.issuperset(modules):
            continue
        if isinstance(model.get_submodule(modules[0]), nn.LayerNorm | nn.RMSNorm):
            for call, node in enumerate(nodes):
                normed, total = _norm_values(node)
                add(total, modules, 0, call)
                add(normed, modules, 1, call)
            continue
        known = {name for node in nodes for name in node.output} | weights
        read = (name for node in nodes for name in node.input if name and name not in known)
        # The output of another of these modules is compared there. (Query, key and value share rounded states.)
        if not isinstance(model.get_submodule(modules[0]), PositionTable):
            operand = next(name for name in read if not name.startswith(contract.SHAPE_NODE))
            if not (operand in makers and makers[operand][1].rpartition("/")[0] in {*paths, *joined}):
                add(operand, modules, 0)
        add(nodes[-1].output[0], modules, 1, without_bias=_leaves_bias(nodes[-1], model.get_submodule(modules[0])))
    return sorted(places.values(), key=lambda place: makers[place.value][0])


def _norm_values(node: onnx.NodeProto) -> tuple[str, str]:
    """The output of a norm's node, and the norm's input; empty if the node adds its inputs and does not return the sum."""
    if node.op_type.startswith("Skip"):  # the sum is the fourth output
        return node.output[0], node.output[3] if len(node.output) > 3 else ""
    if len(node.output) > 1:  # the node returns a sum and its norm
        return node.output[-1], node.output[0]
    return node.output[0], node.input[0]


def _leaves_bias(node: onnx.NodeProto, module: nn.Module) -> bool:
    """Whether the product `node` of a linear layer leaves out the bias of the layer."""
    return node.op_type == "Gemm" and len(node.input) < 3 and getattr(module, "bias", None) is not None


@dataclass(frozen=True)
class Followed:
    """The results of the definition for the values of a graph, in float64 and in PyTorch's own arithmetic."""

    case: Case
    found: Mapping[str, NDArray[Any]]
    """The values in the graph."""
    exact: Mapping[Value, Tensor]
    own: Mapping[Value, Tensor]
    outputs: Outputs
    """The outputs in float64."""
    own_outputs: Outputs
    slack: Mapping[str, Tensor]
    """The allowed slack by the path of a quantized layer; see `Definition.rounding`."""
    called: frozenset[str]
    """The modules that the definition calls, among those whose values are compared."""

    @classmethod
    def of(
        cls, definition: Definition, case: Case, places: Sequence[TracedValue], computed: Mapping[str, NDArray[Any]]
    ) -> Followed:
        own, own_outputs, _ = _followed(definition, definition.own, case, places, computed)
        with InFloat64(), _called(definition.model) as called:
            exact, outputs, slack = _followed(definition, definition.model, case, places, computed)
        return cls(case, computed, exact, own, outputs, own_outputs, slack, frozenset(called))

    def again(self, definition: Definition, places: Sequence[TracedValue], seed: int) -> Followed:
        """The same with another random rounding of PyTorch; see `models/float64.py`."""
        with WithRandomRounding(seed):
            own, own_outputs, _ = _followed(definition, definition.model, self.case, places, self.found)
        return replace(self, own=own, own_outputs=own_outputs)

    def distances(self, place: TracedValue, got: NDArray[Any]) -> Rounding:
        """The distances of a value of the graph, without the padding of sources."""
        modules = place.modules if place.side == 1 else place.modules[:1]
        exact, own = (
            torch.cat([seen[path, place.side, place.call].double().flatten(0, -2) for path in modules], dim=-1)
            for seen in (self.exact, self.own)
        )
        computed = torch.from_numpy(got.astype(np.float64)).reshape(exact.shape)
        slack = self.slack_of(modules) if place.side == 1 else None
        if "src_ids" in self.case.inputs:
            lengths = torch.from_numpy(self.case.inputs["src_len"])
            real = (torch.arange(self.case.inputs["src_ids"].shape[1]) < lengths[:, None]).flatten()
            if len(real) == len(exact) and not real.all():  # skips the positions, which all sources share
                exact, own, computed = exact[real], own[real], computed[real]
                slack = None if slack is None else slack[real]
        return distances(exact, own, computed, slack)

    def slack_of(self, paths: Sequence[str]) -> Tensor | None:
        """The slack of the outputs of these layers [rows, 1]; None if they are not quantized."""
        known = [self.slack[path].double().flatten(0, -2) for path in paths if path in self.slack]
        return torch.stack(known).amax(0) if known else None


def _followed(
    definition: Definition,
    model: Model,
    case: Case,
    places: Sequence[TracedValue],
    computed: Mapping[str, NDArray[Any]],
) -> tuple[Mapping[Value, Tensor], Outputs, Mapping[str, Tensor]]:
    with torch.inference_mode(), _following(model, places, computed) as seen, definition.rounding() as slack:
        outputs = case.outputs(model)
    return seen, outputs, slack


@contextmanager
def _called(model: Model) -> Iterator[set[str]]:
    """A context that collects the modules that are called, among those whose values are compared."""
    called: set[str] = set()

    def note(path: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        called.add(path)

    modules = [(path, module) for path, module in model.named_modules() if isinstance(module, COMPARED)]
    handles = [module.register_forward_pre_hook(partial(note, path)) for path, module in modules]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _following(
    model: Model, places: Sequence[TracedValue], computed: Mapping[str, NDArray[Any]]
) -> Iterator[Mapping[Value, Tensor]]:
    """A context that collects the values of `model` at `places`, and then replaces them by those `computed` in the graph."""
    replacements: dict[Value, Tensor] = {}
    biases: dict[Value, Any] = {}
    for place in places:
        tensor = torch.from_numpy(computed[place.value])
        if place.side == 1 and len(place.modules) > 1:
            widths = [len(model.get_submodule(path).weight) for path in place.modules]  # type: ignore[arg-type]
            parts: Sequence[Tensor] = torch.split(tensor, widths, dim=-1)
        else:
            parts = [tensor] * len(place.modules)
        replacements |= {(path, place.side, place.call): part for path, part in zip(place.modules, parts, strict=True)}
        if place.without_bias:
            biases |= {(path, place.side, place.call): model.get_submodule(path).bias for path in place.modules}
    seen: dict[Value, Tensor] = {}
    calls: Counter[tuple[str, int]] = Counter()

    def follow(path: str, side: int, states: Tensor) -> Tensor:
        value = path, side, calls[path, side]
        calls[path, side] += 1
        if value not in replacements:
            return states
        bias = biases.get(value)
        seen[value] = states if bias is None else states - bias
        followed = replacements[value].reshape(states.shape).to(states.dtype)
        return followed if bias is None else followed + bias

    def enter(path: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (follow(path, 0, inputs[0]),) if inputs[0].is_floating_point() else inputs

    def leave(path: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return follow(path, 1, output)

    handles = []
    for path in {path for path, _, _ in replacements}:
        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(partial(enter, path)))
        handles.append(module.register_forward_hook(partial(leave, path)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def distances(
    exact: Tensor, own: Tensor, computed: Tensor, slack: Tensor | None = None, *, are_logits: bool = False
) -> Rounding:
    """The distances of `computed` and PyTorch's `own` numbers from those in float64, minus `slack`.

    Numbers that are infinite on both sides count as equal. With `are_logits`, the numbers are logits or log-probabilities
    [..., words] that include the largest one of each row, and hopeless words have a slack of their own.
    """
    size = exact.abs()
    hopeless = slack_of_hopeless(exact.numpy()) if are_logits and exact.numel() else None
    if hopeless is not None:
        of_hopeless = torch.from_numpy(hopeless)
        size = torch.where(of_hopeless > 0, 0.0, size)
        slack = of_hopeless if slack is None else slack + of_hopeless
    errors, owns = ((other.double() - exact).abs_() for other in (computed, own))
    if size.numel() and not size.max().isfinite():
        errors, owns = (torch.where(exact == other, 0.0, off) for other, off in ((computed, errors), (own, owns)))
        size = torch.where(size.isinf(), 0.0, size)
    if slack is not None:  # PyTorch's own arithmetic may also round an activation to the other step
        errors, owns = ((values - slack).clamp(min=0) for values in (errors, owns))
    return Rounding.of(errors.numpy(), owns.numpy(), size.numpy())
