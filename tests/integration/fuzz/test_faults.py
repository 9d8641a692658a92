"""One planted fault of each kind: the plain verdict of parity rejects it. `fuzz/faults/planted.py` has all of them.

To add one, write its name into `FAULTS`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.faults.bases import words
from fuzz.faults.clean import clean
from fuzz.faults.gate import Prepared, certified, copied, export, parity
from fuzz.faults.graphs import planted_into
from fuzz.faults.planted import every_fault
from tfexport.bundle.reader import open_bundle

PRECISIONS = ("fp32", "fp16", "int4")
FAULTS = [
    "weights source rows",
    "weights matrix 1.002",
    "weights fp16 truncated",
    "greedy_step.ort best.ids + 1",
    "decoder_step.fp16 mask off by one",
    "beam_step.ort definition: slot",
    "beam_step_attention.ort layers",
    "shortlist.ort off by one",
    "greedy_step.ort banned ignored",
    "manifest eos_id (words)",
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A small trained model and its clean bundle, which parity passes. Not to be changed."""
    folder = tmp_path_factory.mktemp("faults")
    base = words(folder, steps=250)
    export(base, folder / "bundle", PRECISIONS, "--alignments", "--shortlist")
    return Prepared(base, folder / "bundle")


@pytest.mark.thorough
def test_the_clean_bundle_passes_and_is_certified(prepared: Prepared, tmp_path: Path) -> None:
    folder = copied(prepared.bundle, tmp_path / "bundle")
    answer = parity(prepared.base, folder)
    assert answer.passed, answer.output
    assert all(certified(folder, precision) for precision in PRECISIONS)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_rejected(prepared: Prepared, tmp_path: Path, name: str) -> None:
    (fault,) = (fault for fault in every_fault() if fault.name == name)
    folder = copied(prepared.bundle, tmp_path / "bundle")
    planted_into(folder, fault)
    open_bundle(folder)  # the sums are right
    answer = parity(prepared.base, folder, "--precision", fault.precision)
    assert answer.code in (1, 2), answer.output
    assert not certified(folder, fault.precision)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["deep", "torch shared"])
def test_rounding_that_removes_a_hypothesis_from_the_beam_is_no_fault(tmp_path: Path, name: str) -> None:
    """In 4 and 8 bits, the search loses the hypothesis that ends at once: its output is far worse by its score."""
    (entry,) = (entry for entry in clean() if entry.name == name)
    base = entry.make(tmp_path)
    export(base, tmp_path / "bundle", entry.precisions)
    answer = parity(base, tmp_path / "bundle")
    assert answer.passed, answer.output
