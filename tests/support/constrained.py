"""Required phrases: the models of `tests/data/fairseq/constraints.json`, and whether an output has all phrases."""

from __future__ import annotations

import torch

from makers.paths import DATA
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.transformer import Transformer
from tfexport.search.hypothesis import Ids
from tfexport.search.options import ConstraintOrder


def model_of(name: str, end: float) -> Transformer:
    """A checkpoint of fairseq whose logits of eos are higher by `end`."""
    read = load_checkpoint(DATA / "fairseq" / f"{name}.pt", {})
    weights = read.build_model().state_dict()
    bias = torch.zeros(read.config.tgt_vocab_size)
    bias[read.config.eos_id] = end
    model = Transformer(read.config.replace(output_bias=True))
    model.load_state_dict({**weights, "output_bias": bias})
    return model.eval()


def has_all(tokens: Ids, phrases: list[Ids], order: ConstraintOrder) -> bool:
    """Whether each phrase has a place of its own in `tokens`, by trying all."""
    if not phrases:
        return True
    candidates = phrases[:1] if order == "ordered" else phrases
    for start in range(len(tokens)):
        for phrase in candidates:
            if tokens[start : start + len(phrase)] == phrase:
                rest = list(phrases)
                rest.remove(phrase)
                if has_all(tokens[start + len(phrase) :], rest, order):
                    return True
    return False
