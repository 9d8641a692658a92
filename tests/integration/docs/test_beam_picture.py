"""The worked beam of docs/how-it-works/beam.svg is what the search computes."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import tfexport
from makers.paths import ROOT
from tfexport.commands.demo import embedded_checkpoint
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.runtimes.outputs import Best, Continuations
from tfexport.search import beam


def test_the_worked_beam_is_what_the_search_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[str]] = []
    rank = beam.rank_continuations

    def recording(log_probs: np.ndarray, best: Best, count: int) -> Continuations:
        continuations = rank(log_probs, best, count)
        steps.append([f"{total:.2f}" for total in continuations.log_probs.ravel()])
        return continuations

    monkeypatch.setattr(beam, "rank_continuations", recording)
    export(load_checkpoint(embedded_checkpoint(), {}), tmp_path / "bundle", gate=None)
    (result,) = tfexport.load(tmp_path / "bundle").translate(["Ein Hund läuft."], beam=2, nbest=2)
    root = ElementTree.parse(ROOT / "docs/how-it-works/beam.svg").getroot()
    texts = [(text.text or "").replace("\N{MINUS SIGN}", "-") for text in root.iter("{http://www.w3.org/2000/svg}text")]
    every = [total for step in steps for total in step]
    assert [text for text in texts if text in every] == every
    for output in result.hypotheses:
        assert output.text in texts
        formula = f"{output.log_prob:.2f} / ((5 + {len(output.ids)}) / 6)^0.6 = {output.score:.2f}"
        assert any(text.startswith(formula) for text in texts), formula
