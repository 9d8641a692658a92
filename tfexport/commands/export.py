"""`tfexport export`: parse, load, export, write."""

from __future__ import annotations

import gc
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tfexport.commands.console import print_export, say, working
from tfexport.commands.flags import Checkpoint, ServedBeam, ServedBy
from tfexport.commands.help import common_options
from tfexport.commands.signature import with_options
from tfexport.contract import precisions_of
from tfexport.exporter.options import BudgetOptions, EngineOptions, GraphOptions
from tfexport.models.checkpoints.options import ExportedCheckpointOptions, IdOptions, TextSettings
from tfexport.option import flags

if TYPE_CHECKING:
    from tfexport.commands.export_targets import GraphsTarget
    from tfexport.contract import Precision
    from tfexport.exporter.pipeline import Exported
    from tfexport.models.checkpoints.load import Checkpoint as LoadedCheckpoint

Target = Literal["onnx", "tensorrt", "triton"]


@common_options("-o --heads --src-vocab --tgt-vocab --module --family --expect --precision --target --force")
@with_options
def export(
    checkpoint: Checkpoint,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Bundle folder; by default the name of CKPT.")
    ] = None,
    *,
    described: ExportedCheckpointOptions,
    graphs: GraphOptions,
    budgets: BudgetOptions,
    target: Annotated[
        Target,
        typer.Option(help="tensorrt: also build engines; triton: also write a model repository, DIR.triton."),
    ] = "onnx",
    engines: EngineOptions,
    runtime: ServedBy = "ort-cpu",
    beam: ServedBeam = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.")] = False,
) -> None:
    """Export a checkpoint to a bundle: ONNX graphs, weights, tokenizers and a manifest, checked against PyTorch."""
    from tfexport.commands.export_targets import telling_of_lost_engines

    flags = Flags(checkpoint, output, described, graphs, budgets, target, engines, runtime, beam, force)
    loaded = flags.load()
    directory, wanted = flags.directory, flags.wanted()
    wanted.check(loaded.config)
    with telling_of_lost_engines(directory):
        print_export(loaded, flags.run(loaded))
        wanted.write(directory)
    if not loaded.confirmation.by and not loaded.config.is_classifier:  # neither option reads a classifier
        print(f"  confirm it with your own code: {flags.with_module()}")
        print("  or with the outputs of your own program: add --expect FILE to this command")
    if loaded.config.is_classifier:
        print(f"next: tfexport classify {directory} INPUT")
    else:
        print(f"next: tfexport parity {directory} INPUT; tfexport decode {directory} INPUT")


@dataclass(frozen=True)
class Flags:
    """The flags of `export`."""

    checkpoint: Path
    output: Path | None
    described: ExportedCheckpointOptions
    graphs: GraphOptions
    budgets: BudgetOptions
    target: Target
    engines: EngineOptions
    runtime: str
    """The runtime of the Triton server."""
    beam: int
    force: bool

    @property
    def directory(self) -> Path:
        """The bundle."""
        from tfexport.exporter.pipeline import bundle_beside

        directory = self.output or bundle_beside(self.checkpoint)
        if directory == self.checkpoint:
            return self.checkpoint.with_name(f"{self.checkpoint.name}.bundle")
        return directory

    @property
    def precisions(self) -> tuple[tuple[Precision, ...], tuple[Precision, ...]]:
        """All precisions, and the precisions with a budget."""
        from tfexport.exporter.pipeline import automatic_precisions

        default = "fp16" if self.target == "tensorrt" else "fp32"
        names, automatic = automatic_precisions(self.graphs.precision or default)
        return precisions_of(names), automatic

    def with_module(self) -> str:
        """The command that exports the checkpoint again, read from the user's own code."""
        checkpoint, directory = (shlex.quote(str(path)) for path in (self.checkpoint, self.directory))
        options = " ".join(["--module my_code.py:build", *flags(self.described, TextSettings, IdOptions)])
        return f"tfexport export {checkpoint} {options} -o {directory} --force"

    def load(self) -> LoadedCheckpoint:
        """Read the checkpoint, and the expected outputs if there are any."""
        if self.described.expect is None:
            from tfexport.models.checkpoints.reading import open_checkpoint

            return open_checkpoint(self.checkpoint, self.described, say)
        from tfexport.verification.confirmed_reading import open_confirmed

        with working(f"comparing with {self.described.expect}"):
            return open_confirmed(self.checkpoint, self.described, say)

    def wanted(self) -> GraphsTarget:
        """The files to write beyond the graphs."""
        from tfexport.commands.export_targets import GraphsTarget, TritonTarget, engines_target

        precisions, _ = self.precisions
        if self.target == "tensorrt":
            return engines_target(precisions, self.engines)
        if self.target == "triton":
            return TritonTarget(precisions, self.directory, self.runtime, self.beam, self.force)
        return GraphsTarget(precisions)

    def run(self, loaded: LoadedCheckpoint) -> Exported:
        """Write the bundle, checked against PyTorch."""
        from tfexport.bundle.writer import refuse_to_overwrite
        from tfexport.exporter.pipeline import export as run_export
        from tfexport.verification.budget import choosers_of
        from tfexport.verification.gate import DecodingGate

        gc.freeze()  # PyTorch's modules: to visit them in each collection takes time, and so would one now
        refuse_to_overwrite(self.directory.resolve(), self.force)  # before a budget's text is decoded
        precisions, automatic = self.precisions
        choosers = choosers_of(loaded, automatic, self.budgets, say)
        with working(f"exporting {self.checkpoint}"):
            return run_export(
                loaded,
                self.directory,
                precisions=precisions,
                choosers=choosers,
                alignments=self.graphs.alignments,
                shortlist=self.graphs.shortlist,
                force=self.force,
                gate=DecodingGate(self.graphs.tolerance) if self.graphs.parity else None,
            )
