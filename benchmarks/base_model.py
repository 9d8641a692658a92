"""A random model of the base size of "Attention Is All You Need" (table 3), for where weights do not matter."""

from __future__ import annotations

from pathlib import Path

import torch

from tfexport.config import ModelConfig
from tfexport.models.checkpoints.load import Checkpoint, load_checkpoint
from tfexport.models.formats import native
from tfexport.models.transformer import Transformer

BASE = ModelConfig(
    d_model=512,
    n_heads=8,
    d_ff=2048,
    n_encoder_layers=6,
    n_decoder_layers=6,
    src_vocab_size=8000,
    tgt_vocab_size=8000,
    max_source_length=512,
    max_target_length=512,
    unk_id=0,
    pad_id=1,
    bos_id=2,
    eos_id=3,
    embedding_scale=512**0.5,
)


def random_checkpoint(config: ModelConfig, path: Path) -> Checkpoint:
    """A model of this config with the same random weights every time, written to `path`."""
    torch.manual_seed(0)
    native.save(path, Transformer(config).state_dict(), config, native.Tokenizers(None, None), torch.float32)
    return load_checkpoint(path, {})
