"""The bundles that the stages share, in the work folder: exported by the first stage that needs them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.base_model import BASE, random_checkpoint
from benchmarks.gpu_day.stage import Task, say
from benchmarks.gpu_day.state import read_json
from benchmarks.gpu_day.unpack import BUNDLE, SITE
from tfexport.bundle.reader import MANIFEST, Bundle, open_bundle
from tfexport.config import ModelConfig
from tfexport.contract import FLOATS
from tfexport.errors import TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import Checkpoint

TINY = {
    **{"d_model": 32, "n_heads": 4, "d_ff": 64, "n_encoder_layers": 2, "n_decoder_layers": 2},
    **{"src_vocab_size": 500, "tgt_vocab_size": 500, "max_source_length": 128, "max_target_length": 128},
}
"""What a rehearsal has in the place of the base model."""


def base_config(task: Task) -> ModelConfig:
    return replace(BASE, **TINY) if task.rehearsal else BASE


def base_folder(task: Task) -> Path:
    return task.work / "base"


def base_checkpoint(task: Task) -> Checkpoint:
    """The random model of the paper's base size, as a file in the work folder."""
    return random_checkpoint(base_config(task), task.work / "base.safetensors")


def base(task: Task) -> Bundle:
    """The bundle of the base model; without the checks of an export where no earlier stage has exported it."""
    folder = base_folder(task)
    if not (folder / MANIFEST).exists():
        say("exporting the base model, without checks")
        export(base_checkpoint(task), folder, precisions=list(FLOATS.values()), gate=None)
    return open_bundle(folder)


def embedded(task: Task) -> tuple[Bundle, str]:
    """The bundle of the embedded model, and where it comes from: an export here, or the pack where that fails."""
    from benchmarks.gpu.runtimes import export_embedded

    folder, packed = task.work / "embedded", SITE / BUNDLE
    try:
        return open_bundle(export_embedded(folder, "cpu")), "exported here"
    except Exception as error:
        if not read_json(packed / MANIFEST):
            raise
        say(f"note: the export failed, so the bundle of the pack is used: {type(error).__name__}: {error}")
        try:
            return open_bundle(packed), f"from the pack: the export failed here: {error}"
        except TfexportError:
            raise error from None
