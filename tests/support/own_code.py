"""A user's own file with a small model, for tests of `--module`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tfexport.models.checkpoints.own_module import module_of

CODE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.core = nn.Transformer(16, 2, 1, 1, 24, batch_first=True)
        self.src, self.tgt, self.places = nn.Embedding(21, 16), nn.Embedding(19, 16), nn.Embedding(12, 16)
        self.out = nn.Linear(16, 19, bias=False)
        self.out.weight = self.tgt.weight

    def forward(self, src, tgt):
        hidden, length = src == 1, tgt.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        source, target = (e(ids) + self.places.weight[: ids.shape[1]] for e, ids in ((self.src, src), (self.tgt, tgt)))
        masks = {"tgt_mask": later, "src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
        return self.out(self.core(source, target, **masks))


def build():
    return Model()
"""
SPECIAL = {"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3}
FLAGS = ("--unk", "0", "--pad", "1", "--bos", "2", "--eos", "3")


def write(folder: Path) -> Path:
    """Write the user's file, and a checkpoint of its module."""
    (folder / "my_code.py").write_text(CODE)
    torch.manual_seed(3)
    torch.save(built(folder).state_dict(), folder / "ckpt.pt")
    return folder


def built(folder: Path) -> nn.Module:
    """A new module of the user's file."""
    return module_of(f"{folder / 'my_code.py'}:build").build()
