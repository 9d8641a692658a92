"""Holds every value within a graph against its definition, and names the node that departs from it.

Every node is named by the module that it belongs to, so what goes into and comes out of each linear layer, norm and position
table is known on both sides:

    PyTorch   decoder.layers.0.cross_attention.query  ──>  its input and its output, by hooks
    graph     decoder.layers.0.cross_attention.query/MatMul_1, .../Add_1  ──>  the same two, as outputs of the graph

PyTorch follows the graph: after a value was compared, it goes on with the graph's own. So each value is held against what
its inputs make it, errors do not add up, and quantized activations round as they do in the graph. The first value that is
off was computed wrongly by the node that made it: where the input of a module is off and everything before was right, that
is the attention, activation or residual sum in between.

The inputs are random. The graphs run unfused here, because ONNX Runtime fuses nothing across an output.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor, nn

from tfexport import contract, graph_modules, kernels, ort_cases
from tfexport.definition import Definition, projections_of
from tfexport.explicit_rounding import with_explicit_rounding
from tfexport.graph_modules import Case, Model, Outputs
from tfexport.models.float64 import InFloat64, WithRandomRounding
from tfexport.models.positions import PositionTable
from tfexport.models.transformer import PointwiseConv, Transformer
from tfexport.rounding import SAMPLES, Rounding
from tfexport.screening import FILE as SCREENING_FILE
from tfexport.stored_weights import StoredWeights

onnxruntime.disable_telemetry_events()  # ONNX Runtime would tell its makers of each session

ONNX_RUNTIME: str = onnxruntime.__version__
"""The version that graphs are checked with."""

COMPARED = (nn.Linear, PointwiseConv, nn.LayerNorm, nn.RMSNorm, PositionTable)

SIZES = (
    {"batch": 1, "rows": 1, "beam": 1, "src": 1, "cache": 1, "count": 1, "blocks": 2, "from": 1, "width": 1},
    {"batch": 3, "rows": 12, "beam": 4, "src": 6, "cache": 9, "count": 5, "blocks": 4, "from": 5, "width": 6},
    {"batch": 2, "rows": 2, "beam": 2, "src": 4, "cache": 3, "count": 2, "blocks": 2, "from": 7, "width": 5},
)
"""Of the random cases: the smallest, and others with no two alike where that is possible."""

MOST_NUMBERS = 64
"""That a constant of a graph may have: shapes and scalars. Weights lie in the weights files, where they are compared."""

Value = tuple[str, int, int]
"""The path of a module, 0 for its input or 1 for its output, and which of its calls."""


@dataclass(frozen=True)
class Compared:
    """One value of a graph beside its definition."""

    node: str
    """The node that computed it."""
    about: str
    """`output of decoder.norm`."""
    error: float
    """The largest distance from float64 in all cases; NaN where a number is none."""
    own: float
    """The same of PyTorch's own result."""
    allowed: float
    """The largest error that follows from rounding."""

    @property
    def holds(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    @property
    def share(self) -> float:
        """The error as a part of what is allowed; infinite where it is no number."""
        if not math.isfinite(self.error):
            return math.inf
        return self.error / max(self.allowed, 1e-300)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; an error that is no finite number is None."""
        return {**vars(self), "error": self.error if np.isfinite(self.error) else None}


@dataclass(frozen=True)
class GraphCheck:
    """The values of one graph, in the order in which it computes them."""

    file: str
    values: tuple[Compared, ...]
    with_kernels: bool = False
    """Whether functions were computed by kernels; else by their definitions in the graph."""

    @classmethod
    def broken(cls, file: str, about: str) -> GraphCheck:
        """Of a graph that cannot be run."""
        return cls(file, (Compared(file, about, math.nan, 0.0, 0.0),))

    @property
    def first(self) -> Compared | None:
        """The first value that is off; None where all are right."""
        return next((value for value in self.values if not value.holds), None)

    @property
    def largest(self) -> Compared:
        """The value with the largest error for what is allowed."""
        return max(self.values, key=lambda value: value.share)

    def to_dict(self, *, values: bool = True) -> dict[str, Any]:
        """JSON-ready, with all values or with the first alone that is off."""
        first = None if self.first is None else self.first.to_dict()
        told = {"values": [value.to_dict() for value in self.values]} if values else {}
        return {"file": self.file, "with_kernels": self.with_kernels, "first": first, **told}


def check_graph(
    definition: Definition,
    graph: contract.GraphSpec,
    folder: Path,
    *,
    with_kernels: bool = False,
    tolerance: float | None = None,
) -> GraphCheck:
    """Compare the values within `graph`, which lies in `folder`, with those of its definition.

    Args:
        with_kernels: functions are computed by kernels, as `ort-cpu` computes them; else as the graph defines them.
        tolerance: a fixed limit in the place of what follows from rounding.
    """
    try:
        proto = onnx.load(folder / graph.file, load_external_data=False)
        return _checked(definition, graph, folder, proto, with_kernels, tolerance)
    except Exception as error:  # those of ONNX and ONNX Runtime have no common base
        told = str(error).strip() or type(error).__name__
        return GraphCheck.broken(graph.file, f"cannot be run: {told.splitlines()[0]}")


def _checked(
    definition: Definition,
    graph: contract.GraphSpec,
    folder: Path,
    proto: onnx.ModelProto,
    with_kernels: bool,
    tolerance: float | None,
) -> GraphCheck:
    misplaced = list(_misplaced(proto, graph.precision, folder))
    places = _places(proto.graph, definition.model) if graph.step != "select_rows" else []
    makers = {name: node.name for node in proto.graph.node for name in node.output}
    session = _Session(proto, graph, folder, [place.value for place in places], with_kernels)
    random = np.random.default_rng(1)
    inner = [Rounding() for _ in places]
    last = {tensor.name: Rounding() for tensor in graph.outputs}
    cases = []

    def add(followed: _Followed) -> None:
        for place, rounding in zip(places, inner, strict=True):
            rounding.add(*followed.distances(place, followed.found[place.value]))
        for tensor in graph.outputs:
            last[tensor.name].add(*_output_distances(graph, tensor.name, followed, followed.found))

    for sizes in SIZES:
        case = case_of(definition.own, graph, sizes, random)
        cases.append(_Followed.of(definition, case, places, session(case.inputs)))
        add(cases[-1])
    explained = all(rounding.holds(graph.precision) for rounding in (*inner, *last.values()))
    for seed in range(0 if explained or graph.precision in _HALVES else SAMPLES):
        for followed in cases:
            add(followed.again(definition, places, seed))

    def compared(node: str, about: str, found: Rounding) -> Compared:
        allowed = found.allowed(graph.precision) if tolerance is None else tolerance
        return Compared(node, about, found.error, found.own, allowed)

    values = [compared(place.node, place.about, rounding) for place, rounding in zip(places, inner, strict=True)]
    values += [compared(makers[name], f"the graph's {name}", rounding) for name, rounding in last.items()]
    return GraphCheck(graph.file, (*misplaced, *values), with_kernels)


def case_of(model: Model, graph: contract.GraphSpec, sizes: Mapping[str, int], random: np.random.Generator) -> Case:
    """Random inputs of a graph, and the outputs that a model has for them."""
    with torch.inference_mode():
        if graph.dialect == "ort":
            assert isinstance(model, Transformer)
            return ort_cases.case(model, graph, sizes, random)
        return graph_modules.case(model, graph, sizes, random)


# --- running a graph


class _Session:
    """A graph that tells its inner values too, all of them in types that NumPy has."""

    def __init__(
        self, proto: onnx.ModelProto, graph: contract.GraphSpec, folder: Path, inner: Sequence[str], with_kernels: bool
    ):
        outputs = [tensor.name for tensor in graph.outputs]
        inner = [name for name in dict.fromkeys(inner) if name not in outputs]
        halves = {tensor.name for tensor in (*graph.inputs, *graph.outputs) if tensor.dtype in _HALVES}
        if graph.precision in _HALVES:
            proto = with_explicit_rounding(folder / graph.file)  # in which these values have the same names
            halves |= set(inner)
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
        _widen(proto.graph, halves)
        self._session = session_of(proto, folder, with_kernels=with_kernels)
        self._names = [*outputs, *inner]
        self._halves = halves

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        def told(name: str) -> str:
            return f"{name}{_WIDE}" if name in self._halves else name

        given = {
            told(name): array.astype(np.float32) if name in self._halves else array for name, array in inputs.items()
        }
        return dict(zip(self._names, self._session.run([*map(told, self._names)], given), strict=True))


_HALVES = ("float16", "bfloat16")
_WIDE = ".float32"


def _widen(graph: onnx.GraphProto, halves: Collection[str]) -> None:
    """Let the inputs and outputs `halves` be float32 under another name: NumPy has no bfloat16."""
    for index, value in enumerate(graph.input):
        if value.name in halves:
            to = value.type.tensor_type.elem_type
            graph.node.insert(index, helper.make_node("Cast", [f"{value.name}{_WIDE}"], [value.name], to=to))
            value.name += _WIDE
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    outputs = [value.name for value in graph.output]
    del graph.output[:]
    for name in outputs:
        if name in halves:
            graph.node.append(helper.make_node("Cast", [name], [f"{name}{_WIDE}"], to=TensorProto.FLOAT))
            name += _WIDE
        graph.output.append(onnx.ValueInfoProto(name=name))


def session_of(
    model: onnx.ModelProto | Path, folder: Path, *, with_kernels: bool = False
) -> onnxruntime.InferenceSession:
    """A session on the CPU; the weights of a model that is no file lie in `folder`.

    Args:
        with_kernels: as `ort-cpu` runs it; without, by the definitions of its functions.
    """
    options = onnxruntime.SessionOptions()
    if with_kernels:
        kernels.register(options)
    options.log_severity_level = 3  # it warns that past and present are two buffers here
    if isinstance(model, Path):
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


# --- the values within it


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
    """Of the module's calls: a shared norm has several."""

    @property
    def about(self) -> str:
        return f"{('input', 'output')[self.side]} of {' + '.join(self.modules)}"


_LAYOUT = ("Reshape", "Transpose", "Identity")
"""Operators that compute nothing, so that what is wrong with their output was so before."""


def _places(graph: onnx.GraphProto, model: Model) -> list[_Place]:
    """In the order in which the graph computes them, each value once."""
    paths = {path for path, module in model.named_modules() if isinstance(module, COMPARED)}
    joined = {projection.name: tuple(projection.modules) for projection in projections_of(model.config)}
    groups: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        groups.setdefault(node.name.rpartition("/")[0], []).append(node)
    weights = {tensor.name for tensor in graph.initializer}
    makers = {name: (index, node.name) for index, node in enumerate(graph.node) for name in node.output}
    feeds = {name: node.input[0] for node in graph.node if node.op_type in _LAYOUT for name in node.output}
    found: dict[str, _Place] = {}

    def add(value: str, modules: tuple[str, ...], side: int, call: int = 0) -> None:
        if value in makers and value not in found:
            computed = value
            while computed in feeds and feeds[computed] in makers:
                computed = feeds[computed]
            found[value] = _Place(value, makers[computed][1], modules, side, call)

    for path, nodes in groups.items():
        modules = joined.get(path, (path,))
        if not paths.issuperset(modules):
            continue
        if isinstance(model.get_submodule(modules[0]), nn.LayerNorm | nn.RMSNorm):
            for call, node in enumerate(nodes):
                added = len(node.output) > 1  # a sum and its norm, by one node
                add(node.output[0] if added else node.input[0], modules, 0, call)
                add(node.output[-1], modules, 1, call)
            continue
        known = {name for node in nodes for name in node.output} | weights
        read = (name for node in nodes for name in node.input if name and name not in known)
        # What another of these modules has made is compared there. (Query, key and value share rounded states.)
        if not isinstance(model.get_submodule(modules[0]), PositionTable):
            given = next(name for name in read if not name.startswith(contract.SHAPE_NODE))
            if not (given in makers and makers[given][1].rpartition("/")[0] in {*paths, *joined}):
                add(given, modules, 0)
        add(nodes[-1].output[0], modules, 1)
    return sorted(found.values(), key=lambda place: makers[place.value][0])


# --- PyTorch, which follows the graph


@dataclass(frozen=True)
class _Followed:
    """What the definition makes of the values of a graph, in float64 and in PyTorch's own arithmetic."""

    case: Case
    found: Mapping[str, NDArray[Any]]
    """In the graph."""
    exact: Mapping[Value, Tensor]
    own: Mapping[Value, Tensor]
    outputs: Outputs
    """In float64."""
    own_outputs: Outputs
    slack: Mapping[str, Tensor]
    """By the path of a quantized layer; see `Definition.rounding`."""

    @classmethod
    def of(
        cls, definition: Definition, case: Case, places: Sequence[_Place], found: Mapping[str, NDArray[Any]]
    ) -> _Followed:
        own, own_outputs, _ = _followed(definition, definition.own, case, places, found)
        with InFloat64():
            exact, outputs, slack = _followed(definition, definition.model, case, places, found)
        return cls(case, found, exact, own, outputs, own_outputs, slack)

    def again(self, definition: Definition, places: Sequence[_Place], seed: int) -> _Followed:
        """The same with another rounding of PyTorch's own; see `models/float64.py`."""
        with WithRandomRounding(seed):
            own, own_outputs, _ = _followed(definition, definition.model, self.case, places, self.found)
        return replace(self, own=own, own_outputs=own_outputs)

    def distances(self, place: _Place, got: NDArray[Any]) -> Distances:
        """Of a value of the graph, without the padding of sources."""
        modules = place.modules if place.side == 1 else place.modules[:1]
        exact, own = (
            torch.cat([seen[path, place.side, place.call].double().flatten(0, -2) for path in modules], dim=-1)
            for seen in (self.exact, self.own)
        )
        found = torch.from_numpy(got.astype(np.float64)).reshape(exact.shape)
        slack = self.slack_of(modules) if place.side == 1 else None
        if "src_ids" in self.case.inputs:
            lengths = torch.from_numpy(self.case.inputs["src_len"])
            real = (torch.arange(self.case.inputs["src_ids"].shape[1]) < lengths[:, None]).flatten()
            if len(real) == len(exact):  # not the positions, which all sources share
                exact, own, found = exact[real], own[real], found[real]
                slack = None if slack is None else slack[real]
        return distances(exact, own, found, slack)

    def slack_of(self, paths: Sequence[str]) -> Tensor | None:
        """How far the outputs of these layers may be off [rows, 1]; None where they are not quantized."""
        known = [self.slack[path].double().flatten(0, -2) for path in paths if path in self.slack]
        return torch.stack(known).amax(0) if known else None


def _followed(
    definition: Definition, model: Model, case: Case, places: Sequence[_Place], found: Mapping[str, NDArray[Any]]
) -> tuple[Mapping[Value, Tensor], Outputs, Mapping[str, Tensor]]:
    with torch.inference_mode(), _following(model, places, found) as seen, definition.rounding() as slack:
        outputs = case.outputs(model)
    return seen, outputs, slack


@contextmanager
def _following(
    model: Model, places: Sequence[_Place], found: Mapping[str, NDArray[Any]]
) -> Iterator[Mapping[Value, Tensor]]:
    """Within it the values of `model` at `places` are collected, and then replaced by those `found` in the graph."""
    given: dict[Value, Tensor] = {}
    for place in places:
        tensor = torch.from_numpy(found[place.value])
        if place.side == 1 and len(place.modules) > 1:
            widths = [len(model.get_submodule(path).weight) for path in place.modules]  # type: ignore[arg-type]
            parts: Sequence[Tensor] = torch.split(tensor, widths, dim=-1)
        else:
            parts = [tensor] * len(place.modules)
        given |= {(path, place.side, place.call): part for path, part in zip(place.modules, parts, strict=True)}
    seen: dict[Value, Tensor] = {}
    calls: Counter[tuple[str, int]] = Counter()

    def follow(path: str, side: int, states: Tensor) -> Tensor:
        value = path, side, calls[path, side]
        calls[path, side] += 1
        if value not in given:
            return states
        seen[value] = states
        return given[value].reshape(states.shape).to(states.dtype)

    def enter(path: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (follow(path, 0, inputs[0]),) if inputs[0].is_floating_point() else inputs

    def leave(path: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return follow(path, 1, output)

    handles = []
    for path in {path for path, _, _ in given}:
        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(partial(enter, path)))
        handles.append(module.register_forward_hook(partial(leave, path)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


Distances = tuple[float, float, float]
"""The largest error, PyTorch's own, and the largest number, as `Rounding.add` takes them."""


def distances(exact: Tensor, own: Tensor, found: Tensor, slack: Tensor | None = None) -> Distances:
    """How far `found` and PyTorch's `own` numbers are from those in float64; `slack` is not counted.

    A number that is infinite on both sides is the same.
    """
    errors, owns = (torch.where(exact == other, 0.0, (other.double() - exact).abs()) for other in (found, own))
    if slack is not None:
        errors = (errors - slack).clamp(min=0)
    size = torch.where(exact.isinf(), 0.0, exact.abs())
    return tuple(float(values.max()) if values.numel() else 0.0 for values in (errors, owns, size))  # type: ignore[return-value]


def _output_distances(
    graph: contract.GraphSpec, name: str, followed: _Followed, found: Mapping[str, NDArray[Any]]
) -> Distances:
    """Of an output of the graph."""
    got = torch.from_numpy(found[name].astype(np.float64))
    if name.startswith("best."):
        return _best_distances(name, followed, found)
    exact, own = followed.outputs[name].double(), followed.own_outputs[name].double()
    if graph.step == "decoder_step" and name.startswith("present.") and graph.dialect == "ort":
        position = torch.from_numpy(followed.case.inputs["position"])
        behind = torch.arange(got.shape[2]) > position[:, None]  # what lies there means nothing
        got = got.masked_fill(behind[:, None, :, None], 0.0)
    slack = followed.slack_of(["decoder.norm"]) if name == "logits" else None
    return distances(exact, own, got, slack)


def _best_distances(name: str, followed: _Followed, found: Mapping[str, NDArray[Any]]) -> Distances:
    """Of the best tokens, or of their scores: log-probabilities, or logits where the graph tells those.

    Where two tokens are as good, either will do: a token is judged by its score.
    """
    told_logits = "best.logits" in found
    exact, own = (
        logits.double() if told_logits else torch.log_softmax(logits.double(), -1)
        for logits in (followed.outputs["logits"], followed.own_outputs["logits"])
    )
    ids, asked = torch.from_numpy(found["best.ids"]), 1 if told_logits else contract.BEST
    asked = min(int(followed.case.inputs.get("count", [asked])[0]), exact.shape[-1])
    if ids.shape != (len(exact), asked) or found[name].shape != ids.shape:
        return float("nan"), 0.0, 0.0
    wanted, own_best = exact.topk(ids.shape[-1]).values, own.topk(ids.shape[-1]).values
    if name == "best.ids" and ((ids < 0) | (ids >= exact.shape[-1])).any():
        return float("nan"), 0.0, 0.0
    got = exact.gather(1, ids) if name == "best.ids" else torch.from_numpy(found[name]).double()
    slack = followed.slack_of(["decoder.norm"])
    # A log-probability, or the rank of a token, moves by the errors of two logits.
    error, own_error, size = distances(wanted, own_best, got, None if slack is None else 2 * slack)
    logits, own_logits = (outputs["logits"].double() for outputs in (followed.outputs, followed.own_outputs))
    _, own_moved, largest = distances(logits, own_logits, logits)
    return error, max(own_error, 2 * own_moved), max(size, 2 * largest)


# --- where its weights lie


def _misplaced(model: onnx.ModelProto, precision: contract.Precision, folder: Path) -> Iterator[Compared]:
    """Weights of a graph that are not those of their name in the weights files, which are compared number by number
    elsewhere (`weights_check.py`)."""
    users: dict[str, str] = {}
    for node in model.graph.node:
        for name in node.input:
            users.setdefault(name, node.name)
    if precision in _HALVES:
        files = [contract.weights_file(precision)]
    else:
        files = [contract.WEIGHTS_FILE, contract.weights_file(precision), SCREENING_FILE]
    stored = StoredWeights(*(folder / file for file in dict.fromkeys(files) if (folder / file).exists()))
    exact = StoredWeights(folder / contract.WEIGHTS_FILE)
    for tensor in model.graph.initializer:
        about = None
        if tensor.data_location != TensorProto.EXTERNAL:
            if math.prod(tensor.dims) > MOST_NUMBERS:
                about = f"{tensor.name}, which the graph has of its own"
        else:
            name = tensor.name.removesuffix(_WIDE)
            source = stored if name == tensor.name else exact
            place = {entry.key: entry.value for entry in tensor.external_data}
            if name not in source:
                about = f"{tensor.name}, which is not in the weights file"
            else:
                lies = source.tensor(name)
                wanted = (lies.location, lies.offset, lies.length, [*lies.shape], int(lies.dtype))
                found = (place.get("location"), int(place.get("offset", 0)), int(place.get("length", -1)))
                if (*found, list(tensor.dims), tensor.data_type) != wanted:
                    about = f"{tensor.name}, which lies elsewhere in the weights file"
        if about is not None:
            yield Compared(users.get(tensor.name, tensor.name), f"weights {about}", math.inf, 0.0, 0.0)
    for function in model.functions:
        for node in function.node:
            for attribute in node.attribute:
                if math.prod(attribute.t.dims) > MOST_NUMBERS:
                    yield Compared(f"{function.name}/{node.name}", "weights in a function", math.inf, 0.0, 0.0)
