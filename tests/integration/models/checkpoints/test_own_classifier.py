"""The example's family file of an encoder classifier: its bundle gives the classes of the module that its text shows."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from makers.paths import ROOT
from makers.tiny import randomised
from tfexport.errors import TfexportError
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.checkpoints.user_family import read_family_file

FILE = ROOT / "examples" / "my_classifier_family.py"
PAD = 1


def made(tmp_path: Path) -> nn.Module:
    """The module in the docstring of the example."""
    text = FILE.read_text(encoding="utf-8").split('"""')[1].partition("\n    class")[2].partition('"""')[0]
    code = tmp_path / "my_classifier.py"
    code.write_text(f"import torch\nfrom torch import nn\n\nPAD = {PAD}\n\n\n{textwrap.dedent('    class' + text)}")
    spec = importlib.util.spec_from_file_location("my_classifier", code)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return randomised(module.MyClassifier(vocab=29, classes=5))


@pytest.mark.filterwarnings("ignore:.*nested tensor")
def test_the_example_computes_the_classes_of_its_module(tmp_path: Path) -> None:
    model = made(tmp_path)
    torch.save(model.state_dict(), tmp_path / "ckpt.pt")
    hints = {"n_heads": 4, "pad_id": PAD, "bos_id": 2}
    loaded = load_checkpoint(tmp_path / "ckpt.pt", hints, family=read_family_file(FILE))
    src, lengths = torch.tensor([[2, 5, 6, 7], [2, 9, PAD, PAD]]), torch.tensor([4, 2])
    with torch.no_grad():
        assert torch.allclose(loaded.build_model()(src, lengths), model(src), atol=1e-5)


def test_the_error_for_an_encoder_alone_names_this_way(tmp_path: Path) -> None:
    torch.save(made(tmp_path).state_dict(), tmp_path / "ckpt.pt")
    with pytest.raises(TfexportError, match=r"family file of your own that says n_classes, --family my_family\.py"):
        load_checkpoint(tmp_path / "ckpt.pt", {})
    assert "## Encoder classifiers" in (ROOT / "docs/guides/own-model.md").read_text(encoding="utf-8")
