"""The embedded model goes through the whole line, and is decoded without PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tfexport
from makers import demo_bundle
from tfexport.bundle.reader import MANIFEST
from tfexport.commands.demo import SENTENCES, write_shipped_bundle
from tfexport.errors import BundleError

ONLY_CPU = """
import sys
sys.modules.update(dict.fromkeys(["torch", "onnx", "onnx_ir", "safetensors", "ml_dtypes"]))  # as if not installed
from tfexport.__main__ import main
main()
"""


@pytest.mark.thorough
def test_demo_prints_the_verdict_and_the_sentences_and_keeps_the_bundle(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tfexport", "demo", "-o", "de-en"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "PASSED" in done.stdout
    assert "A dog jumps over a fence." in done.stdout
    assert all(sentence in done.stdout for sentence in SENTENCES)
    model = tfexport.load(tmp_path / "de-en", threads=1)
    assert model.translate("Ein Hund läuft.", attention=True).hypotheses[0].attention is not None


def test_demo_without_pytorch_decodes_the_shipped_bundle(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ONLY_CPU, "demo", "-o", str(tmp_path / "de-en")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "A dog jumps over a fence." in done.stdout
    assert all(sentence in done.stdout for sentence in SENTENCES)
    assert "PASSED" not in done.stdout
    (hint,) = [line for line in done.stderr.splitlines() if "pip install" in line]
    assert hint == "decoding the shipped bundle; export and comparison with PyTorch need pip install 'tfexport[export]'"
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_the_shipped_bundle_is_what_the_export_writes(tmp_path: Path) -> None:
    """If this fails after a change of graphs, manifest or weights: `make demo-bundle`."""
    exported, shipped = tmp_path / "exported", tmp_path / "shipped"
    demo_bundle.exported(exported)
    write_shipped_bundle(shipped)
    assert manifest_of(shipped) == manifest_of(exported)
    names = {path.name for path in exported.iterdir()}
    assert names == {path.name for path in shipped.iterdir()}
    for name in names - {MANIFEST}:
        assert (shipped / name).read_bytes() == (exported / name).read_bytes(), name
    with pytest.raises(BundleError, match="exists"):
        write_shipped_bundle(shipped)


def manifest_of(bundle: Path) -> dict[str, Any]:
    """Without the versions of the packages that wrote it."""
    manifest: dict[str, Any] = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    return {name: entry for name, entry in manifest.items() if name != "versions"}
