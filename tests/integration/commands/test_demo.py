"""The embedded model goes through the whole line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tfexport.commands.demo import SENTENCES


@pytest.mark.thorough
def test_demo_prints_the_verdict_and_the_sentences() -> None:
    done = subprocess.run([sys.executable, "-m", "tfexport", "demo"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "PASSED" in done.stdout
    assert "A dog jumps over a fence." in done.stdout
    assert all(sentence in done.stdout for sentence in SENTENCES)
