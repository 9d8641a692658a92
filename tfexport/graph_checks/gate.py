"""The check of an export: every value of every graph is compared with PyTorch before the bundle is moved into place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tfexport.contract import GraphSpec, Precision, short_name
from tfexport.errors import TfexportError
from tfexport.graph_checks.check import Compared, check_graph
from tfexport.graph_checks.definition import Definition
from tfexport.graphs.linear_quantized import Stored
from tfexport.models.model import Model
from tfexport.system.processes import return_freed_memory


@dataclass(frozen=True)
class Agreement:
    """How often a bundle chooses the token that the exported model, in float32, also gives the highest logit."""

    same: int
    steps: int

    @property
    def is_low(self) -> bool:
        """Whether outputs probably differ from those of float32: another token at more than one step in twenty."""
        return self.same < 0.95 * self.steps


class Gate(Protocol):
    """Checks a bundle while it is written. An example is `verification.gate.DecodingGate`, which also decodes."""

    def check_graphs(
        self,
        model: Model,
        precision: Precision,
        graphs: Sequence[GraphSpec],
        folder: Path,
        *,
        stored: Stored | None,
        keep: Collection[str],
    ) -> Compared | None:
        """Check the graphs of a precision; returns the value that came closest to its limit, if values have limits.

        Args:
            model: the exported model, in float32.
            folder: has the graphs and their weights.
            stored: the tensors of the weights file of a quantized precision.
            keep: the modules that stay in float32.

        Raises:
            TfexportError: the graphs do not compute the values of the model.
        """
        ...

    def check_bundle(self, folder: Path, model: Model) -> Mapping[Precision, Agreement]:
        """Check the complete bundle, and leave it as it is; returns how often each precision chooses the model's token.

        Raises:
            TfexportError: the bundle does not decode as the model does.
        """
        ...


@dataclass(frozen=True)
class GraphGate:
    """The gate that compares every value of every graph with PyTorch."""

    tolerance: float | None = None
    """A fixed limit of errors instead of the limit that follows from rounding."""

    def check_graphs(
        self,
        model: Model,
        precision: Precision,
        graphs: Sequence[GraphSpec],
        folder: Path,
        *,
        stored: Stored | None,
        keep: Collection[str],
    ) -> Compared:
        """See `Gate`."""
        definition = Definition.of(model, precision, stored, keep)
        closest = check_written(definition, graphs, folder, tolerance=self.tolerance)
        return_freed_memory(now=True)  # the sessions take several times the weights
        return closest

    def check_bundle(self, folder: Path, model: Model) -> Mapping[Precision, Agreement]:
        """Checks nothing: `verification.gate.DecodingGate` also decodes."""
        return {}


REMEDY: dict[Precision, str] = {
    "float16": "Its activations may not fit this precision: export in fp32, or in bf16, which has its range.",
}
"""Advice for a graph with too large errors, if the cause is the precision."""


def check_written(
    definition: Definition, graphs: Sequence[GraphSpec], folder: Path, *, tolerance: float | None = None
) -> Compared:
    """Compare the graphs of a precision with their definition; returns the value that came closest to its limit.

    Raises:
        TfexportError: an error exceeds its limit.
    """
    largest, limit = [], "rounding explains" if tolerance is None else "--tolerance allows"
    for graph in graphs:
        checked = check_graph(definition, graph, folder, tolerance=tolerance)
        if (first := checked.first) is not None:
            report = "Report this with the checkpoint's config, or allow more with --tolerance N."
            if graph.precision != "float32":
                report = f"Leave {short_name(graph.precision)} out of --precision. {report}"
            raise TfexportError(
                f"{graph.file} departs from PyTorch at {first.node}: {first.about} is off by {first.error:.1e}, and "
                f"{limit} {first.allowed:.1e} (PyTorch's own is {first.own:.1e}), so nothing was exported. "
                + REMEDY.get(graph.precision, report)
            )
        largest.append(checked.largest)
    return max(largest, key=lambda value: value.share)
