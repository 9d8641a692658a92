"""`tfexport triton`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tfexport.commands.console import print_repository
from tfexport.commands.flags import BatchSize, BundleDir, MaxLength, PrecisionOption, ServedBeam, ServedBy
from tfexport.contract import precisions_of


def triton(
    directory: BundleDir,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Repository folder; by default DIR.triton.")
    ] = None,
    runtime: ServedBy = "ort-cpu",
    precision: PrecisionOption = None,
    beam: ServedBeam = 1,
    max_length: MaxLength = 256,
    batch_size: BatchSize = 32,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing repository.")] = False,
) -> None:
    """Write a bundle as a model repository of Triton Inference Server. PyTorch is not needed.

    The default precision is fp32, or with --runtime tensorrt that of the bundle's engines.
    """
    from tfexport.bundle.reader import open_bundle
    from tfexport.serving.triton import beside, served_precision, write_repository

    bundle = open_bundle(directory)
    served = precisions_of(precision)[0] if precision else served_precision(bundle, runtime)
    written = write_repository(
        bundle,
        output or beside(directory),
        runtime=runtime,
        precision=served,
        beam=beam,
        max_length=max_length,
        batch_size=batch_size,
        force=force,
    )
    print_repository(written, served)
    print(f"next: tritonserver --model-repository={written.directory}")
