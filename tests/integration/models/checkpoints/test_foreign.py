"""Five models that tfexport does not know, each with a family file: what `probe` says, and the tokens that come out."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from makers.tiny import randomised
from tests.support import foreign
from tests.support.module_runtime import ModuleRuntime
from tfexport.bundle.reader import open_bundle
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.checkpoints.user_family import read_family_file
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, search
from tfexport.verification.probe import probe

FOLDER = Path(foreign.__file__).parent
HEADS, LENGTH = 3, 40
TWO = {"src_vocab": 41, "tgt_vocab": 37, "d": 24, "heads": HEADS, "layers": 2}
SIZES: dict[str, dict[str, int]] = {
    "flat_list": {**TWO, "max_len": LENGTH},
    "shared_layers": {"vocab": 41, "d": 24, "heads": HEADS, "max_len": LENGTH},
    "einsum_heads": {**TWO, "max_len": LENGTH},
    "wrapped_loss": {**TWO, "max_len": LENGTH},
    "transposed": TWO,
}
SEEDS = {"flat_list": 3, "shared_layers": 1, "einsum_heads": 4, "wrapped_loss": 7, "transposed": 3}
"""Of models that say different things of different sentences."""
HINTS = {"n_heads": HEADS, "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}


def made(name: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    torch.manual_seed(0)
    model: Any = getattr(importlib.import_module(name), "".join(map(str.title, name.split("_"))))
    model = randomised(model(**SIZES[name]), seed=SEEDS[name])
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.data *= 3  # so that what it says depends on what it reads
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("name", SIZES)
def test_a_family_file_is_enough(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name, monkeypatch)
    path, family = tmp_path / "ckpt.pt", read_family_file(FOLDER / f"{name}_family.py")
    torch.save(model.state_dict(), path)
    probed = probe(path, HINTS, family=family)
    assert probed.passed, [check for check in probed.checks if check.passed is False]
    assert ("float32" in {check.name for check in probed.checks}) == (name in ("einsum_heads", "transposed"))
    checkpoint = load_checkpoint(path, HINTS, family=family)
    export(checkpoint, tmp_path / "bundle", gate=None)
    bundle = open_bundle(tmp_path / "bundle")
    random = np.random.default_rng(1)
    sources = [random.integers(3, 37, length).tolist() for length in random.integers(2, 30, 100)]
    own = ModuleRuntime(model, bundle.config, pad_id=0)
    for beam in (1, 3):
        options = SearchOptions(beam=beam, max_length=12)
        wanted, found = (search(runtime, sources, options) for runtime in (own, load_runtime("ort-cpu", bundle)))
        assert [h[0].ids for h in found] == [h[0].ids for h in wanted]
        assert len({h[0].ids for h in wanted}) > 12
