"""Canonical model to ONNX graphs: names and axes from the contract, weights by reference into one file a precision."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from tfexport import __version__, contract, ort_graphs, standard_graphs
from tfexport.bundle import TOKENIZER_FILES
from tfexport.bundle_writer import new_bundle, write_manifest
from tfexport.calibrate import input_ranges
from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.graph_modules import Model
from tfexport.models.checkpoint import Checkpoint
from tfexport.models.classifier import EncoderClassifier
from tfexport.models.files import save_weights
from tfexport.models.precision import in_precision
from tfexport.models.transformer import Transformer
from tfexport.projections import decoder_projections, encoder_projections
from tfexport.quantize import has_fixed_scale, quantized
from tfexport.rounded import rounded
from tfexport.selfcheck import ONNX_RUNTIME, TOLERANCE, self_check
from tfexport.stored_weights import StoredWeights


@dataclass(frozen=True)
class Exported:
    """What `export` did."""

    directory: Path
    max_errors: dict[contract.Precision, float]
    """Largest difference between graphs and PyTorch in the self-check, relative as `selfcheck.TOLERANCE` is; no number
    for a precision that ONNX Runtime's CPU provider cannot run."""


def export(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    precisions: Sequence[contract.Precision] = (),
    force: bool = False,
    verify: Callable[[Path], None] | None = None,
) -> Exported:
    """Export a checkpoint to a bundle, checked against PyTorch before it is moved into place.

    Args:
        precisions: variants to write beside float32, which is always there.
        verify: called with the folder of the whole bundle before it is moved into place; what it raises stops that.

    Raises:
        BundleError: the bundle exists already or cannot be written.
        TfexportError: the graphs do not compute what PyTorch computes.
    """
    model = checkpoint.build_model()
    config = checkpoint.config
    graphs: list[contract.GraphSpec] = []
    max_errors: dict[contract.Precision, float] = {}
    with new_bundle(directory, force=force) as folder:
        for precision in (p for p in contract.PRECISIONS.values() if p == "float32" or p in precisions):
            reference = model
            if precision in contract.QUANTIZED:
                reference = write_quantized(model, precision, folder)
            else:
                write_weights(in_precision(model, precision), precision, folder)
            written = write_graphs(config, precision, folder)
            if precision in TOLERANCE:
                max_errors[precision] = self_check(reference, written, folder)
            graphs += written
        for side, name in TOKENIZER_FILES.items():
            tokenizer = getattr(checkpoint.tokenizers, side)
            if tokenizer is not None:
                (folder / name).write_text(json.dumps(tokenizer.to_dict()), encoding="utf-8")
        write_manifest(folder, config, graphs, _facts(checkpoint))
        if verify is not None:
            verify(folder)
    return Exported(directory, max_errors)


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    packages = {package.__name__: package.__version__ for package in (torch, onnx, np)}
    return {
        "source": {
            "file": checkpoint.path.name,
            "sha256": checkpoint.sha256,
            "family": checkpoint.family,
            "given": checkpoint.given,
            "notes": list(checkpoint.notes),
        },
        "versions": {"tfexport": __version__, **packages, "onnxruntime": ONNX_RUNTIME},
    }


def write_graphs(config: ModelConfig, precision: contract.Precision, folder: Path) -> list[contract.GraphSpec]:
    """Write the graphs of a precision in every dialect over the weights that lie in `folder`; returns them."""
    files = (
        {contract.WEIGHTS_FILE, contract.weights_file(precision)}
        if precision in contract.QUANTIZED
        else {contract.weights_file(precision)}
    )
    stored = StoredWeights(*(folder / file for file in sorted(files)))
    graphs = [graph for dialect in contract.DIALECTS for graph in contract.graphs_of(config, precision, dialect)]
    for graph in graphs:
        model = emit(graph, config, stored)
        model.producer_name, model.producer_version = "tfexport", __version__
        ir.save(model, folder / graph.file)
        onnx.checker.check_model(folder / graph.file, full_check=True)
    return graphs


def emit(graph: contract.GraphSpec, config: ModelConfig, stored: StoredWeights) -> ir.Model:
    """A graph of any dialect, its weights in `stored`."""
    dialect = ort_graphs if graph.dialect == "ort" else standard_graphs
    return dialect.emit(graph, config, stored)


def write_weights(model: Model, precision: contract.Precision, folder: Path) -> None:
    """Write the weights of `model`, which is of this precision."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_weights(tensors, folder / contract.weights_file(precision), {"format": "pt"})


def write_quantized(model: Model, precision: contract.Precision, folder: Path) -> Transformer:
    """Write the quantized weights of `model`, which is float32; returns a model that has them, in float32.

    Raises:
        TfexportError: it is a classifier, or a weight is not a finite number.
    """
    if isinstance(model, EncoderClassifier):
        raise TfexportError(
            "encoder classifiers are exported in fp32, fp16 and bf16 only. Leave the other precisions out."
        )
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    projections = (*encoder_projections(model.config), *decoder_projections(model.config))
    ranges = {}
    if precision == "int8":
        seen = input_ranges(model)
        fixed = [projection for projection in projections if has_fixed_scale(projection, model.config)]
        ranges = {projection.name: seen[projection.modules[0]] for projection in fixed}
    arrays = quantized(weights, projections, precision, ranges)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    save_weights(tensors, folder / contract.weights_file(precision), {"format": "pt"})
    return rounded(model, arrays)
