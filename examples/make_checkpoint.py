"""Stands for your training: a small checkpoint of `my_model.py` with random weights, `ckpt.pt`, and its vocabularies."""

import json
from pathlib import Path

import torch
from my_model import MyModel

torch.manual_seed(3)
model = MyModel(src_vocab=40, tgt_vocab=36, d=32, heads=4, layers=2, max_len=30)
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.3)  # so that what it says depends on what it reads
    else:
        parameter.data += 0.2 * torch.randn_like(parameter)  # norms and biases that no training has left at 1 and 0
torch.save(model.state_dict(), "ckpt.pt")
for side, stem, size in (("src", "wort", 40), ("tgt", "word", 36)):
    words = ["<pad>", "<sos>", "<eos>", "<unk>", *(f"{stem}{number}" for number in range(4, size))]
    Path(f"{side}_vocab.json").write_text(json.dumps(words))
