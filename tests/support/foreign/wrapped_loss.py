"""A model within the module that trains it: its loss has weights. `nn.MultiheadAttention`, post-norm, normed embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PAD = 0


class Layer(nn.Module):
    def __init__(self, d: int, heads: int, *, cross: bool):
        super().__init__()
        self.mha = nn.MultiheadAttention(d, heads, batch_first=True)
        self.cross_mha = nn.MultiheadAttention(d, heads, batch_first=True) if cross else None
        self.ff = nn.ModuleDict(
            {"up": nn.Linear(d, 2 * d), "act": nn.GELU(approximate="tanh"), "down": nn.Linear(2 * d, d)}
        )
        self.ln_a, self.ln_b, self.ln_c = nn.LayerNorm(d), nn.LayerNorm(d) if cross else None, nn.LayerNorm(d)

    def forward(self, x: Tensor, hidden: Tensor, future: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        own = None if future is not None else hidden
        x = self.ln_a(x + self.mha(x, x, x, key_padding_mask=own, attn_mask=future, need_weights=False)[0])
        if self.cross_mha is not None:
            read = self.cross_mha(x, memory, memory, key_padding_mask=hidden, need_weights=False)[0]
            x = self.ln_b(x + read)
        return self.ln_c(x + self.ff["down"](self.ff["act"](self.ff["up"](x))))


class Net(nn.Module):
    def __init__(self, *, src_vocab: int, tgt_vocab: int, d: int, heads: int, layers: int, max_len: int):
        super().__init__()
        for side, vocab in (("src", src_vocab), ("tgt", tgt_vocab)):
            self.add_module(f"{side}_tok", nn.Embedding(vocab, d))
            self.add_module(f"{side}_pos", nn.Embedding(max_len + 1, d))
            self.add_module(f"{side}_ln", nn.LayerNorm(d))
            self.add_module(
                f"{side}_layers", nn.ModuleList(Layer(d, heads, cross=side == "tgt") for _ in range(layers))
            )
        self.vocab = nn.Linear(d, tgt_vocab)

    def embed(self, ids: Tensor, side: str) -> Tensor:
        places = torch.arange(1, ids.shape[1] + 1)  # row 0 of the table is that of padding
        tokens, table, norm = (self.get_submodule(f"{side}_{name}") for name in ("tok", "pos", "ln"))
        return norm(tokens(ids) + table(places))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        hidden, future = src == PAD, torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        x, y = self.embed(src, "src"), self.embed(tgt, "tgt")
        for layer in self.src_layers:
            x = layer(x, hidden)
        for layer in self.tgt_layers:
            y = layer(y, hidden, future, x)
        return self.vocab(y)


class WrappedLoss(nn.Module):
    def __init__(self, **sizes: int):
        super().__init__()
        self.net = Net(**sizes)
        self.crit = nn.CrossEntropyLoss(weight=torch.ones(sizes["tgt_vocab"]), ignore_index=PAD)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.net(src, tgt)
