"""Graphs beside their definition, as an export holds them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from safetensors.numpy import load_file

from tfexport import contract
from tfexport.graph_checks.definition import Definition
from tfexport.graph_checks.gate import check_written
from tfexport.models.model import Model


def definition_of(model: Model, precision: contract.Precision, folder: Path, keep: Collection[str] = ()) -> Definition:
    """Of the float32 `model` in a precision whose weights lie in `folder`."""
    path = folder / contract.weights_file(precision)
    return Definition.of(model, precision, load_file(path) if precision in contract.QUANTIZED else None, keep)


def self_check(model: Model, graphs: Sequence[contract.GraphSpec], folder: Path, keep: Collection[str] = ()) -> float:
    """The largest error of any value in `graphs`, as a part of what rounding explains; raises where it is more than that."""
    precisions = {graph.precision for graph in graphs}
    return max(
        check_written(
            definition_of(model, precision, folder, keep), [g for g in graphs if g.precision == precision], folder
        ).share
        for precision in precisions
    )
