"""Canonical model to ONNX graphs: names and axes from the contract, weights by reference into one safetensors file."""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import struct
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import onnxscript.optimizer
import onnxscript.rewriter
import torch
from onnxscript.values import Opset
from torch import Tensor, nn

from tfexport import __version__, contract
from tfexport.bundle import TOKENIZER_FILES, new_bundle, write_manifest
from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.models.checkpoint import Checkpoint
from tfexport.models.classifier import EncoderClassifier
from tfexport.models.files import save_weights
from tfexport.models.transformer import KeyValue, Transformer

OPSET = 24
TOLERANCE = 1e-4
"""Largest difference to PyTorch that the self-check accepts, relative to the tensor's root mean square (at least 1).
Different orders of summation in float32 stay below 1e-5."""

Model = Transformer | EncoderClassifier


@dataclass(frozen=True)
class Exported:
    """What `export` did."""

    directory: Path
    max_error: float
    """Largest difference between graphs and PyTorch in the self-check, relative as `TOLERANCE` is."""


def export(checkpoint: Checkpoint, directory: Path, *, force: bool = False) -> Exported:
    """Export a checkpoint to a bundle, checked against PyTorch before it is moved into place.

    Raises:
        BundleError: the bundle exists already or cannot be written.
        TfexportError: the graphs do not compute what PyTorch computes.
    """
    model = checkpoint.build_model()
    config = checkpoint.config
    with new_bundle(directory, force=force) as folder:
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_weights(weights, folder / contract.WEIGHTS_FILE, {"format": "pt"})
        for graph in contract.graphs_of(config):
            write_graph(model, graph, folder)
        for side, name in TOKENIZER_FILES.items():
            tokenizer = getattr(checkpoint.tokenizers, side)
            if tokenizer is not None:
                (folder / name).write_text(json.dumps(tokenizer.to_dict()), encoding="utf-8")
        write_manifest(folder, config, _facts(checkpoint))
        max_error = self_check(model, folder)
    return Exported(directory, max_error)


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    packages = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")
    return {
        "source": {
            "file": checkpoint.path.name,
            "sha256": checkpoint.sha256,
            "family": checkpoint.family,
            "given": checkpoint.given,
            "notes": list(checkpoint.notes),
        },
        "versions": {"tfexport": __version__, **{package: version(package) for package in packages}},
    }


class _Encoder(nn.Module):
    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, src_ids: Tensor, src_len: Tensor) -> list[Tensor]:
        return [tensor for memory in self.model.encode(src_ids, src_len) for tensor in memory]


class _DecoderStep(nn.Module):
    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, position: Tensor, src_len: Tensor, past: list[Tensor], cross: list[Tensor]
    ) -> list[Tensor]:
        logits, present = self.model.step(tokens, position, src_len, _paired(past), _paired(cross))
        return [logits, *(tensor for cache in present for tensor in cache)]


class _Classifier(nn.Module):
    def __init__(self, model: EncoderClassifier):
        super().__init__()
        self.model = model

    def forward(self, src_ids: Tensor, src_len: Tensor) -> list[Tensor]:
        return [self.model(src_ids, src_len)]


def _paired(tensors: list[Tensor]) -> list[KeyValue]:
    return [KeyValue(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]


def _module(model: Model, role: contract.Role) -> nn.Module:
    """The module whose arguments, flattened, are the inputs of the graph, in the contract's order."""
    if isinstance(model, EncoderClassifier):
        return _Classifier(model)
    return _Encoder(model) if role == "encoder" else _DecoderStep(model)


def write_graph(model: Model, graph: contract.GraphSpec, folder: Path) -> None:
    """Write one graph of the contract into `folder`, where the weights file lies already."""
    sizes = {"batch": 2, "rows": 6, "src": 5, "cache": 7}
    inputs = _random_inputs(graph, model.config, sizes, np.random.default_rng(0))
    arguments = [torch.from_numpy(inputs[tensor.name]) for tensor in graph.inputs]
    axes = [{k: torch.export.Dim.DYNAMIC for k, a in enumerate(t.axes) if a in sizes} for t in graph.inputs]
    layers = 2 * model.config.n_decoder_layers
    with _quiet_exporter():
        program = torch.onnx.export(
            _module(model, graph.role).eval(),
            _grouped(arguments, graph, layers),
            dynamic_shapes=_grouped(axes, graph, layers),
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
    _simplify(exported)
    _tidy(exported, graph, model.config)
    _refer_to_weights(exported, folder / contract.WEIGHTS_FILE)
    ir.save(exported, folder / graph.file)
    onnx.checker.check_model(folder / graph.file, full_check=True)


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


def _grouped(values: list[Any], graph: contract.GraphSpec, layers: int) -> tuple[Any, ...]:
    """The flat inputs as the module takes them: past and cross are lists."""
    if graph.role != "decoder_step":
        return tuple(values)
    return (*values[: -2 * layers], values[-2 * layers : -layers], values[-layers:])


def _tensor_scatter(cache: Any, update: Any, position: Any) -> Any:
    return Opset("", OPSET).TensorScatter(cache, update, position, axis=-2, mode="linear")


def _simplify(model: ir.Model) -> None:
    """Fold the arithmetic on shapes and merge what is computed twice.

    Weights stay as they are, also their transposes: so the graph can point into the weights file, and a runtime that
    packs matrices transposes them for nothing.
    """
    ir.passes.common.InlinePass()(model)
    onnxscript.optimizer.fold_constants(
        model,
        input_size_limit=16,
        output_size_limit=64,
        should_fold=lambda node: False if any(map(_is_weight, node.inputs)) else None,
    )
    onnxscript.rewriter.rewrite(model)
    for simplify in (
        ir.passes.common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        ir.passes.common.IdentityEliminationPass(),
        ir.passes.common.CommonSubexpressionEliminationPass(),
        ir.passes.common.RemoveUnusedNodesPass(),
        ir.passes.common.DeduplicateInitializersPass(),
    ):
        simplify(model)


def _is_weight(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and value.const_value.size > 64


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
    for node in model.graph:
        name = f"{_module_path(node)}/{node.op_type}".strip("/")
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
    with weights.open("rb") as file:
        (header_length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_length))
    for name, value in model.graph.initializers.items():
        if name in header:
            begin, end = header[name]["data_offsets"]
            value.const_value = ir.ExternalTensor(
                weights.name,
                8 + header_length + begin,
                end - begin,
                ir.DataType.FLOAT,
                shape=ir.Shape(header[name]["shape"]),
                name=name,
                base_dir=weights.parent,
            )


def self_check(model: Model, folder: Path) -> float:
    """Run the graphs in `folder` on ONNX Runtime against `model`, at sizes that the export did not see.

    Returns the largest relative error.

    Raises:
        TfexportError: it is above `TOLERANCE`.
    """
    random = np.random.default_rng(1)
    worst = 0.0
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that past and present are two buffers here
    for graph in contract.graphs_of(model.config):
        session = onnxruntime.InferenceSession(folder / graph.file, options, providers=["CPUExecutionProvider"])
        module = _module(model, graph.role)
        for sizes in (
            {"batch": 1, "rows": 1, "src": 1, "cache": 1},
            {"batch": 3, "rows": 12, "src": 6, "cache": 9},
            {"batch": 2, "rows": 2, "src": 4, "cache": 3},
        ):
            inputs = _random_inputs(graph, model.config, sizes, random)
            arguments = [torch.from_numpy(inputs[tensor.name]) for tensor in graph.inputs]
            with torch.inference_mode():
                expected = module(*_grouped(arguments, graph, 2 * model.config.n_decoder_layers))
            for tensor, wanted, got in zip(graph.outputs, expected, session.run(None, inputs), strict=True):
                error = float(np.abs(wanted.numpy() - got).max() / max(1.0, wanted.square().mean().sqrt().item()))
                if not error <= TOLERANCE:
                    raise TfexportError(
                        f"{graph.file} computes {tensor.name} with an error of {error:.1e} against PyTorch (at most "
                        f"{TOLERANCE:.0e} is accepted), so nothing was exported. Report this with the checkpoint's config."
                    )
                worst = max(worst, error)
    return worst


def _random_inputs(
    graph: contract.GraphSpec, config: ModelConfig, sizes: Mapping[str, int], random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Inputs of a graph that its model accepts; `sizes` are shrunk to the model's lengths."""
    sizes = {**sizes, "src": min(sizes["src"], config.max_source_length)}
    sizes["cache"] = min(sizes["cache"], max(config.max_target_length, 1))
    limits = {
        "src_ids": (0, config.src_vocab_size),
        "src_len": (1, sizes["src"] + 1),
        "tokens": (0, config.tgt_vocab_size),
        "position": (0, sizes["cache"]),
    }
    inputs: dict[str, np.ndarray] = {}
    for tensor in graph.inputs:
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in contract.shape(tensor, config)]
        if tensor.dtype == "int64":
            inputs[tensor.name] = random.integers(*limits[tensor.name], shape)
        else:
            inputs[tensor.name] = random.standard_normal(shape, dtype=np.float32)
    return inputs
