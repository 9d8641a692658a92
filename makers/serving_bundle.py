"""A small random model whose rows join and leave batches, as a bundle."""

from __future__ import annotations

from pathlib import Path

import torch

from makers.ort_bundles import random_model
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.config import ModelConfig
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats import native
from tfexport.models.transformer import Transformer
from tfexport.text.tokenizers import TextTokenizer, word_tokenizer

CONFIG = ModelConfig(
    d_model=64,
    n_heads=2,
    d_ff=96,
    n_encoder_layers=2,
    n_decoder_layers=2,
    src_vocab_size=50,
    tgt_vocab_size=60,
    max_source_length=40,
    max_target_length=60,
    unk_id=0,
    pad_id=1,
    bos_id=2,
    eos_id=3,
    output_bias=True,
)
"""With heads that kernels take: where ONNX Runtime multiplies a row alone, it has other last bits than in a batch."""


def small_model() -> Transformer:
    """Outputs end at many lengths."""
    model = random_model(CONFIG, seed=5)
    assert model.output_bias is not None
    with torch.no_grad():
        model.output_bias[CONFIG.eos_id] += 1.5
    return model.eval()


def words(stem: str, size: int) -> TextTokenizer:
    """A vocabulary of words such as `w4`, with the special tokens of `CONFIG`."""
    specials = ["<unk>", "<pad>", "<s>", "</s>"]
    entries = [*specials, *(f"{stem}{index}" for index in range(len(specials), size))]
    return word_tokenizer({word: index for index, word in enumerate(entries)})


def write_bundle(folder: Path, *, with_words: bool = False) -> Bundle:
    """A bundle of `small_model` in float32 and int8, with graphs that tell attention."""
    path, tokenizers = folder / "model.safetensors", native.Tokenizers(None, None)
    if with_words:
        tokenizers = native.Tokenizers(words("s", CONFIG.src_vocab_size), words("t", CONFIG.tgt_vocab_size))
    native.save(path, small_model().state_dict(), CONFIG, tokenizers, torch.float32)
    checkpoint = load_checkpoint(path, {}, tokenizers=tokenizers) if with_words else load_checkpoint(path, {})
    export(checkpoint, folder / "bundle", precisions=("int8",), alignments=True, gate=None)
    return open_bundle(folder / "bundle")
