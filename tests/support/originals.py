"""What a toolkit computed and generated itself, saved beside a checkpoint of its own making, against what is read from it.

`tests/data/*/make.py` has written both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from makers.paths import DATA
from tfexport.bundle.reader import open_bundle
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import Checkpoint
from tfexport.models.transformer import Transformer
from tfexport.runtimes import load_runtime
from tfexport.search.profiles import ProfileName
from tfexport.search.search import SearchOptions, search


def expected(toolkit: str) -> dict[str, Any]:
    """By name of a checkpoint: sources, targets, logits, and what searches found."""
    return json.loads((DATA / toolkit / "expected.json").read_text(encoding="utf-8"))


def assert_same_logits(checkpoint: Checkpoint, wanted: dict[str, Any]) -> None:
    """The toolkit's logits, within 1e-4."""
    model = checkpoint.build_model()
    assert isinstance(model, Transformer)
    for source, target, theirs in zip(wanted["sources"], wanted["targets"], wanted["logits"], strict=False):
        with torch.no_grad():
            ours = model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([target]))[0]
        assert (ours - torch.tensor(theirs)).abs().max() < 1e-4
        assert ours.std() > 0.1


def assert_same_searches(
    checkpoint: Checkpoint, wanted: dict[str, Any], bundle: Path, profile: ProfileName, max_length: int
) -> None:
    """The toolkit's own hypotheses from the exported graphs, and their scores within 1e-4."""
    export(checkpoint, bundle, gate=None)
    runtime = load_runtime("ort-cpu", open_bundle(bundle))
    for found in wanted["found"]:
        theirs = found["hypotheses"]
        options = SearchOptions.for_profile(
            profile,
            beam=found["beam"],
            nbest=found.get("nbest", len(theirs[0])),
            length_penalty=found["penalty"],
            max_length=max_length,
        )
        ours = search(runtime, wanted["sources"][: len(theirs)], options)
        assert [[list(one.ids) for one in hypotheses] for hypotheses in ours] == [
            [tokens for tokens, _ in hypotheses] for hypotheses in theirs
        ]
        for one, other in zip(ours, theirs, strict=True):
            for hypothesis, (_, score) in zip(one, other, strict=True):
                assert abs(hypothesis.score - score) < 1e-4
    greedy = [tokens for ((tokens, _),) in wanted["found"][0]["hypotheses"]]
    assert len(set(map(tuple, greedy))) > 40  # it does not say the same to all
    assert 0 < sum(len(tokens) < max_length for tokens in greedy) < len(greedy)  # and ends some
