"""Compares every value within a graph with its definition, and names the node that differs.

Every node has the name of its module. So the input and the output of each linear layer, norm and position table are known
on both sides:

    PyTorch   decoder.layers.0.cross_attention.query  ──>  its input and its output, by hooks
    graph     decoder.layers.0.cross_attention.query/MatMul_1, .../Add_1  ──>  the same two, as outputs of the graph

PyTorch follows the graph: after the comparison of a value, it continues with the graph's value. So each value is compared
with the result of its own inputs, errors do not add up, and quantized activations round as they do in the graph. The first
value that differs was computed wrongly by its own node. If it is the input of a module, the error is in the attention,
activation or residual sum before that module.

The inputs are random. The graphs run unfused here, because ONNX Runtime does not fuse across an output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from tfexport import contract, graph_contract
from tfexport.config import ModelConfig
from tfexport.contract import is_screened
from tfexport.graph_checks import cases_cuda, cases_ort, cases_portable, cases_search
from tfexport.graph_checks.cases_portable import Case
from tfexport.graph_checks.definition import Definition
from tfexport.graph_checks.rounding import SAMPLES, Rounding
from tfexport.graph_checks.screening import screening_distances
from tfexport.graph_checks.session import HALVES, Session
from tfexport.graph_checks.values import Followed, TracedValue, distances, places_of
from tfexport.graph_checks.weights import misplaced
from tfexport.models.float64 import InFloat64
from tfexport.models.model import Model
from tfexport.models.transformer import Transformer
from tfexport.system.processes import map_large_buffers

SIZES = (
    {"batch": 1, "rows": 1, "beam": 1, "src": 1, "cache": 1, "count": 1, "blocks": 2, "from": 1, "width": 1},
    {"batch": 3, "rows": 12, "beam": 4, "src": 6, "cache": 9, "count": 5, "blocks": 4, "from": 5, "width": 6},
    {"batch": 2, "rows": 2, "beam": 2, "src": 4, "cache": 3, "count": 2, "blocks": 2, "from": 7, "width": 5},
)
"""Sizes of the random cases: the smallest ones, and others that differ from each other where possible. `sizes_of` makes
the last case long."""


@dataclass(frozen=True)
class Compared:
    """The comparison of one value of a graph with its definition."""

    node: str
    """The node that computed it."""
    about: str
    """A description of the value, such as `output of decoder.norm`."""
    error: float
    """The largest distance from float64 over all cases; NaN if a number is NaN."""
    own: float
    """The largest distance of PyTorch's own result from float64."""
    allowed: float
    """The largest error that follows from rounding."""

    @property
    def holds(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    @property
    def share(self) -> float:
        """The error divided by the allowed error; infinite if the error is not a finite number."""
        if not math.isfinite(self.error):
            return math.inf
        return self.error / max(self.allowed, 1e-300)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; an error that is not a finite number is None."""
        return {**vars(self), "error": self.error if np.isfinite(self.error) else None}


@dataclass(frozen=True)
class GraphCheck:
    """The comparisons of the values of one graph, in the order of their computation."""

    file: str
    values: tuple[Compared, ...]
    with_kernels: bool = False
    """Whether kernels computed the functions; otherwise their definitions in the graph did."""

    @classmethod
    def broken(cls, file: str, about: str) -> GraphCheck:
        """The check of a graph that cannot be run."""
        return cls(file, (Compared(file, about, math.nan, 0.0, 0.0),))

    @property
    def is_broken(self) -> bool:
        """Whether the graph cannot be run."""
        return len(self.values) == 1 and self.values[0].node == self.file

    @property
    def first(self) -> Compared | None:
        """The first value with too large an error; None if all values pass."""
        return next((value for value in self.values if not value.holds), None)

    @property
    def largest(self) -> Compared:
        """The value with the largest error relative to its allowed error."""
        return max(self.values, key=lambda value: value.share)

    def to_dict(self, *, values: bool = True) -> dict[str, Any]:
        """JSON-ready, with all values, or only with the first one that fails."""
        first = None if self.first is None else self.first.to_dict()
        details = {"values": [value.to_dict() for value in self.values]} if values else {}
        return {"file": self.file, "with_kernels": self.with_kernels, "first": first, **details}


def sizes_of(config: ModelConfig) -> list[dict[str, int]]:
    """The sizes of the random cases of a model. The last case has a long source and a shorter one, and a long past, so that
    it reaches the clipped distances of relative positions."""
    far = max(LONGEST, config.max_distance + 3)
    *small, large = SIZES
    return [*small, {**large, "src": far, "cache": far, "least": far - 1}]


CHAINED = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
"""Operators whose kernels for CPUs add the squares of a row one by one."""

HOPELESS = 100.0
"""An error that is larger than the allowed one by this factor is not measured again: no other rounding explains it."""

LONGEST = 64
"""Source ids and cache slots of the long case, if the model has as many positions."""


def check_graph(
    definition: Definition,
    graph: contract.GraphSpec,
    folder: Path,
    *,
    with_kernels: bool = False,
    tolerance: float | None = None,
) -> GraphCheck:
    """Compare the values within `graph`, a file in `folder`, with those of its definition.

    Args:
        with_kernels: compute functions with kernels, as `ort-cpu` does; by default, as the graph defines them.
        tolerance: a fixed limit instead of the limit that follows from rounding.
    """
    map_large_buffers()
    try:
        proto = onnx.load(folder / graph.file, load_external_data=False)
        return _checked(definition, graph, folder, proto, with_kernels, tolerance)
    except Exception as error:  # errors of ONNX and ONNX Runtime have no common base class
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return GraphCheck.broken(graph.file, f"cannot be read or run: {reason}")


def _checked(
    definition: Definition,
    graph: contract.GraphSpec,
    folder: Path,
    proto: onnx.ModelProto,
    with_kernels: bool,
    tolerance: float | None,
) -> GraphCheck:
    elsewhere = [Compared(node, about, math.inf, 0.0, 0.0) for node, about in misplaced(proto, graph.precision, folder)]
    places = places_of(proto.graph, definition.model) if graph.role not in graph_contract.WITHOUT_MODULES else []
    makers = {name: node.name for node in proto.graph.node for name in node.output}
    session = Session(proto, graph, folder, [place.value for place in places], with_kernels)
    random = np.random.default_rng(1)
    chains = dict.fromkeys(
        (name for node in proto.graph.node if node.op_type in CHAINED for name in node.output),
        definition.model.config.d_model,
    )
    inner = [Rounding(chain=chains.get(place.value, 0)) for place in places]
    last = {tensor.name: Rounding(chain=chains.get(tensor.name, 0)) for tensor in graph.outputs}
    cases = []

    def measured(followed: Followed) -> Iterator[tuple[Rounding, Rounding]]:
        for place, rounding in zip(places, inner, strict=True):
            yield rounding, followed.distances(place, followed.found[place.value])
        for tensor in graph.outputs:
            yield last[tensor.name], _output_distances(graph, tensor.name, followed, followed.found)

    for sizes in sizes_of(definition.model.config):
        case = _case(definition, graph, sizes, random)
        cases.append(Followed.of(definition, case, places, session(case.inputs)))
        for rounding, of_case in measured(cases[-1]):
            rounding.merge(of_case)
    elsewhere += [
        Compared(path, "no node of its name", math.inf, 0.0, 0.0) for path in _absent(graph, places, cases[0])
    ]
    off = next((rounding for rounding in (*inner, *last.values()) if not rounding.holds(graph.precision)), None)
    is_open = off is not None and off.error <= HOPELESS * off.allowed(graph.precision)  # False for NaN
    for seed in range(SAMPLES if is_open and graph.precision not in HALVES else 0):
        for rounding, again in _together(list(measured(c.again(definition, places, seed))) for c in cases):
            rounding.measure_again(again)

    def compared(
        node: str, about: str, rounding: Rounding, precision: contract.Precision = graph.precision
    ) -> Compared:
        if tolerance is not None:
            return Compared(node, about, rounding.error, rounding.own, tolerance)
        error, own, allowed = rounding.error, rounding.own, rounding.allowed(precision)
        if error <= allowed and not rounding.mean_error <= (mean := rounding.allowed_mean(precision)):
            return Compared(node, f"{about}, in the mean,", rounding.mean_error, rounding.mean_own, mean)
        return Compared(node, about, error, own, allowed)

    values = [compared(place.node, place.about, rounding) for place, rounding in zip(places, inner, strict=True)]
    for tensor in graph.outputs:  # logits are float32 in every graph
        precision: contract.Precision = "float32" if tensor.dtype == "float32" else graph.precision
        values.append(compared(makers[tensor.name], f"the graph's {tensor.name}", last[tensor.name], precision))
    if graph.role == "greedy_step" and is_screened(definition.model.config, graph.precision):
        for node, about, screened in screening_distances(proto, definition, folder, with_kernels=with_kernels):
            values.append(compared(node, f"screening: {about}", screened))
    return GraphCheck(graph.file, (*elsewhere, *values), with_kernels)


def _absent(graph: contract.GraphSpec, places: Iterable[TracedValue], case: Followed) -> list[str]:
    """The modules that compute something in a graph but have no value in it, and so would not be compared."""
    placed = {path for place in places if place.side == 1 for path in place.modules}
    if graph.step == "decoder_step":  # the memory is an input of the step, computed before
        placed |= {path for path in case.called if path.startswith("encoder.") or path.endswith(_OF_MEMORY)}
    return sorted(case.called - placed)


_OF_MEMORY = (".cross_attention.key", ".cross_attention.value")


def _together(cases: Iterable[list[tuple[Rounding, Rounding]]]) -> Iterator[tuple[Rounding, Rounding]]:
    """For each value, the measurements of all cases, merged."""
    for pairs in zip(*cases, strict=True):
        merged = Rounding()
        for _, rounding in pairs:
            merged.merge(rounding)
        yield pairs[0][0], merged


def _case(
    definition: Definition, graph: contract.GraphSpec, sizes: Mapping[str, int], random: np.random.Generator
) -> Case:
    """A random case whose pasts the definition computes. In half precision this runs in float64, because some modules may
    stay in float32, and only float64 can mix the two."""
    with InFloat64() if graph.precision in HALVES else nullcontext():
        return case_of(definition.model, graph, sizes, random, definition.steps)


def case_of(
    model: Model,
    graph: contract.GraphSpec,
    sizes: Mapping[str, int],
    random: np.random.Generator,
    steps: cases_ort.Steps | None = None,
) -> Case:
    """Random inputs of a graph, and the outputs of a model for them. For `steps` see `cases_ort.case`."""
    with torch.inference_mode():
        if graph.dialect in _OWN_CASES:
            assert isinstance(model, Transformer)
            return _OWN_CASES[graph.dialect](model, graph, sizes, random, steps)
        if graph.role in cases_search.ROLES:
            return cases_search.case(graph, model.config, sizes, random)
        return cases_portable.case(model, graph, sizes, random)


_OWN_CASES = {"ort": cases_ort.case, "ort-cuda": cases_cuda.case}
"""The cases of dialects that are not portable."""


def _output_distances(
    graph: contract.GraphSpec, name: str, followed: Followed, computed: Mapping[str, NDArray[Any]]
) -> Rounding:
    """The distances of an output of the graph."""
    got = torch.from_numpy(computed[name].astype(np.float64))
    if name.startswith("best."):
        return _best_distances(name, followed, computed)
    exact, own = followed.outputs[name].double(), followed.own_outputs[name].double()
    if graph.step == "decoder_step" and name.startswith("present.") and graph.dialect in _OWN_CASES:
        position = torch.from_numpy(followed.case.inputs["position"])
        behind = torch.arange(got.shape[2]) > position[:, None]  # the cache behind the position is not defined
        got = got.masked_fill(behind[:, None, :, None], 0.0)
    slack = followed.slack_of(["decoder.norm"]) if name == "logits" else None
    return distances(exact, own, got, slack, are_logits=name == "logits")


def _best_distances(name: str, followed: Followed, computed: Mapping[str, NDArray[Any]]) -> Rounding:
    """The distances of the best tokens or of their scores: log-probabilities, or logits if the graph returns logits.

    A token is judged by its score, so either of two equally good tokens passes.
    """
    told_logits = "best.logits" in computed
    exact, own = (
        logits.double() if told_logits else torch.log_softmax(logits.double(), -1)
        for logits in (followed.outputs["logits"], followed.own_outputs["logits"])
    )
    ids, asked = torch.from_numpy(computed["best.ids"]), 1 if told_logits else contract.BEST_TOKENS
    asked = min(int(followed.case.inputs.get("count", [asked])[0]), exact.shape[-1])
    asked = len(followed.case.inputs.get("places", range(asked)))
    if ids.shape != (len(exact), asked) or computed[name].shape != ids.shape:
        return Rounding(math.nan)
    wanted, own_best = exact.topk(ids.shape[-1]).values, own.topk(ids.shape[-1]).values
    if name == "best.ids" and ((ids < 0) | (ids >= exact.shape[-1])).any():
        return Rounding(math.nan)
    got = exact.gather(1, ids) if name == "best.ids" else torch.from_numpy(computed[name]).double()
    slack = followed.slack_of(["decoder.norm"])
    # A log-probability, or the rank of a token, changes by the errors of two logits.
    found_here = distances(wanted, own_best, got, None if slack is None else 2 * slack, are_logits=True)
    logits, own_logits = (outputs["logits"].double() for outputs in (followed.outputs, followed.own_outputs))
    moved = distances(logits, own_logits, logits, are_logits=True)
    return Rounding(found_here.error, max(found_here.own, 2 * moved.own), max(found_here.size, 2 * moved.size))
