"""Canonical model to ONNX graphs: names and axes from the contract, weights by reference into one file a precision."""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript
import torch
from onnxscript.values import Opset
from torch import nn

from tfexport import __version__, contract
from tfexport.bundle import TOKENIZER_FILES
from tfexport.bundle_writer import new_bundle, write_manifest
from tfexport.calibrate import input_ranges
from tfexport.config import ModelConfig
from tfexport.emitter import decoder_projections, encoder_projections
from tfexport.errors import TfexportError
from tfexport.graph_modules import Model, arguments_of, grouped, module_of, random_inputs
from tfexport.models.checkpoint import Checkpoint
from tfexport.models.classifier import EncoderClassifier
from tfexport.models.files import save_weights
from tfexport.models.precision import in_precision
from tfexport.models.transformer import Transformer
from tfexport.optimize import require_no_masks, shape_nodes, simplify, use_lengths
from tfexport.ort_graphs import emit
from tfexport.quantize import LINEARS, has_fixed_scale, quantized, restored
from tfexport.selfcheck import ONNX_RUNTIME, TOLERANCE, self_check
from tfexport.stored_weights import StoredWeights

OPSET = 24


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
) -> Exported:
    """Export a checkpoint to a bundle, checked against PyTorch before it is moved into place.

    Args:
        precisions: variants to write beside float32, which is always there.

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
                written = write_ort_graphs(config, precision, folder)
            else:
                written = write_graphs(in_precision(model, precision), precision, folder)
                written += write_ort_graphs(config, precision, folder)
            if precision in TOLERANCE:
                max_errors[precision] = self_check(reference, written, folder)
            graphs += written
        for side, name in TOKENIZER_FILES.items():
            tokenizer = getattr(checkpoint.tokenizers, side)
            if tokenizer is not None:
                (folder / name).write_text(json.dumps(tokenizer.to_dict()), encoding="utf-8")
        write_manifest(folder, config, graphs, _facts(checkpoint))
    return Exported(directory, max_errors)


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    packages = {package.__name__: package.__version__ for package in (torch, onnx, onnxscript, np)}
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


def write_graphs(model: Model, precision: contract.Precision, folder: Path) -> list[contract.GraphSpec]:
    """Write the weights of `model`, which is of this precision, and its graphs in every dialect; returns the graphs."""
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_weights(weights, folder / contract.weights_file(precision), {"format": "pt"})
    written = []
    for graph in contract.graphs_of(model.config, precision):
        exported = trace(model, graph, folder)
        _save(exported, graph, folder)
        written.append(graph)
        if use_lengths(exported):
            require_no_masks(exported)
            lengths = replace(graph, dialect="onnx24-lengths")
            _save(exported, lengths, folder)
            written.append(lengths)
    return written


def write_quantized(
    model: Model, precision: contract.Precision, folder: Path, calibration: Sequence[Sequence[int]] = ()
) -> Transformer:
    """Write the quantized weights of `model`, which is float32; returns a model that has them, in float32.

    Args:
        calibration: encoder ids of sentences to measure ranges of activations with; random ids where there are none.

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
        seen = input_ranges(model, calibration)
        fixed = [projection for projection in projections if has_fixed_scale(projection, model.config)]
        ranges = {projection.name: seen[projection.modules[0]] for projection in fixed}
    arrays = quantized(weights, projections, precision, ranges)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    save_weights(tensors, folder / contract.weights_file(precision), {"format": "pt"})
    rounded = copy.deepcopy(model)
    if rounded.output_weight is None:  # the embeddings that it is tied to stay as they are
        rounded.output_weight = nn.Parameter(rounded.output_matrix().detach().clone())
    matrices = restored(arrays, weights, projections)
    output = projections[-1].weights[0]
    rounded.output_weight.data = torch.from_numpy(matrices.pop(output))
    rounded.load_state_dict({name: torch.from_numpy(matrix) for name, matrix in matrices.items()}, strict=False)
    return rounded


def write_ort_graphs(config: ModelConfig, precision: contract.Precision, folder: Path) -> list[contract.GraphSpec]:
    """Write the graphs of the dialect `ort` over weights that lie in `folder`; returns them, none for some precisions."""
    graphs = list(contract.graphs_of(config, precision, "ort"))
    if graphs:
        files = {contract.WEIGHTS_FILE, contract.weights_file(precision)}
        stored = StoredWeights(*(folder / file for file in sorted(files)))
    for graph in graphs:
        emitted = emit(graph, config, stored, LINEARS[precision])
        emitted.producer_name, emitted.producer_version = "tfexport", __version__
        _save(emitted, graph, folder)
    return graphs


def _save(exported: ir.Model, graph: contract.GraphSpec, folder: Path) -> None:
    ir.save(exported, folder / graph.file)
    onnx.checker.check_model(folder / graph.file, full_check=True)


def trace(model: Model, graph: contract.GraphSpec, folder: Path) -> ir.Model:
    """One graph of the contract, pointing into the weights file in `folder`."""
    sizes = {"batch": 2, "rows": 6, "src": 5, "cache": 7, "blocks": 4, "from": 3, "width": 8}
    inputs = random_inputs(graph, model.config, sizes, np.random.default_rng(0))
    arguments = arguments_of(inputs, graph)
    axes = [{k: torch.export.Dim.DYNAMIC for k, a in enumerate(t.axes) if a in sizes} for t in graph.inputs]
    with _quiet_exporter():
        program = torch.onnx.export(
            module_of(model, graph.role).eval(),
            grouped(arguments, graph, model.config),
            dynamic_shapes=grouped(axes, graph, model.config),
            input_names=[tensor.name for tensor in graph.inputs],
            output_names=[tensor.name for tensor in graph.outputs],
            opset_version=OPSET,
            custom_translation_table={torch.ops.tfexport.write_cache.default: _tensor_scatter},
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    assert program is not None
    exported = program.model
    simplify(exported)
    _tidy(exported, graph, model.config)
    _refer_to_weights(exported, folder / contract.weights_file(graph.precision))
    return exported


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """PyTorch's exporter warns of its own deprecations, and of operators that only torchvision has."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", (FutureWarning, DeprecationWarning))
            yield
    finally:
        logger.setLevel(level)


def _tensor_scatter(cache: Any, update: Any, position: Any) -> Any:
    return Opset("", OPSET).TensorScatter(cache, update, position, axis=-2, mode="linear")


def _tidy(model: ir.Model, graph: contract.GraphSpec, config: ModelConfig) -> None:
    """Name axes as the contract does and nodes by the module they come from; drop the exporter's notes."""
    for side, tensors in ((model.graph.inputs, graph.inputs), (model.graph.outputs, graph.outputs)):
        for value, tensor in zip(side, tensors, strict=True):
            if value.name != tensor.name:
                raise TfexportError(f"the exporter named a tensor {value.name}, not {tensor.name}. Report this.")
            value.shape = ir.Shape(contract.shape(tensor, config))
            value.metadata_props.clear()
    for value in list(model.graph.initializers.values()):
        if value.name is not None and value.name.startswith("model."):
            value.name = value.name.removeprefix("model.")
    numbers: Counter[str] = Counter()
    shapes = shape_nodes(model)
    for node in model.graph:
        name = contract.SHAPE_NODE if node in shapes else f"{_module_path(node)}/".removeprefix("/")
        name += node.op_type
        numbers[name] += 1
        node.name = f"{name}_{numbers[name]}"
        node.metadata_props.clear()
        for output in node.outputs:
            output.metadata_props.clear()
            if not output.is_graph_output():
                output.shape = None  # in the exporter's own symbols; every reader infers them
    model.graph.name = graph.role
    model.producer_name = "tfexport"
    model.producer_version = __version__
    model.metadata_props.clear()
    model.graph.metadata_props.clear()


def _module_path(node: ir.Node) -> str:
    """Where in the model a node comes from, such as decoder.layers.0.norms.1; empty for the outermost module."""
    scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))  # modules, then the call
    paths = [scope.removeprefix("model.") for scope in scopes[:-1] if scope.startswith("model.")]
    return str(paths[-1]) if paths else ""


def _refer_to_weights(model: ir.Model, weights: Path) -> None:
    """Let initializers that lie in the weights file point there: one copy of the weights serves all graphs."""
    stored = StoredWeights(weights)
    for name, value in model.graph.initializers.items():
        if name in stored:
            value.const_value = stored.tensor(name)
