"""Modules to be read live, and how a test reads one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.models.live.read import LiveModel, ReadingOptions, read_module

IDS = {"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3}


class Tutorial(nn.Module):
    """The class of the translation tutorial, length first, with masks as arguments."""

    def __init__(self, **options: Any):
        super().__init__()
        self.core = nn.Transformer(16, 2, 1, 1, 24, 0.1, **options)
        self.src, self.tgt, self.out = nn.Embedding(40, 16), nn.Embedding(23, 16), nn.Linear(16, 23)
        self.register_buffer("table", torch.randn(16, 1, 16))

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


def read(module: nn.Module, **options: Any) -> LiveModel:
    def with_ids(fields: Any) -> ModelConfig:
        return ModelConfig.from_dict({**fields, **IDS, "bos_id": bos})

    bos, special = options.pop("bos_id", IDS["bos_id"]), frozenset(IDS.values())
    return read_module(
        module, ReadingOptions(pad_id=IDS["pad_id"], bos_id=bos, special_ids=special, with_ids=with_ids, **options)
    )


def with_norms(module: nn.Module, norm: Callable[[], nn.Module]) -> nn.Module:
    """The module with another norm in place of LayerNorm."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.LayerNorm):
                setattr(part, name, norm())
    return module
