"""Settings that are changed in a model in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tfexport.config import ModelConfig
from tfexport.models.model import build_model, change_settings
from tfexport.models.transformer import Transformer

CONFIG = ModelConfig(
    d_model=12, n_heads=2, n_encoder_heads=3, d_ff=8, n_encoder_layers=1, n_decoder_layers=1, src_vocab_size=9,
    tgt_vocab_size=9, max_source_length=9, max_target_length=9, unk_id=0, pad_id=1, bos_id=2, eos_id=3,
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_first": not CONFIG.norm_first},
        {"activation": "silu"},
        {"embedding_scale": 2.0},
        {"n_heads": 4},
        {"n_encoder_heads": 1},
        {"n_heads": 6, "n_encoder_heads": 0},
        {"norm_eps": 1e-3},
    ],
)
def test_a_changed_model_is_the_built_one(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Transformer(CONFIG).eval()
    source, length, target = torch.tensor([[4, 5, 6, 7]]), torch.tensor([4]), torch.tensor([[2, 8, 4]])
    before = model(source, length, target)
    config = CONFIG.replace(**changes)
    change_settings(model, config)
    after = model(source, length, target)
    assert model.config == config
    assert torch.equal(after, build_model(config, model.state_dict())(source, length, target))
    assert not torch.equal(after, before)
