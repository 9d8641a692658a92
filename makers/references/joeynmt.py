"""Naive reference of JoeyNMT's Transformer, over a model_state by JoeyNMT's own names.

| name                                                                | shape          | what                              |
|---------------------------------------------------------------------|----------------|-----------------------------------|
| `{src,trg}_embed.lut.weight`                                        | [vocab, d]     | embeddings                        |
| `{encoder,decoder}.pe.pe`                                           | [1, length, d] | sinusoids                         |
| `encoder.layers.{i}.src_src_att.{k,v,q,output}_layer.{weight,bias}` | [d, d], [d]    | self-attention                    |
| `decoder.layers.{i}.{trg_trg,src_trg}_att...`                       | the same       | self- and cross-attention         |
| `...feed_forward.pwff_layer.{0,3}.{weight,bias}`                    | [ffn, d], ...  | the feed-forward                  |
| `encoder.layers.{i}.layer_norm`, `...feed_forward.layer_norm`       | [d]            | of the two sublayers              |
| `decoder.layers.{i}.{x,dec}_layer_norm`, `...feed_forward.layer_norm` | [d]          | of the three                      |
| `{encoder,decoder}.layer_norm`                                      | [d]            | at the end, where norms come first |
| `decoder.output_layer.weight`                                       | [vocab, d]     | the output, without a bias        |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "swish": lambda x: x * torch.sigmoid(x),
}


def sinusoids(length: int, d: int) -> Tensor:
    """[1, length, d]: even columns sines, odd ones cosines."""
    rates = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1).float()[None]


class JoeyNMT:
    """Calls give logits [1, tgt, vocab] of one sentence."""

    def __init__(self, state: Mapping[str, Tensor], *, heads: int, norm: str, activation: str, scale: bool):
        self.state = {name: tensor.double() for name, tensor in state.items()}
        self.heads, self.norm, self.scale = heads, norm, scale
        self.activation = ACTIVATIONS[activation]

    def __call__(self, src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
        memory = self._stack("encoder", self._embed("src", "encoder", src_ids[0]), None)
        return (self._stack("decoder", self._embed("trg", "decoder", tgt_ids[0]), memory) @ self._output().T)[None]

    def _output(self) -> Tensor:
        return self.state["decoder.output_layer.weight"]

    def _embed(self, embed: str, side: str, ids: Tensor) -> Tensor:
        rows = self.state[f"{embed}_embed.lut.weight"][ids]
        return rows * (math.sqrt(rows.shape[1]) if self.scale else 1.0) + self.state[f"{side}.pe.pe"][0, : len(ids)]

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.state[f"{name}.weight"], self.state[f"{name}.bias"], 1e-6)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def _residual(self, norm: str, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm == "pre":
            return x + function(self._normed(norm, x))
        return self._normed(norm, x + function(x))

    def _attend(self, name: str, x: Tensor, memory: Tensor, *, causal: bool) -> Tensor:
        q, k, v = (
            self._linear(f"{name}.{part}_layer", of).chunk(self.heads, dim=1)
            for part, of in (("q", x), ("k", memory), ("v", memory))
        )
        mixed = []
        for query, key, value in zip(q, k, v, strict=True):
            scores = query @ key.T / math.sqrt(query.shape[1])
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf)
            mixed.append(scores.softmax(1) @ value)
        return self._linear(f"{name}.output_layer", torch.cat(mixed, dim=1))

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        return self._linear(f"{name}.pwff_layer.3", self.activation(self._linear(f"{name}.pwff_layer.0", x)))

    def _stack(self, side: str, x: Tensor, memory: Tensor | None) -> Tensor:
        i = 0
        while any(name.startswith(f"{side}.layers.{i}.") for name in self.state):
            layer = f"{side}.layers.{i}"
            own, norm = ("src_src_att", "layer_norm") if memory is None else ("trg_trg_att", "x_layer_norm")
            causal = memory is not None
            x = self._residual(
                f"{layer}.{norm}", x, lambda y, n=f"{layer}.{own}", c=causal: self._attend(n, y, y, causal=c)
            )
            if memory is not None:
                x = self._residual(
                    f"{layer}.dec_layer_norm",
                    x,
                    lambda y, n=f"{layer}.src_trg_att": self._attend(n, y, memory, causal=False),
                )
            forward = f"{layer}.feed_forward"
            x = self._residual(f"{forward}.layer_norm", x, lambda y, n=forward: self._feed_forward(n, y))
            i += 1
        return self._normed(f"{side}.layer_norm", x) if f"{side}.layer_norm.weight" in self.state else x
