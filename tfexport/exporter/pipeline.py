"""Export of the canonical model to ONNX graphs. The contract defines names and axes; each precision has one weights file."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir
import torch

from tfexport import contract, graph_contract
from tfexport.bundle.reader import GENERATION_CONFIG, TOKENIZER_FILES
from tfexport.bundle.writer import new_bundle, write_manifest
from tfexport.config import ModelConfig
from tfexport.contract import short_name
from tfexport.dialects import DIALECTS, RUNTIME_DIALECTS
from tfexport.errors import TfexportError
from tfexport.graph_checks.cases_portable import Model
from tfexport.graph_checks.check import Compared, check_graph
from tfexport.graph_checks.definition import Definition, Stored, projections_of
from tfexport.graph_checks.session import ONNX_RUNTIME
from tfexport.graphs import ort, ort_cuda, portable
from tfexport.graphs.linear_quantized import quantize
from tfexport.graphs.projections import decoder_projections
from tfexport.graphs.screening import FILE as SCREENING_FILE
from tfexport.graphs.screening import is_screened, screening_tensors
from tfexport.graphs.stored_weights import StoredWeights
from tfexport.models.checkpoints.load import Checkpoint
from tfexport.models.classifier import EncoderClassifier
from tfexport.models.formats.files import save_weights
from tfexport.models.precision import in_precision
from tfexport.models.transformer import Transformer
from tfexport.shortlist_contract import shortlist_graphs_of
from tfexport.system.ending import end_if_asked
from tfexport.system.processes import return_freed_memory
from tfexport.system.version import version


class Choice(Protocol):
    """The modules of a precision that stay in float32."""

    @property
    def kept_modules(self) -> tuple[str, ...]:
        """The paths of the modules within the model."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, for the manifest."""
        ...

    def summary(self, precision: str) -> list[str]:
        """Lines of text for the user; `precision` is its short name."""
        ...


class Chooser(Protocol):
    """Chooses the modules that stay in float32; an example is `verification.budget.Budget`, which measures on text."""

    def __call__(
        self,
        model: Transformer,
        precision: contract.Precision,
        folder: Path,
        emit: Callable[[Collection[str]], list[contract.GraphSpec]],
    ) -> Choice:
        """Choose by trying graphs. `emit` writes graphs in which the given modules stay in float32 into `folder`."""
        ...


@dataclass(frozen=True)
class Exported:
    """The result of `export`."""

    directory: Path
    closest: dict[contract.Precision, Compared]
    """The graph value that came closest to its limit, for each precision."""
    choices: dict[contract.Precision, Choice]
    """The modules that stay in float32 for a budget."""


def automatic_precisions(given: str) -> tuple[str, tuple[contract.Precision, ...]]:
    """Remove the prefixes `auto-`: `fp32,auto-int8` to `fp32,int8`, and the precisions that had one."""
    names = [name.strip() for name in given.split(",")]
    plain = [name.removeprefix("auto-") for name in names]
    automatic = [name.removeprefix("auto-") for name in names if name.startswith("auto-")]
    for name in automatic:
        if name not in ("fp16", "int8", "int4"):
            raise TfexportError(f"there is no auto-{name}. Give auto-fp16, auto-int8 or auto-int4.")
        if plain.count(name) > 1:
            raise TfexportError(f"a bundle has one {name}. Give {name} or auto-{name}.")
    return ",".join(plain), contract.precisions_of(",".join(automatic)) if automatic else ()


def bundle_beside(checkpoint: Path) -> Path:
    """The default path of a checkpoint's bundle, next to the checkpoint."""
    directory = checkpoint.with_suffix("")
    if directory == checkpoint or checkpoint.is_dir():
        return checkpoint.with_name(f"{checkpoint.name}.bundle")
    return directory


def export(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    precisions: Sequence[contract.Precision] = (),
    choosers: Mapping[contract.Precision, Chooser] | None = None,
    alignments: bool = False,
    force: bool = False,
    check: bool = True,
    tolerance: float | None = None,
    verify: Callable[[Path, Model], None] | None = None,
    shortlist: bool = False,
) -> Exported:
    """Export a checkpoint to a bundle. The bundle is checked against PyTorch before it is moved into place.

    Args:
        precisions: precisions to write in addition to float32, which is always written.
        alignments: also write step graphs that return their cross-attention.
        choosers: functions that choose the modules that stay in float32, for the precisions that need such a choice.
        check: compare every value of every graph with PyTorch.
        tolerance: a fixed limit for these values, instead of the limit derived from rounding.
        verify: called with the folder of the complete bundle and the model, before the bundle is moved into place. An
            exception stops the export.
        shortlist: also write graphs that compute only the logits of a shortlist.

    Raises:
        BundleError: the bundle exists already or cannot be written.
        TfexportError: the graphs do not compute the values of PyTorch, or alignments are requested of a classifier.
    """
    model = checkpoint.build_model()
    config = checkpoint.config
    if alignments and config.is_classifier:
        raise TfexportError("an encoder classifier has no output to align. Leave --alignments out.")
    graphs: list[contract.GraphSpec] = []
    closest: dict[contract.Precision, Compared] = {}
    choices: dict[contract.Precision, Choice] = {}
    with new_bundle(directory, force=force) as folder:
        for precision in (p for p in contract.PRECISIONS.values() if p == "float32" or p in precisions):
            keep: list[str] = []
            if choosers and precision in choosers:
                choices[precision] = _chosen(model, precision, folder, choosers[precision])
                keep = list(choices[precision].kept_modules)
            stored = write_variant(model, precision, folder, keep)
            written = write_graphs(config, precision, folder, keep, alignments=alignments, shortlist=shortlist)
            if check:
                definition = Definition.of(model, precision, stored, keep)
                closest[precision] = check_written(definition, written, folder, tolerance=tolerance)
                return_freed_memory(now=True)  # the sessions take several times the weights
            graphs += written
        for side, name in TOKENIZER_FILES.items():
            tokenizer = getattr(checkpoint.tokenizers, side)
            if tokenizer is not None:
                (folder / name).write_text(json.dumps(tokenizer.to_dict()), encoding="utf-8")
        if checkpoint.generation is not None:
            content = json.dumps(checkpoint.generation, indent=1)
            (folder / GENERATION_CONFIG).write_text(f"{content}\n", encoding="utf-8")
        budgeted = {short_name(precision): choice.to_dict() for precision, choice in choices.items()}
        write_manifest(folder, config, graphs, {**_facts(checkpoint), "budgets": budgeted})
        if verify is not None:
            verify(folder, model)
    return Exported(directory, closest, choices)


REMEDY: dict[contract.Precision, str] = {
    "float16": "Its activations may not fit this precision: export in fp32, or in bf16, which has its range.",
}
"""Advice for a graph with too large errors, if the cause is the precision."""


def check_written(
    definition: Definition, graphs: Sequence[contract.GraphSpec], folder: Path, *, tolerance: float | None = None
) -> Compared:
    """Compare the graphs of a precision with their definition; returns the value that came closest to its limit.

    Raises:
        TfexportError: an error exceeds its limit.
    """
    found = []
    for graph in graphs:
        checked = check_graph(definition, graph, folder, tolerance=tolerance)
        if (first := checked.first) is not None:
            report = "Report this with the checkpoint's config, or allow more with --tolerance N."
            if graph.precision != "float32":
                report = f"Leave {short_name(graph.precision)} out of --precision. {report}"
            raise TfexportError(
                f"{graph.file} departs from PyTorch at {first.node}: {first.about} is off by {first.error:.1e}, and "
                f"rounding explains {first.allowed:.1e} (PyTorch's own is {first.own:.1e}), so nothing was exported. "
                + REMEDY.get(graph.precision, report)
            )
        found.append(checked.largest)
    return max(found, key=lambda value: value.share)


def _chosen(model: Model, precision: contract.Precision, folder: Path, chooser: Chooser) -> Choice:
    """Choose the modules to keep in float32 by trying graphs in `folder`, which has the float32 weights."""
    if isinstance(model, EncoderClassifier):
        raise TfexportError(
            "encoder classifiers have no output to measure a budget on. Give a precision without auto-."
        )
    # Weights that are too large for the precision can be kept in float32.
    write_variant(
        model, precision, folder, [path for path, _ in model.named_modules()] if precision == "float16" else ()
    )
    dialects = [dialect for dialect in RUNTIME_DIALECTS["ort-cpu"] if dialect == "ort" or precision == "float16"]
    return chooser(
        model, precision, folder, lambda keep: write_graphs(model.config, precision, folder, keep, dialects=dialects)
    )


def write_variant(
    model: Model, precision: contract.Precision, folder: Path, keep: Collection[str] = ()
) -> Stored | None:
    """Write the weights of a precision, except those of modules that stay in float32; returns quantized weights."""
    if precision in contract.QUANTIZED:
        return write_quantized(model, precision, folder, keep)
    write_weights(in_precision(model, precision, keep), precision, folder)
    return None


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    packages = {package.__name__: package.__version__ for package in (torch, onnx, np)}
    return {
        "source": {
            "file": checkpoint.path.name,
            "sha256": checkpoint.sha256,
            "family": checkpoint.family,
            "given": checkpoint.given,
            "text": dict(checkpoint.text),
            "notes": list(checkpoint.notes),
            "ignored": list(checkpoint.ignored),
        },
        "versions": {"tfexport": version(), **packages, "onnxruntime": ONNX_RUNTIME},
    }


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
    stored = StoredWeights(*(folder / file for file in weights_files(config, precision)))
    kinds = (graph_contract.graphs_of, *([graph_contract.attention_graphs_of] if alignments else []))
    graphs = [graph for dialect in dialects for kind in kinds for graph in kind(config, precision, dialect)]
    if shortlist and "output" not in keep:
        graphs += shortlist_graphs_of(config, precision)
    for graph in graphs:
        end_if_asked()  # the rest may take minutes
        model = emit(graph, config, stored, keep)
        model.producer_name, model.producer_version = "tfexport", version()
        ir.save(model, folder / graph.file)
        onnx.checker.check_model(folder / graph.file, full_check=True)
    return graphs


def weights_files(config: ModelConfig, precision: contract.Precision) -> list[str]:
    """The files of all tensors that graphs of a precision refer to."""
    files = [contract.weights_file(precision)]
    if precision in contract.QUANTIZED:
        files.append(contract.WEIGHTS_FILE)
    elif is_screened(config, precision):
        files.append(SCREENING_FILE)
    return files


def emit(graph: contract.GraphSpec, config: ModelConfig, stored: StoredWeights, keep: Collection[str] = ()) -> ir.Model:
    """A graph of any dialect, with its weights in `stored` and the modules `keep` in float32."""
    return _DIALECTS.get(graph.dialect, portable.emit)(graph, config, stored, keep)


_DIALECTS = {"ort": ort.emit, "ort-cuda": ort_cuda.emit}
"""The functions that emit graphs of the dialects that are not portable."""


def write_weights(model: Model, precision: contract.Precision, folder: Path) -> None:
    """Write the weights of `model`, which is in this precision, and the tensors for screening."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    tensors = with_stacked(tensors, model.config, precision)
    save_weights(tensors, folder / contract.weights_file(precision), {"format": "pt"})
    if isinstance(model, Transformer) and is_screened(model.config, precision):
        arrays = screening_tensors(model.output_matrix().detach().numpy())
        save_weights(
            {n: torch.from_numpy(array) for n, array in arrays.items()}, folder / SCREENING_FILE, {"format": "pt"}
        )


def with_stacked(
    tensors: Mapping[str, torch.Tensor], config: ModelConfig, precision: contract.Precision
) -> dict[str, torch.Tensor]:
    """`tensors` in the form of a weights file: half precision has the query, key and value of a decoder's self-attention in
    one tensor (`graphs/stored_weights.py`)."""
    found = dict(tensors)
    if precision in ("float16", "bfloat16") and not config.is_classifier:
        for projection in decoder_projections(config):
            if len(projection.weights) > 1:
                for kind, names in (("weight", projection.weights), ("bias", projection.biases)):
                    if names:
                        found[f"{projection.name}.{kind}"] = torch.cat([found.pop(name) for name in names])
    return found


def write_quantized(model: Model, precision: contract.Precision, folder: Path, keep: Collection[str] = ()) -> Stored:
    """Quantize and write the weights of `model`, which is in float32, and return them.

    The projections `keep` stay in float32.

    Raises:
        TfexportError: the model is a classifier, or a weight is not finite.
    """
    if isinstance(model, EncoderClassifier):
        raise TfexportError(
            "encoder classifiers are exported in fp32, fp16 and bf16 only. Leave the other precisions out."
        )
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    projections = [projection for projection in projections_of(model.config) if projection.name not in keep]
    arrays = quantize(weights, projections, precision)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    save_weights(tensors, folder / contract.weights_file(precision), {"format": "pt"})
    return arrays
