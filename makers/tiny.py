"""One tiny random model of the tutorial's kind, with words: the fixtures in conftest.py export it once for all tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from makers.references.tutorial import TutorialClassifier, TutorialTransformer
from tfexport.models.checkpoints.load import Checkpoint, load_checkpoint
from tfexport.models.formats.native import Tokenizers
from tfexport.text.vocabularies import read_vocabulary

SRC_VOCAB, TGT_VOCAB, HEADS, MAX_LENGTH = 31, 37, 3, 20
UNK, PAD, BOS, EOS = range(4)
ENCODER = {"d_model": 24, "n_heads": HEADS, "d_ffn": 40, "n_encoder_layers": 2, "max_len": MAX_LENGTH, "pad_id": PAD}
"""No two sizes alike where that is possible, so that swapped axes do not fit."""
IDS = {"unk_id": UNK, "pad_id": PAD, "bos_id": BOS, "eos_id": EOS}
HINTS = {"n_heads": HEADS, **IDS}
SPECIALS = ["<unk>", "<pad>", "<sos>", "<eos>"]


@dataclass(frozen=True)
class TinyCheckpoint:
    """A state_dict file, the naive model in it, and the words of both sides."""

    path: Path
    src_vocab: Path
    tgt_vocab: Path
    model: TutorialTransformer

    def tokenizers(self) -> Tokenizers:
        return Tokenizers(read_vocabulary(self.src_vocab), read_vocabulary(self.tgt_vocab))

    def load(self) -> Checkpoint:
        """Read with its words, which tell the special ids."""
        return load_checkpoint(self.path, {"n_heads": HEADS}, tokenizers=self.tokenizers())

    @property
    def flags(self) -> list[str]:
        """What `tfexport export` needs to be told besides the file."""
        return ["--heads", str(HEADS), "--src-vocab", str(self.src_vocab), "--tgt-vocab", str(self.tgt_vocab)]


def randomised(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Random norms and biases too: with ones and zeros a swapped pair would go unseen."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.requires_grad:
            is_matrix, is_scale = parameter.dim() > 1, bool((parameter == 1).all())
            parameter.data = noise * parameter.shape[1] ** -0.5 if is_matrix else is_scale + 0.3 * noise
    return model.eval()


def tiny_transformer(*, seed: int = 23, tgt_vocab: int = TGT_VOCAB) -> TutorialTransformer:
    """The default seed gives a model that ends some sentences and runs on to its limit in others."""
    model = TutorialTransformer(src_vocab=SRC_VOCAB, tgt_vocab=tgt_vocab, n_decoder_layers=1, **ENCODER)
    randomised(model, seed=seed)
    with torch.no_grad():
        model.decoder.fc_out.bias[[UNK, PAD, BOS]] = -20.0  # a trained model does not emit them
    return model


def tiny_classifier() -> TutorialClassifier:
    model = TutorialClassifier(src_vocab=SRC_VOCAB, n_classes=5, **ENCODER)
    randomised(model)
    return model


def write_tiny_checkpoint(folder: Path) -> TinyCheckpoint:
    words = {}
    for side, stem, size in (("src", "de", SRC_VOCAB), ("tgt", "wört", TGT_VOCAB)):
        words[side] = folder / f"{side}.json"
        entries = SPECIALS + [f"{stem}{index}" for index in range(len(SPECIALS), size)]
        words[side].write_text(json.dumps(entries), encoding="utf-8")
    model = tiny_transformer()
    path = folder / "tiny.pt"
    torch.save(model.state_dict(), path)
    return TinyCheckpoint(path, words["src"], words["tgt"], model)


def overflowing(model: nn.Module, path: str) -> None:
    """Let hidden states of a feed-forward be beyond float16, and what it gives be as it was."""
    feed_forward = model.get_submodule(path)
    with torch.no_grad():
        feed_forward.hidden.weight *= 5e4
        feed_forward.hidden.bias *= 5e4
        feed_forward.output.weight /= 5e4
