"""`tfexport export`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from tfexport.commands.console import print_export, say, working
from tfexport.commands.flags import Checkpoint, ServedBeam, ServedBy
from tfexport.commands.signature import with_options
from tfexport.contract import precisions_of
from tfexport.exporter.options import BudgetOptions, EngineOptions, GraphOptions
from tfexport.models.checkpoints.options import CheckpointOptions


@with_options
def export(
    checkpoint: Checkpoint,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Bundle folder; by default CKPT's name.")
    ] = None,
    *,
    described: CheckpointOptions,
    graphs: GraphOptions,
    budgets: BudgetOptions,
    target: Annotated[
        Literal["onnx", "tensorrt", "triton"],
        typer.Option(help="tensorrt: with engines; triton: beside the bundle a model repository, DIR.triton."),
    ] = "onnx",
    engines: EngineOptions,
    runtime: ServedBy = "ort-cpu",
    beam: ServedBeam = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.")] = False,
) -> None:
    """Export a checkpoint to a bundle: ONNX graphs, weights, tokenizers and a manifest, checked against PyTorch."""
    from tfexport.bundle.writer import refuse_to_overwrite
    from tfexport.commands.targets import GraphsTarget, TritonTarget, engines_target, telling_of_lost_engines
    from tfexport.exporter.pipeline import automatic_precisions, bundle_beside
    from tfexport.exporter.pipeline import export as run_export
    from tfexport.models.checkpoints.reading import open_checkpoint
    from tfexport.verification.budget import choosers_of
    from tfexport.verification.parity import gate

    loaded = open_checkpoint(checkpoint, described, say)
    directory = output or bundle_beside(checkpoint)
    if directory == checkpoint:
        directory = checkpoint.with_name(f"{checkpoint.name}.bundle")
    precision, automatic = automatic_precisions(graphs.precision or ("fp16" if target == "tensorrt" else "fp32"))
    precisions = precisions_of(precision)
    wanted = GraphsTarget(precisions)
    if target == "tensorrt":
        wanted = engines_target(precisions, engines)
    elif target == "triton":
        wanted = TritonTarget(precisions, directory, runtime, beam, force)
    wanted.check(loaded.config)
    refuse_to_overwrite(directory.resolve(), force)  # before a budget's text is decoded
    choosers = choosers_of(loaded, automatic, budgets, say)
    with telling_of_lost_engines(directory):
        with working(f"exporting {checkpoint}"):
            exported = run_export(
                loaded,
                directory,
                precisions=precisions,
                choosers=choosers,
                alignments=graphs.alignments,
                shortlist=graphs.shortlist,
                force=force,
                check=graphs.parity,
                tolerance=graphs.tolerance,
                verify=partial(gate, tolerance=graphs.tolerance) if graphs.parity else None,
            )
        print_export(loaded, exported)
        wanted.write(directory)
    print(
        f"next: tfexport classify {directory} INPUT"
        if loaded.config.is_classifier
        else f"next: tfexport parity {directory} INPUT; tfexport decode {directory} INPUT"
    )
