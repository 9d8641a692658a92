"""The models of `tests/data/fairseq/constraints.json`: its checkpoints, with a liking for the end."""

from __future__ import annotations

import torch

from tests.support.paths import DATA
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.transformer import Transformer


def model_of(name: str, end: float) -> Transformer:
    """A checkpoint whose logits of eos are higher by `end`."""
    read = load_checkpoint(DATA / "fairseq" / f"{name}.pt", {})
    weights = read.build_model().state_dict()
    bias = torch.zeros(read.config.tgt_vocab_size)
    bias[read.config.eos_id] = end
    model = Transformer(read.config.replace(output_bias=True))
    model.load_state_dict({**weights, "output_bias": bias})
    return model.eval()
