"""The bundle of the embedded checkpoint that the package ships, for installations without PyTorch: `make demo-bundle`.

It lacks the weights in float32, which `tfexport demo` reads from the checkpoint.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from makers.paths import ROOT
from tfexport.commands.demo import embedded_checkpoint
from tfexport.contract import WEIGHTS_FILE
from tfexport.exporter.pipeline import export
from tfexport.graph_checks.gate import Gate, GraphGate
from tfexport.models.checkpoints.load import load_checkpoint

SHIPPED = ROOT / "tfexport" / "assets" / "de-en"


def exported(directory: Path, gate: Gate | None = None) -> None:
    """Export the embedded checkpoint to the bundle `directory`, as `tfexport demo` does. Without a gate, unchecked."""
    export(load_checkpoint(embedded_checkpoint(), {}), directory, alignments=True, gate=gate)


def main() -> None:
    """Replace the shipped bundle."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "de-en"
        exported(bundle, GraphGate())
        (bundle / WEIGHTS_FILE).unlink()
        shutil.rmtree(SHIPPED, ignore_errors=True)
        shutil.copytree(bundle, SHIPPED)
    print(f"{SHIPPED}: {sum(path.stat().st_size for path in SHIPPED.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
