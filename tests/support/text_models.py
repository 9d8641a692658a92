"""Small SentencePiece models, and checkpoints as a bundle has them, for tests of what toolkits make of text."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfexport.decoding.line_reader import Reader
from tfexport.models.checkpoints.load import Checkpoint
from tfexport.models.formats.native import Tokenizers
from tfexport.text.tokenizers import TextTokenizer
from tfexport.text.vocabularies import read_vocabulary
from tfexport.training.vocabulary import train_bpe

WORDS = (
    "the cat sat on a mat with dogs and birds while we ate bread in old towns near rivers der hund lief über die straße"
)


def write_pieces(path: Path, **options: Any) -> Any:
    """Train a small SentencePiece model; returns its processor."""
    sentencepiece = pytest.importorskip("sentencepiece")
    random = np.random.default_rng(0)
    lines = (" ".join(random.choice(WORDS.split(), 8)) for _ in range(300))
    with path.open("wb") as file:
        trainer = sentencepiece.SentencePieceTrainer
        trainer.train(sentence_iterator=lines, model_writer=file, vocab_size=45, minloglevel=2, **options)
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def read_ids(checkpoint: Checkpoint, text: str) -> list[int]:
    return Reader(checkpoint.config, checkpoint.tokenizers.source, "text").ids(text.encode())


def as_in_a_bundle(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its tokenizers written and read again."""
    sides = (checkpoint.tokenizers.source, checkpoint.tokenizers.target)
    read = [TextTokenizer.from_dict(json.loads(json.dumps(side.to_dict())), where="here") for side in sides if side]
    return replace(checkpoint, tokenizers=Tokenizers(*read))


TEXTS = ["a dog runs", "the dog sleeps , the dog sleeps", "größer als 3 Hunde", "naïve </s> text"] * 3


@cache
def trained_bpe() -> TextTokenizer:
    return train_bpe(TEXTS, vocab_size=290)


def vocabulary(folder: Path, content: object, *, name: str = "vocab.json", **options: Any) -> TextTokenizer:
    """What is read from a file of these bytes, this text, or this value as JSON."""
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8", newline="")
    return read_vocabulary(path, **options)
