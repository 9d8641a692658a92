"""The embedded model ships, is small, and goes through the whole line."""

from __future__ import annotations

import subprocess
import sys

from tfexport.commands.demo import SENTENCES, embedded_checkpoint, run


def test_embedded_checkpoint_is_small_enough_to_ship() -> None:
    assert embedded_checkpoint().stat().st_size <= 8_000_000


def test_demo_exports_compares_and_translates() -> None:
    report, translations = run(lambda _: None)
    assert report.passed
    assert [german for german, _ in translations] == list(SENTENCES)
    assert dict(translations)["Ein Hund springt über einen Zaun."] == "A dog jumps over a fence."


def test_demo_command_prints_the_verdict_and_the_sentences() -> None:
    done = subprocess.run([sys.executable, "-m", "tfexport", "demo"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "PASSED" in done.stdout
    assert all(sentence in done.stdout for sentence in SENTENCES)
