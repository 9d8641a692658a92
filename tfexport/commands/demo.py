"""The embedded German-English model, from checkpoint to translations in one go."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

from tfexport.bundle.reader import open_bundle
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.search import SearchOptions
from tfexport.decoding.translate import Writer, translate
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.runtimes import load_runtime
from tfexport.verification.parity import check
from tfexport.verification.report import ParityReport

SENTENCES = (
    "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt.",
    "Zwei Kinder spielen am Strand mit einem roten Ball.",
    "Eine Frau in einem blauen Kleid liest ein Buch im Park.",
    "Ein Hund springt über einen Zaun.",
    "Drei Männer reparieren das Dach eines Hauses.",
)


def embedded_checkpoint() -> Path:
    """The path of the checkpoint that ships with the package (Multi30k, German to English)."""
    with as_file(files("tfexport") / "assets" / "de-en.safetensors") as path:
        return path


def run(say: Callable[[str], None]) -> tuple[ParityReport, list[tuple[str, str]]]:
    """Export to a temporary bundle, compare ONNX Runtime with PyTorch, decode `SENTENCES` with beam 4.

    Returns the comparison and (German, English) pairs.
    """
    lines = [sentence.encode() for sentence in SENTENCES]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "de-en"
        say("exporting the embedded German-English checkpoint")
        exported = export(load_checkpoint(embedded_checkpoint(), {}), directory)
        closest = exported.closest["float32"]
        say(f"exported; {closest.about} is off by {closest.error:.1e}, and rounding explains {closest.allowed:.1e}")
        (report,) = check(directory, lines, ["ort-cpu"], say=say).reports
        bundle = open_bundle(directory)
        reader, writer = Reader.of(bundle, "text"), Writer.of(bundle, "text")
        results = translate(load_runtime("ort-cpu", bundle), reader, lines, SearchOptions(beam=4))
        return report, [(SENTENCES[result.line - 1], writer.line(result)) for result in results]
