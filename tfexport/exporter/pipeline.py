"""Export of a checkpoint to a bundle: weights, graphs, tokenizers and a manifest, checked before it is moved into place.

`weights.py` and `graphs.py` write the files of a precision. The gate that checks them is an argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import torch

from tfexport import contract
from tfexport.bundle.reader import GENERATION_CONFIG, TOKENIZER_FILES
from tfexport.bundle.writer import new_bundle, write_manifest
from tfexport.confirmation import Confirmation
from tfexport.contract import short_name
from tfexport.errors import TfexportError
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.weights import write_variant
from tfexport.graph_checks.check import Compared
from tfexport.graph_checks.gate import Agreement, Gate, GraphGate
from tfexport.graph_checks.session import ONNX_RUNTIME
from tfexport.models.checkpoints.load import Checkpoint
from tfexport.models.model import Model
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
    """Chooses the modules that stay in float32, as `verification.budget.BudgetChooser`, which measures on text."""

    def __call__(self, model: Model, precision: contract.Precision, folder: Path) -> Choice:
        """Choose by trying graphs.

        Args:
            folder: has the weights of float32. Other files of the precision are written over.

        Raises:
            TfexportError: no choice is good enough.
        """
        ...


GRAPHS = GraphGate()
"""The default gate."""


@dataclass(frozen=True)
class Exported:
    """The result of `export`."""

    directory: Path
    closest: dict[contract.Precision, Compared]
    """The graph value that came closest to its limit, for each precision."""
    choices: dict[contract.Precision, Choice]
    """The modules that stay in float32 for a budget."""
    agreements: Mapping[contract.Precision, Agreement]
    """How often each precision chose the token of float32, if the gate decodes."""
    confirmation: Confirmation
    """Who confirms that the checkpoint was read as its owner's code computes it."""


def automatic_precisions(text: str) -> tuple[str, tuple[contract.Precision, ...]]:
    """Remove the prefixes `auto-`: `fp32,auto-int8` to `fp32,int8`, and the precisions that had one."""
    names = [name.strip() for name in text.split(",")]
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
    shortlist: bool = False,
    force: bool = False,
    gate: Gate | None = GRAPHS,
) -> Exported:
    """Export a checkpoint to a bundle. The bundle is checked before it is moved into place.

    Args:
        precisions: precisions to write in addition to float32, which is always written.
        choosers: functions that choose the modules that stay in float32, for the precisions that need such a choice.
        alignments: also write step graphs that return their cross-attention.
        shortlist: also write graphs that compute only the logits of a shortlist.
        gate: the checks; by default every value of every graph is compared with PyTorch. None: nothing is checked.

    Raises:
        BundleError: the bundle exists already or cannot be written.
        TfexportError: the gate rejects the bundle, or alignments are requested of a classifier.
    """
    config, facts = checkpoint.config, {"source": checkpoint.origin(), "versions": _versions()}
    if alignments and config.is_classifier:
        raise TfexportError("an encoder classifier has no output to align. Leave --alignments out.")
    model = checkpoint.build_model()
    graphs: list[contract.GraphSpec] = []
    closest: dict[contract.Precision, Compared] = {}
    agreements: Mapping[contract.Precision, Agreement] = {}
    choices: dict[contract.Precision, Choice] = {}
    with new_bundle(directory, force=force) as folder:
        for precision in (p for p in contract.PRECISIONS.values() if p == "float32" or p in precisions):
            keep: list[str] = []
            if choosers and precision in choosers:
                choices[precision] = choosers[precision](model, precision, folder)
                keep = list(choices[precision].kept_modules)
            stored = write_variant(model, precision, folder, keep)
            written = write_graphs(config, precision, folder, keep, alignments=alignments, shortlist=shortlist)
            if gate is not None:
                largest = gate.check_graphs(model, precision, written, folder, stored=stored, keep=keep)
                if largest is not None:
                    closest[precision] = largest
            graphs += written
        for side, name in TOKENIZER_FILES.items():
            tokenizer = getattr(checkpoint.tokenizers, side)
            if tokenizer is not None:
                (folder / name).write_text(json.dumps(tokenizer.to_dict()), encoding="utf-8")
        if checkpoint.generation is not None:
            content = json.dumps(checkpoint.generation, indent=1)
            (folder / GENERATION_CONFIG).write_text(f"{content}\n", encoding="utf-8")
        budgets = {short_name(precision): choice.to_dict() for precision, choice in choices.items()}
        write_manifest(folder, config, graphs, {**facts, "budgets": budgets})
        if gate is not None:
            agreements = gate.check_bundle(folder, model)
    return Exported(directory, closest, choices, agreements, checkpoint.confirmation)


def _versions() -> dict[str, str]:
    packages = {package.__name__: package.__version__ for package in (torch, onnx, np)}
    return {"tfexport": version(), **packages, "onnxruntime": ONNX_RUNTIME}
