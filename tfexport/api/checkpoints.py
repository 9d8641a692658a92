"""Checkpoints in Python: `tfexport.inspect`, `tfexport.export` and `tfexport.parity`.

Notes that the command line prints go to the logger `tfexport`, as information.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tfexport.api.arguments import flag_of, names_of, path_of, tolerance_of
from tfexport.api.arguments import lines_of as sentences_of
from tfexport.bundle.writer import refuse_to_overwrite
from tfexport.contract import precisions_of
from tfexport.errors import TfexportError
from tfexport.exporter.options import BudgetOptions
from tfexport.exporter.pipeline import Exported, automatic_precisions, bundle_beside
from tfexport.exporter.pipeline import export as run_export
from tfexport.models.checkpoints.load import Inspection
from tfexport.models.checkpoints.options import ExportedCheckpointOptions, ModelOptions, ReferenceOptions
from tfexport.models.checkpoints.reading import family_or_module, hints_of, inspected, open_module, read_with_text
from tfexport.option import checked, declared
from tfexport.system.input_files import lines_of
from tfexport.verification.budget import choosers_of
from tfexport.verification.confirmed_reading import confirm_by_outputs, open_confirmed
from tfexport.verification.gate import DecodingGate
from tfexport.verification.options import CompareOptions
from tfexport.verification.parity import Comparison, Reference, check

_note = logging.getLogger("tfexport").info


def inspect(checkpoint: str | Path, **described: Any) -> Inspection:
    """Describe a checkpoint: its family, its sizes, and the settings that an export still needs.

    Args:
        checkpoint: a state_dict (`.pt`, `.pth`, `.ckpt`, `.safetensors`), or a toolkit's file or folder.
        described: options of `tfexport inspect`, such as `heads=8, norm_first=True`.

    Raises:
        CheckpointError: the file cannot be read, or its family is unknown.
        TfexportError: an option does not exist.
    """
    path, options = path_of("checkpoint", checkpoint), ModelOptions(**checked(ModelOptions, described))
    return inspected(path, options, _note)


def export(
    checkpoint: str | Path | nn.Module,
    directory: str | Path | None = None,
    *,
    call: Callable[..., Tensor] | None = None,
    precision: str | Sequence[str] = "fp32",
    alignments: bool = False,
    shortlist: bool = False,
    parity: bool = True,
    tolerance: float | None = None,
    force: bool = False,
    **described: Any,
) -> Exported:
    """Export a checkpoint to a bundle: ONNX graphs, weights, tokenizers and a manifest, checked against PyTorch.

    Args:
        checkpoint: see `inspect`; or a trained module, which is copied, read and compared in float64.
        directory: the bundle; by default next to the checkpoint, with its name. A module needs one.
        call: for a module with an unusual forward: `call(model, src, tgt)`, which returns logits [batch, tgt, vocab] for
            int64 ids [batch, src] and [batch, tgt], padded with `pad`.
        precision: fp32, fp16, bf16, int8, int4, or several, as in `fp32,int8`; `auto-int8` keeps modules in float32 as a
            budget requires (options `budget`, `budget_input`, `budget_targets`).
        alignments: add graphs that return cross-attention.
        shortlist: add graphs that compute only the logits of a shortlist.
        parity: compare every value and the decoding of a few sentences with PyTorch, and export nothing if they differ.
        tolerance: the largest absolute difference that `parity` accepts; by default derived from rounding.
        force: replace an existing bundle.
        described: options of `tfexport export` that describe the checkpoint or a budget, such as
            `heads=8, src_vocab="de.json"`, or that give outputs of your own program, `expect="out.tsv"`.

    Raises:
        CheckpointError: the file cannot be read, its family is unknown, or its weights do not match its config.
        ConfigError: a setting that the file lacks was not given, or a given setting contradicts the file.
        BundleError: the bundle exists already or cannot be written.
        TfexportError: the results of the graphs differ from PyTorch's, or an option cannot be used.
    """
    if isinstance(checkpoint, nn.Module) and directory is None:
        raise TfexportError("a module has no place. Give the folder of the bundle: export(model, 'DIR', ...).")
    if call is not None and not isinstance(checkpoint, nn.Module):
        raise TfexportError("call is for a live module. A file that module names has its own function `call`.")
    place = bundle_beside(path_of("checkpoint", checkpoint)) if directory is None else path_of("directory", directory)
    graphs = {"alignments": flag_of("alignments", alignments), "shortlist": flag_of("shortlist", shortlist)}
    parity, force = flag_of("parity", parity), flag_of("force", force)
    tolerance = tolerance_of(tolerance)
    names, automatic = automatic_precisions(",".join(names_of("precision", precision, "Give a string such as int8.")))
    of_budget = {name: described.pop(name) for name in declared(BudgetOptions) if name in described}
    options = ExportedCheckpointOptions(
        **checked(ExportedCheckpointOptions, described, others=(*declared(BudgetOptions), "precision"))
    )
    budgets = BudgetOptions(**checked(BudgetOptions, of_budget))
    if isinstance(checkpoint, nn.Module):
        loaded = confirm_by_outputs(open_module(checkpoint, call, options, _note), options, _note)
    else:
        loaded = open_confirmed(path_of("checkpoint", checkpoint), options, _note)
    refuse_to_overwrite(place.resolve(), force)  # before a budget's text is decoded
    return run_export(
        loaded,
        place,
        precisions=precisions_of(names, "precision"),
        choosers=choosers_of(loaded, automatic, budgets, _note),
        **graphs,
        force=force,
        gate=DecodingGate(tolerance) if parity else None,
    )


def parity(
    bundle: str | Path,
    texts: Iterable[str] | str | Path | None = None,
    *,
    runtimes: Sequence[str] | str = ("ort-cpu",),
    checkpoint: str | Path | None = None,
    targets: Iterable[str] | str | Path | None = None,
    **options: Any,
) -> Comparison:
    """Compare a bundle with PyTorch: every graph value by value, every weight and setting, and what its runtimes decode.

    Args:
        texts: sentences, or the path of a file with one sentence per line; by default random ids.
        runtimes: the runtimes to compare.
        checkpoint: the checkpoint to use as reference; by default the bundle's own weights are the reference.
        targets: a translation of each sentence, for BLEU and chrF.
        options: options of `tfexport parity`, for the comparison, such as `beams=(1, 4), precisions=("int8",)` or outputs of
            your own program, `expect="out.tsv"`, and for reading the checkpoint, such as `src_vocab="de.json"`.

    Raises:
        TfexportError: the bundle or the checkpoint cannot be read, no sentence can be decoded, or an option cannot be used.
    """
    directory = path_of("bundle", bundle)
    names = names_of("runtimes", runtimes, "Give the names of runtimes, as in ['ort-cpu'].")
    of_reading = {name: options.pop(name) for name in declared(ReferenceOptions) if name in options}
    checked(CompareOptions, options, others=tuple(declared(ReferenceOptions)))
    reference = None
    if checkpoint is not None:
        path, described = path_of("checkpoint", checkpoint), ReferenceOptions(**checked(ReferenceOptions, of_reading))
        text, _ = described.or_recorded(_recorded_text(directory), path)
        reference = Reference(
            path, family_or_module(described), hints_of(described, path, _note), partial(read_with_text, text=text)
        )
    with contextlib.ExitStack() as files:
        return check(
            directory,
            _lines("texts", texts, files),
            names,
            targets=_lines("targets", targets, files),
            checkpoint=reference,
            say=_note,
            **options,
        )


def _recorded_text(bundle: Path) -> dict[str, Any]:
    from tfexport.bundle.reader import open_bundle

    return dict(open_bundle(bundle).origin.text)


def _lines(name: str, texts: Iterable[str] | str | Path | None, files: contextlib.ExitStack) -> Iterable[bytes] | None:
    if texts is None:
        return None
    if isinstance(texts, str | PathLike):
        return files.enter_context(lines_of(path_of(name, texts)))
    return list(sentences_of(name, texts))
