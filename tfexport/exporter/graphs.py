"""Writing of graphs: ONNX files over the weights files of a bundle."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from tfexport import contract, graph_contract
from tfexport.config import ModelConfig
from tfexport.dialects import DIALECTS
from tfexport.graphs import ort, ort_cuda, portable
from tfexport.graphs.stored_weights import StoredWeights
from tfexport.shortlist_contract import shortlist_graphs_of
from tfexport.system.ending import end_if_asked
from tfexport.system.version import version


def write_graphs(
    config: ModelConfig,
    precision: contract.Precision,
    folder: Path,
    keep: Collection[str] = (),
    *,
    dialects: Sequence[contract.Dialect] = tuple(DIALECTS),
    alignments: bool = False,
    shortlist: bool = False,
) -> list[contract.GraphSpec]:
    """Write the graphs of a precision for the weights in `folder`; returns the graphs.

    Args:
        keep: modules that stay in float32: projections of quantized graphs, paths of nodes in half precision.
        alignments: also write steps that return their cross-attention.
        shortlist: also write graphs for shortlists, unless the output projection stays in float32.
    """
    kinds = (graph_contract.graphs_of, *([graph_contract.attention_graphs_of] if alignments else []))
    graphs = [graph for dialect in dialects for kind in kinds for graph in kind(config, precision, dialect)]
    if shortlist and "output" not in keep:
        graphs += shortlist_graphs_of(config, precision)
    files = contract.weights_files(config, precision)
    stored = StoredWeights(*(folder / file for file in files))
    for graph in graphs:
        end_if_asked()  # the rest may take minutes
        model = emit(graph, config, stored, keep)
        model.producer_name, model.producer_version = "tfexport", version()
        ir.save(model, folder / graph.file)
        onnx.checker.check_model(folder / graph.file, full_check=True)
    return graphs


def emit(graph: contract.GraphSpec, config: ModelConfig, stored: StoredWeights, keep: Collection[str] = ()) -> ir.Model:
    """A graph of any dialect, with its weights in `stored` and the modules `keep` in float32."""
    return _DIALECTS.get(graph.dialect, portable.emit)(graph, config, stored, keep)


_DIALECTS = {"ort": ort.emit, "ort-cuda": ort_cuda.emit}
"""The functions that emit graphs of the dialects that are not portable."""
