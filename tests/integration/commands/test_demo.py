"""The embedded model goes through the whole line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tfexport
from tfexport.commands.demo import SENTENCES


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
