"""`tfexport probe`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tfexport.commands.console import print_probe, say, working
from tfexport.commands.flags import AsJson, Checkpoint
from tfexport.commands.help import common_options
from tfexport.commands.signature import with_options
from tfexport.models.checkpoints.options import CheckpointOptions
from tfexport.system.input_files import opened
from tfexport.system.json_text import json_text

if TYPE_CHECKING:
    from tfexport.models.checkpoints.load import Checkpoint as LoadedCheckpoint
    from tfexport.models.checkpoints.recognise import Chosen
    from tfexport.verification.probe_self import Check


@common_options("--family --heads --src-vocab --tgt-vocab --key --ignore --expect --input --tolerance --json")
@with_options
def probe(
    checkpoint: Checkpoint,
    described: CheckpointOptions,
    source: Annotated[
        Path | None, typer.Option("--input", metavar="FILE", help="Sentences to compare on; by default random ids.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="N", min=0.0, help="Largest relative difference from your own module that passes."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a checkpoint in PyTorch before an export; exit code 1 if a check fails.

    A family file with a function `reference` has the module that the weights were trained in. The command compares it layer
    by layer, and names the first layer that differs.
    """
    from tfexport.models.checkpoints.reading import chosen_family, read_vocabularies, with_codes
    from tfexport.models.toolkits.toolkit import TextOptions
    from tfexport.verification.probe import MOST_SENTENCES
    from tfexport.verification.probe import probe as run_probe

    def sources_of(loaded: LoadedCheckpoint) -> list[list[int]]:
        from tfexport.decoding.line_reader import Reader, read_pairs

        assert source is not None
        tokenizer = with_codes(loaded.tokenizers, described).source
        with opened(source) as lines:
            sentences, _ = read_pairs(
                lines, None, Reader(loaded.config, tokenizer, "text" if tokenizer else "ids"), say
            )
        if len(sentences) > MOST_SENTENCES:
            say(f"note: compared on the first {MOST_SENTENCES} of {len(sentences)} sentences")
        return sentences[:MOST_SENTENCES]

    family = chosen_family(described)
    hints, expected = _hints(checkpoint, described, family)
    with working(f"probing {checkpoint}"):
        result = run_probe(
            checkpoint,
            hints,
            tokenizers=read_vocabularies(described, hints.get("unk_id")),
            family=family,
            text=TextOptions(described.src_lang, described.tgt_lang, described.prefix),
            sources_of=sources_of if source is not None else None,
            tolerance=tolerance,
        )
    result = replace(result, checks=(*result.checks, *expected))
    if as_json:
        print(json_text(result.to_dict(), indent=1))
    else:
        print_probe(result)
    if not result.passed:
        raise typer.Exit(1)


def _hints(checkpoint: Path, described: CheckpointOptions, family: Chosen) -> tuple[dict[str, Any], list[Check]]:
    """The hints about a checkpoint, completed by its expected outputs, and the check of these."""
    from tfexport.verification.confirmed_reading import confirmed_hints
    from tfexport.verification.probe_self import Check

    if described.expect is None:
        return confirmed_hints(checkpoint, described, family, say).hints, []
    with working(f"comparing with {described.expect}"):
        confirmed = confirmed_hints(checkpoint, described, family, say)
    confirmation = confirmed.confirmation
    about = confirmation.about or f"all right, but {described.expect.name} has too few lines to confirm the settings"
    if confirmation.unconfirmed:
        about += f"; other values give the same: {', '.join(confirmation.unconfirmed)}"
    return confirmed.hints, [Check("expected outputs", True if confirmation.by else None, about)]
