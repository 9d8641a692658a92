"""`tfexport inspect`: what a checkpoint tells, and what it does not."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from makers.tiny import (
    TinyCheckpoint,
    tiny_transformer,
)
from tests.support.commands import (
    Run,
)


def test_inspect_tells_what_is_there_and_what_is_not(run: Run, tiny_checkpoint: TinyCheckpoint) -> None:
    outcome = run("inspect", tiny_checkpoint.path)
    assert outcome.code == 0
    assert outcome.stderr == ""
    assert "family tutorial" in outcome.lines[0]
    assert f"parameters: {sum(p.numel() for p in tiny_checkpoint.model.parameters()):,}" in outcome.lines
    assert "  src_vocab_size: 31" in outcome.lines
    assert "not in the file: n_heads (give --heads N)" in outcome.lines


def test_inspect_json(run: Run, tiny_checkpoint: TinyCheckpoint) -> None:
    outcome = run("inspect", tiny_checkpoint.path, "--heads", "3", "--json")
    found = json.loads(outcome.stdout)
    assert found["path"] == str(tiny_checkpoint.path)
    assert found["family"] == "tutorial"
    assert found["fields"]["n_heads"] == 3
    assert found["missing"] == {"pad_id": "--pad N", "bos_id": "--bos N", "eos_id": "--eos N"}
    assert (found["problems"], found["notes"], found["vocabulary"]) == ([], [], False)


def test_inspect_tells_problems(run: Run, tmp_path: Path) -> None:
    weights = tiny_transformer().state_dict()
    del weights["decoder.fc_out.bias"]
    torch.save(weights, tmp_path / "part.pt")
    outcome = run("inspect", tmp_path / "part.pt")
    assert outcome.code == 0
    assert "problem: missing: decoder.fc_out.bias" in outcome.lines
