"""Finds the node of a graph at which it departs from PyTorch.

Every node is named by the module that it belongs to, so what goes into and comes out of each linear layer, LayerNorm and
position table is known on both sides:

    PyTorch   decoder.layers.0.cross_attention.query  ──>  its input and its output, by hooks
    graph     decoder.layers.0.cross_attention.query/MatMul_1, .../Add_1  ──>  the same two, as outputs of the graph

They are compared in the order in which the graph computes them. The first that is too far off was computed wrongly by the
node that made it: where the input of a module is off and everything before was right, that is the attention, activation
or residual sum in between. The graphs run unfused here, because ONNX Runtime fuses nothing across an output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor, nn

from tfexport import contract
from tfexport.bundle import Bundle
from tfexport.config import ModelConfig
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.explicit_rounding import with_explicit_rounding
from tfexport.models.positions import PositionTable
from tfexport.models.transformer import PointwiseConv, Transformer
from tfexport.ort_cases import Case
from tfexport.projections import decoder_projections, encoder_projections
from tfexport.quantize import restored
from tfexport.rounded import rounded
from tfexport.selfcheck import SIZES, TOLERANCE, case_of, output_errors, relative_error, session_of

COMPARED = (nn.Linear, PointwiseConv, nn.LayerNorm, nn.RMSNorm, PositionTable)

Seen = Mapping[str, list[tuple[Tensor, Tensor]]]
"""By the path of a module, what went into it and came out of it at each call."""


@dataclass(frozen=True)
class Compared:
    """One value of a graph beside PyTorch's."""

    node: str
    """The node that computed it."""
    about: str
    """`output of decoder.norm`."""
    error: float
    """The largest difference in all cases, relative as in `selfcheck.TOLERANCE`; NaN where a number is none."""


@dataclass(frozen=True)
class Bisection:
    """The values of one graph, in the order in which it computes them."""

    file: str
    tolerance: float
    values: tuple[Compared, ...]

    @property
    def first(self) -> Compared | None:
        """The first value that is too far off; None where all are right."""
        return next((value for value in self.values if not value.error <= self.tolerance), None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; an error that is no number is None."""
        values = [{**vars(v), "error": v.error if np.isfinite(v.error) else None} for v in self.values]
        first = None if self.first is None else self.first.node
        return {"file": self.file, "tolerance": self.tolerance, "first": first, "values": values}


def bisect(model: Transformer, graphs: Sequence[contract.GraphSpec], folder: Path) -> list[Bisection]:
    """Compare the values within `graphs`, which lie in `folder`, with those of the float32 `model`, on random cases.

    Raises:
        RuntimeUnavailable: a graph is in bfloat16, which NumPy does not have.
    """
    return [_bisect_graph(model, graph, folder) for graph in graphs if graph.role != "select_rows"]


def bisect_bundle(bundle: Bundle, model: Transformer, runtime: str, precision: contract.Precision) -> list[Bisection]:
    """`bisect` of the graphs that a runtime uses of a bundle; those of quantized precisions beside a model of their weights.

    Raises:
        RuntimeUnavailable: the precision is bfloat16, which NumPy does not have.
        TfexportError: the runtime has no graphs.
    """
    if not runtime.startswith("ort"):
        raise TfexportError(
            f"{runtime} runs no graphs that can be bisected. Leave --bisect out, or give --runtime ort-cpu."
        )
    dialect = bundle.dialect(runtime, precision)
    graphs = contract.graphs_of(bundle.config, precision, dialect)
    if precision not in contract.QUANTIZED:
        return bisect(model, graphs, bundle.directory)
    stored = load_file(bundle.directory / contract.weights_file(precision))
    return [_bisect_weights(model, precision, stored), *bisect(rounded(model, stored), graphs, bundle.directory)]


_STEPS: dict[contract.Precision, tuple[int, float]] = {"int8": (127, 0.51), "int4": (8, 1.01)}
"""Steps from 0 to the largest weight of a row, and the most of them by which a rounded weight may be off: half of one,
and in 4 bits a whole one, because the largest has no opposite."""


def _bisect_weights(
    model: Transformer, precision: contract.Precision, stored: Mapping[str, NDArray[np.generic]]
) -> Bisection:
    """Whether the tensors of a quantized weights file are the weights of the float32 `model`; errors in rounding's steps."""
    steps, tolerance = _STEPS[precision]
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    projections = list(_projections(model.config))
    found = restored(stored, weights, projections)
    values = []
    for projection in projections:
        error = 0.0
        for name in projection.weights:
            if name in found:
                wanted = weights[name].reshape(len(weights[name]), -1)
                step = np.maximum(np.abs(wanted).max(axis=1, keepdims=True) / steps, 1e-30)
                error = float(np.maximum(error, (np.abs(found[name].reshape(wanted.shape) - wanted) / step).max()))
        values.append(Compared(projection.name, f"weights of {' + '.join(projection.modules)}", error))
    return Bisection(contract.weights_file(precision), tolerance, tuple(values))


def _bisect_graph(model: Transformer, graph: contract.GraphSpec, folder: Path) -> Bisection:
    if graph.precision not in TOLERANCE:
        raise RuntimeUnavailable(f"{graph.file} cannot be bisected: NumPy has no bfloat16. Give another --precision.")
    proto = onnx.load(folder / graph.file, load_external_data=False)
    places = _places(proto.graph, model)
    makers = {name: node.name for node in proto.graph.node for name in node.output}
    if graph.precision == "float16":
        proto = with_explicit_rounding(folder / graph.file)  # in which these values have the same names
    names = [tensor.name for tensor in graph.outputs]
    inner = list(dict.fromkeys(place.value for place in places if place.value not in names))
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    session = session_of(proto, folder, with_kernels=graph.dialect == "ort")
    random = np.random.default_rng(1)
    errors = np.zeros(len(places))
    last = dict.fromkeys(names, 0.0)
    for sizes in SIZES:
        with torch.inference_mode(), _recorded(model) as seen:
            checked = case_of(model, graph, sizes, random)
        found = dict(zip([*names, *inner], session.run([*names, *inner], checked.inputs), strict=True))
        for index, place in enumerate(places):
            error = relative_error(*_beside(place, seen, found[place.value], checked))
            errors[index] = np.maximum(errors[index], error)  # which keeps a NaN
        for name, error in output_errors(graph, checked, found):
            last[name] = float(np.maximum(last[name], error))
    values = [Compared(place.node, place.about, float(error)) for place, error in zip(places, errors, strict=True)]
    values += [Compared(makers[name], f"the graph's {name}", error) for name, error in last.items()]
    return Bisection(graph.file, TOLERANCE[graph.precision], tuple(values))


@dataclass(frozen=True)
class _Place:
    """A value of a graph, and where PyTorch has the same."""

    value: str
    node: str
    modules: tuple[str, ...]
    """More than one where the graph computes several as one: their outputs stand side by side."""
    side: int
    """0 for what goes into them, 1 for what comes out."""
    call: int
    """Of the module's calls, counted from the last one, -1: a shared LayerNorm has several."""

    @property
    def about(self) -> str:
        return f"{('input', 'output')[self.side]} of {' + '.join(self.modules)}"


_LAYOUT = ("Reshape", "Transpose", "Identity")
"""Operators that compute nothing, so that what is wrong with their output was so before."""


def _places(graph: onnx.GraphProto, model: Transformer) -> list[_Place]:
    """In the order in which the graph computes them, each value once."""
    paths = {path for path, module in model.named_modules() if isinstance(module, COMPARED)}
    joined = {projection.name: tuple(projection.modules) for projection in _projections(model.config)}
    groups: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        groups.setdefault(node.name.rpartition("/")[0], []).append(node)
    weights = {tensor.name for tensor in graph.initializer}
    makers = {name: (index, node.name) for index, node in enumerate(graph.node) for name in node.output}
    feeds = {name: node.input[0] for node in graph.node if node.op_type in _LAYOUT for name in node.output}
    found: dict[str, _Place] = {}

    def add(value: str, modules: tuple[str, ...], side: int, call: int) -> None:
        if value in makers and value not in found:
            computed = value
            while computed in feeds and feeds[computed] in makers:
                computed = feeds[computed]
            found[value] = _Place(value, makers[computed][1], modules, side, call)

    for path, nodes in groups.items():
        modules = joined.get(path, (path,))
        if not paths.issuperset(modules):
            continue
        if isinstance(model.get_submodule(modules[0]), nn.LayerNorm):
            for call, node in enumerate(nodes, start=-len(nodes)):
                added = len(node.output) > 1  # a sum and its norm, by one node
                add(node.output[0] if added else node.input[0], modules, 0, call)
                add(node.output[-1], modules, 1, call)
            continue
        own = {name for node in nodes for name in node.output}
        given = next(n for node in nodes for n in node.input if n and n not in own | weights)
        # What another of these modules has made is compared there. (Query, key and value share rounded states.)
        elsewhere = given in makers and makers[given][1].rpartition("/")[0] in {*paths, *joined}
        if not (elsewhere or isinstance(model.get_submodule(modules[0]), PositionTable)):
            add(given, modules, 0, -1)
        add(nodes[-1].output[0], modules, 1, -1)
    return sorted(found.values(), key=lambda place: makers[place.value][0])


def _projections(config: ModelConfig) -> Iterator[Any]:
    yield from encoder_projections(config)
    yield from decoder_projections(config)


@contextmanager
def _recorded(model: Transformer) -> Iterator[Seen]:
    """What goes into and comes out of the modules that are compared."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def record(path: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.setdefault(path, []).append((inputs[0], output))

    modules = [(path, module) for path, module in model.named_modules() if isinstance(module, COMPARED)]
    handles = [module.register_forward_hook(partial(record, path)) for path, module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _beside(place: _Place, seen: Seen, got: NDArray[Any], checked: Case) -> tuple[Tensor, Tensor]:
    """PyTorch's and the graph's numbers of a place, [n, width], without the padding of sources."""
    modules = place.modules if place.side == 1 else place.modules[:1]
    wanted = torch.cat([seen[path][place.call][place.side].flatten(0, -2) for path in modules], dim=-1)
    found = torch.from_numpy(got.astype(np.float32)).reshape(wanted.shape)
    if "src_ids" in checked.inputs:
        lengths = torch.from_numpy(checked.inputs["src_len"])
        real = (torch.arange(checked.inputs["src_ids"].shape[1]) < lengths[:, None]).flatten()
        if len(real) == len(wanted):  # not the positions, which all sources share
            wanted, found = wanted[real], found[real]
    return wanted, found
