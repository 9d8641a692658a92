"""`tfexport build`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from tfexport.commands.console import print_engine, print_plan, say
from tfexport.commands.flags import BundleDir, InputFormatOption
from tfexport.commands.help import common_options
from tfexport.commands.signature import with_options
from tfexport.contract import precisions_of
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.exporter.options import EngineOptions
from tfexport.system.input_files import opened


@common_options(
    "--precision --gpu --library --max-batch --max-beam --max-source --cache --gpu-memory --plan-for --dry-run"
)
@with_options
def build(
    directory: BundleDir,
    precision: Annotated[
        str, typer.Option(metavar="P,...", help="One or more of fp32, fp16, bf16, such as fp16,bf16.")
    ] = "fp16",
    *,
    engines: EngineOptions,
    plan_for: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Choose the lengths for this source text, instead of --max-source and --cache."
        ),
    ] = None,
    input_format: InputFormatOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the estimated cost and build nothing.")] = False,
) -> None:
    """Build TensorRT engines into a bundle: on this GPU, or ahead of time for others. PyTorch is not needed."""
    from tfexport.bundle.reader import open_bundle
    from tfexport.decoding.line_reader import Reader, source_lengths
    from tfexport.exporter.engine_plan import LengthPlan

    try:
        from tfexport.exporter.engine_request import EngineRequest
    except ModuleNotFoundError as error:
        raise needs_onnx(error) from error
    if plan_for is not None and (engines.cache or engines.max_source is not None):
        raise TfexportError("--plan-for replaces --cache and --max-source. Give one of them.")
    bundle = open_bundle(directory)
    bundle.graph("decoder_step")  # raises an error for a classifier
    plan = None
    if plan_for is not None:
        with opened(plan_for) as lines:
            lengths = source_lengths(Reader.of(bundle, input_format), lines)
        plan = LengthPlan.for_lengths(lengths, max_batch=engines.max_batch, max_beam=engines.max_beam)
    request = EngineRequest.of(engines, precisions_of(precision), plan)
    if dry_run:
        with suppress(RuntimeUnavailable):  # costs can be estimated without the library
            request.check(bundle.config)
    for cost in request.costs(bundle.config, say):
        print_plan(cost)
    if not dry_run:
        request.build(directory, print_engine)
        print(f"next: tfexport decode {directory} INPUT --runtime tensorrt, on such a GPU")


def needs_onnx(error: ModuleNotFoundError) -> Exception:
    """The error to raise if the modules that build engines cannot be imported."""
    if error.name != "onnx":
        return error
    return RuntimeUnavailable(
        "building engines needs onnx, which is not installed: pip install 'tfexport[tensorrt-rtx]'."
    )
