"""`tfexport inspect`."""

from __future__ import annotations

from tfexport.commands.console import print_inspection, say
from tfexport.commands.flags import AsJson, Checkpoint
from tfexport.commands.help import common_options
from tfexport.commands.signature import with_options
from tfexport.models.checkpoints.options import ModelOptions
from tfexport.system.json_text import json_text


@common_options("--family --config --key --ignore --heads --src-vocab --tgt-vocab --json")
@with_options
def inspect(checkpoint: Checkpoint, described: ModelOptions, as_json: AsJson = False) -> None:
    """Print the family and sizes of a checkpoint, and what is missing to export it."""
    from tfexport.models.checkpoints.reading import inspected

    inspection = inspected(checkpoint, described, say)
    if as_json:
        about = {"path": str(inspection.path), "confirmation": inspection.confirmation.to_dict()}
        print(json_text({**vars(inspection), **about}, indent=1))
    else:
        print_inspection(inspection)
