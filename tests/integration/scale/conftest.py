"""Bundles that the tests of corpora share. Not to be changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from makers.references.tutorial import TutorialTransformer
from makers.tiny import ENCODER, HINTS, SRC_VOCAB, TGT_VOCAB, TinyCheckpoint, randomised, tiny_classifier
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats.native import Tokenizers


@pytest.fixture(scope="session")
def worded_classifier(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The classifier with the words of the tiny model; `labels.txt` lies beside it."""
    folder = tmp_path_factory.mktemp("worded")
    torch.save(tiny_classifier().state_dict(), folder / "c.pt")
    words = Tokenizers(tiny_checkpoint.tokenizers().source, None)
    (folder / "labels.txt").write_text("a\nb\nc\nd\ne\n", encoding="utf-8")
    return export(load_checkpoint(folder / "c.pt", HINTS, tokenizers=words), folder / "b", gate=None).directory


@pytest.fixture(scope="session")
def reverse_bundle(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the other direction, with the words of `tiny_bundle`."""
    folder, words = tmp_path_factory.mktemp("reverse"), tiny_checkpoint.tokenizers()
    sizes = {"src_vocab": TGT_VOCAB, "tgt_vocab": SRC_VOCAB, "n_decoder_layers": 1}
    torch.save(randomised(TutorialTransformer(**sizes, **ENCODER), seed=5).state_dict(), folder / "r.pt")
    checkpoint = load_checkpoint(folder / "r.pt", HINTS, tokenizers=Tokenizers(words.target, words.source))
    return export(checkpoint, folder / "b", gate=None).directory
