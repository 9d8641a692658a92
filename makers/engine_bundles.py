"""Bundles with the graphs that TensorRT engines are built of, and these graphs as TensorRT gets them."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx

from tfexport import contract, graph_contract
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.bundle.writer import write_manifest
from tfexport.contract import FLOATS, GraphSpec, Precision
from tfexport.exporter.engine_graphs import buildable_attention, longer_positions
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.weights import write_variant
from tfexport.graph_checks.cases_portable import random_inputs
from tfexport.graph_checks.session import Session
from tfexport.models.transformer import Transformer


def write_bundle(model: Transformer, folder: Path, keep: Mapping[str, Collection[str]] | None = None) -> Bundle:
    """The graphs that engines are built of, in every precision of GPUs, and their weights.

    Args:
        keep: for a precision the modules that stay in float32.
    """
    folder.mkdir()
    graphs: list[GraphSpec] = []
    for precision in FLOATS.values():
        kept = (keep or {}).get(precision, ())
        write_variant(model, precision, folder, kept)
        graphs += write_graphs(model.config, precision, folder, kept, dialects=["onnx24"])
    write_manifest(folder, model.config, graphs, {"source": {"sha256": "", "family": "native", "given": {}}})
    return open_bundle(folder)


def different_outputs(bundle: Bundle, precision: Precision, folder: Path) -> Iterator[str]:
    """The outputs that have other bits in the graphs as TensorRT gets them, but for the lengths that it fixes.

    Args:
        folder: a new folder for these graphs.
    """
    config, random_numbers = bundle.config, np.random.default_rng(0)
    folder.mkdir()
    weights = contract.weights_file(precision)
    shutil.copy(bundle.directory / weights, folder)
    sizes = {"batch": 3, "src": 9, "rows": 6, "cache": 11, "least": 1}
    for graph in graph_contract.graphs_of(config, precision):
        if graph.role in graph_contract.WITHOUT_MODULES:
            continue
        model = onnx.load(bundle.graph(graph.role, precision), load_external_data=False)
        longer_positions(model, source=config.max_source_length + 30)
        buildable_attention(model)
        onnx.save(model, folder / graph.file)
        onnx.checker.check_model(folder / graph.file, full_check=True)
        inputs = random_inputs(graph, config, {**sizes, "from": 1}, random_numbers)
        runs = [Session(model, graph, at, [], False)(inputs) for at in (bundle.directory, folder)]
        yield from (
            f"{graph.file}: {name}" for name, values in runs[0].items() if values.tobytes() != runs[1][name].tobytes()
        )
