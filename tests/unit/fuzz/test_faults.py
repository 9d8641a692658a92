"""The catalogue of planted faults is whole, and its report names what escapes."""

from __future__ import annotations

import pytest
from rich.console import Console

from fuzz.faults.planted import Outcome, every_fault, report


def test_the_catalogue_is_whole() -> None:
    """Every fault has a sentence, places to name, and a base; its name is there once."""
    faults = every_fault()
    assert len(faults) >= 75
    assert {fault.precision for fault in faults} == {"fp32", "fp16", "bf16", "int8", "int4"}
    assert {fault.dialect for fault in faults} == {
        "ort",
        "ort-cuda",
        "onnx24",
        "weights",
        "text",
        "manifest",
    }
    assert all(fault.about and all(fault.places) for fault in faults)
    assert {fault.base for fault in faults} == {"words", "screened", "sharp", "relative", "real"}


def test_what_escapes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    caught, escaped, harmless, *_ = every_fault()
    outcomes = {
        caught.name: Outcome(caught.name, True, False, True, True),
        escaped.name: Outcome(escaped.name, False, True, True, False),
    }
    assert report([caught, escaped, harmless], outcomes, Console(width=200)) == 0.5
    told = capsys.readouterr().out
    assert f"escaped {escaped.name}" in told
    assert "2 faults that can change an output: 1 rejected (50.0%)" in told
    assert "1 certified all the same" in told
