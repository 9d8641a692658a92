"""`tfexport demo`: the embedded German-English model, from checkpoint to translations in one go."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tfexport.commands.console import print_parity, say, working

if TYPE_CHECKING:
    from tfexport.verification.report import ParityReport

SENTENCES = (
    "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt.",
    "Zwei Kinder spielen am Strand mit einem roten Ball.",
    "Eine Frau in einem blauen Kleid liest ein Buch im Park.",
    "Ein Hund springt über einen Zaun.",
    "Drei Männer reparieren das Dach eines Hauses.",
)


def demo(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Keep the bundle in this folder.")
    ] = None,
) -> None:
    """Export the embedded German-English model, check its parity and decode a few sentences."""
    with working("exporting, comparing and decoding"), tempfile.TemporaryDirectory() as folder:
        report, translations = run(say, output or Path(folder) / "de-en")
    print_parity(report)
    for german, english in translations:
        print(f"  {german}\n    {english}")
    if not report.passed:
        raise typer.Exit(1)


def embedded_checkpoint() -> Path:
    """The path of the checkpoint that ships with the package (Multi30k, German to English)."""
    with as_file(files("tfexport") / "assets" / "de-en.safetensors") as path:
        return path


def run(say: Callable[[str], None], directory: Path) -> tuple[ParityReport, list[tuple[str, str]]]:
    """Export to the bundle `directory`, compare ONNX Runtime with PyTorch, decode `SENTENCES` with beam 4.

    Returns the comparison and (German, English) pairs.
    """
    from tfexport.api.model import load
    from tfexport.exporter.pipeline import export
    from tfexport.models.checkpoints.load import load_checkpoint
    from tfexport.verification.parity import check

    say("exporting the embedded German-English checkpoint")
    exported = export(load_checkpoint(embedded_checkpoint(), {}), directory, alignments=True)
    closest = exported.closest["float32"]
    say(f"exported; {closest.about} is off by {closest.error:.1e}, and rounding explains {closest.allowed:.1e}")
    lines = [sentence.encode() for sentence in SENTENCES]
    (report,) = check(directory, lines, ["ort-cpu"], say=say).reports
    translations = load(directory).translate(SENTENCES, beam=4)
    return report, [(german, output.text) for german, output in zip(SENTENCES, translations, strict=True)]
