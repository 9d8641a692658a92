"""`tfexport demo`: the embedded German-English model, from checkpoint to translations in one go.

Without PyTorch it decodes the bundle that the package ships in `assets/de-en`, which has every file that the export writes
except the float32 weights. These are the numbers of the checkpoint, so `write_shipped_bundle` reads them from there.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tfexport.commands.console import print_parity, say, working
from tfexport.contract import WEIGHTS_FILE
from tfexport.errors import TfexportError

if TYPE_CHECKING:
    from tfexport.verification.report import ParityReport

SENTENCES = (
    "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt.",
    "Zwei Kinder spielen am Strand mit einem roten Ball.",
    "Eine Frau in einem blauen Kleid liest ein Buch im Park.",
    "Ein Hund springt über einen Zaun.",
    "Drei Männer reparieren das Dach eines Hauses.",
)


EXPORT_PACKAGES = ("ml_dtypes", "onnx", "onnx_ir", "safetensors", "torch")
"""The modules of `tfexport[export]`."""


def demo(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Keep the bundle in this folder.")
    ] = None,
) -> None:
    """Export the embedded German-English model, check its parity and decode a few sentences.

    Without tfexport[export], decode the shipped bundle of the model.
    """
    if output is not None and output.exists():
        raise TfexportError(f"{output} exists already. Give another folder with -o, or remove it.")
    with working("exporting, comparing and decoding"), tempfile.TemporaryDirectory() as folder:
        report, translations = run(say, output or Path(folder) / "de-en")
    if report is not None:
        print_parity(report)
    for german, english in translations:
        print(f"  {german}\n    {english}")
    if report is not None and not report.passed:
        raise typer.Exit(1)


def embedded_checkpoint() -> Path:
    """The path of the checkpoint that ships with the package (Multi30k, German to English)."""
    with as_file(files("tfexport") / "assets" / "de-en.safetensors") as path:
        return path


def run(say: Callable[[str], None], directory: Path) -> tuple[ParityReport | None, list[tuple[str, str]]]:
    """Export to the bundle `directory`, compare ONNX Runtime with PyTorch, decode `SENTENCES` with beam 4.

    Returns the comparison and (German, English) pairs. Without the packages of `tfexport[export]`, writes the shipped
    bundle instead, and the comparison is None.
    """
    from tfexport.api.model import load

    report = None
    try:
        from tfexport.exporter.pipeline import export
        from tfexport.models.checkpoints.load import load_checkpoint
        from tfexport.verification.parity import check
    except ModuleNotFoundError as error:
        if error.name not in EXPORT_PACKAGES:
            raise
        say("decoding the shipped bundle; export and comparison with PyTorch need pip install 'tfexport[export]'")
        write_shipped_bundle(directory)
    else:
        say("exporting the embedded German-English checkpoint")
        exported = export(load_checkpoint(embedded_checkpoint(), {}), directory, alignments=True)
        closest = exported.closest["float32"]
        say(f"exported; {closest.about} is off by {closest.error:.1e}, and rounding explains {closest.allowed:.1e}")
        lines = [sentence.encode() for sentence in SENTENCES]
        (report,) = check(directory, lines, ["ort-cpu"], say=say).reports
    translations = load(directory).translate(SENTENCES, beam=4)
    return report, [(german, output.text) for german, output in zip(SENTENCES, translations, strict=True)]


def write_shipped_bundle(directory: Path) -> None:
    """Write the bundle that `export` makes of the embedded checkpoint to `directory`, without PyTorch.

    Raises:
        BundleError: `directory` exists already or cannot be written.
    """
    from tfexport.bundle.writer import new_bundle

    with as_file(files("tfexport") / "assets" / "de-en") as shipped, new_bundle(directory) as folder:
        shutil.copytree(shipped, folder, dirs_exist_ok=True)
        (folder / WEIGHTS_FILE).write_bytes(_in_float32(embedded_checkpoint().read_bytes()))


def _in_float32(content: bytes) -> bytes:
    """A safetensors file whose tensors are all float16, with float32 in their place."""
    import numpy as np

    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["__metadata__"] = {"format": "pt"}
    for name, tensor in header.items():
        if name != "__metadata__":
            tensor.update(dtype="F32", data_offsets=[2 * offset for offset in tensor["data_offsets"]])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + np.frombuffer(content, "<f2", offset=start).astype("<f4").tobytes()
