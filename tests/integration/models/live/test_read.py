"""Models that are read from live modules: the same function, or a refusal that names the cause."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.errors import CheckpointError
from tfexport.models.live.read import Given, LiveModel, read_module
from tfexport.models.transformer import Transformer

IDS = {"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3}


class Tutorial(nn.Module):
    """The class of the translation tutorial, length first, with masks as arguments."""

    def __init__(self, **options: Any):
        super().__init__()
        self.core = nn.Transformer(16, 2, 1, 1, 24, 0.1, **options)
        self.src, self.tgt, self.out = nn.Embedding(40, 16), nn.Embedding(23, 16), nn.Linear(16, 23)
        self.register_buffer("table", torch.randn(30, 1, 16))

    def embed(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        return table(ids) * math.sqrt(16) + self.table[: len(ids)]

    def forward(self, src: Tensor, trg: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor) -> Tensor:
        states = self.core(
            self.embed(src, self.src),
            self.embed(trg, self.tgt),
            tgt_mask=tgt_mask,
            src_key_padding_mask=src_padding_mask,
            memory_key_padding_mask=src_padding_mask,
        )
        return self.out(states)


def read(module: nn.Module) -> LiveModel:
    def config(fields: Any) -> ModelConfig:
        return ModelConfig.from_dict({**fields, **IDS})

    return read_module(module, Given(pad_id=1, special_ids=frozenset(IDS.values()), vocab=23, config=config))


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}], ids=["post-norm", "pre-norm"])
def test_a_module_is_read_without_settings_and_the_model_computes_the_same(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = Tutorial(**options).eval()
    src, tgt = torch.tensor([[4, 5, 6, 7]]), torch.tensor([[2, 8, 9]])
    with torch.no_grad():
        causal = nn.Transformer.generate_square_subsequent_mask(3)
        expected = module(src.T, tgt.T, causal, src == 1).transpose(0, 1)
    live = read(module)
    assert live.proof.error < 1e-12
    assert (live.fields["norm_first"], live.fields["activation"]) == (bool(options), options.get("activation", "relu"))
    model = Transformer(ModelConfig.from_dict({**live.fields, **IDS})).eval()
    model.load_state_dict(dict(live.weights))
    with torch.no_grad():
        found = model(src, torch.tensor([4]), tgt)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_an_activation_that_the_model_lacks_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="tanh"):
        read(Tutorial(activation=torch.tanh))


def test_an_id_that_is_scaled_differently_is_refused() -> None:
    class Odd(Tutorial):
        def embed(self, ids: Tensor, table: nn.Embedding) -> Tensor:
            return super().embed(ids, table) + (ids == 30)[..., None] * 1e-3

    with pytest.raises(CheckpointError, match="id 30 of the source"):
        read(Odd())
