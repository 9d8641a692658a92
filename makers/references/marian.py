"""Naive reference of Marian's transformer, over the arrays of a model.npz by Marian's own names, in NumPy and float64.

| name                                                      | shape          | what                                  |
|-----------------------------------------------------------|----------------|---------------------------------------|
| `Wemb`, or `encoder_Wemb` and `decoder_Wemb`              | [vocab, d]     | embeddings, shared or not             |
| `{encoder,decoder}_l{i}_self_{W,b}{q,k,v,o}`              | [d, d], [1, d] | rows are multiplied from the left     |
| `decoder_l{i}_context_{W,b}{q,k,v,o}`                     | the same       | q of the target, k, v of the source   |
| `{encoder,decoder}_l{i}_ffn_{W,b}{1,2}`                   | [d, ffn], ...  | the feed-forward                      |
| `..._l{i}_{self_Wo,context_Wo,ffn_ffn}_ln_{scale,bias}`   | [1, d]         | norms; with `_pre` before a sublayer  |
| `{encoder,decoder}_emb_ln_..._pre`, `..._top_ln_...`      | [1, d]         | of embeddings, and of a whole stack   |
| `decoder_ff_logit_out_W`, or `..._Wt`, and `..._b`        | [d, vocab]     | the output's own; Wt is transposed    |
| `Wpos`                                                    | [positions, d] | positions, where they are trained     |

Layers count from 1. The decoder begins with no token: with an embedding of zeros. It ends with id 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


def sinusoids(length: int, d: int) -> Array:
    """[length, d]: the first half sines, the second cosines, of rates from 1 to exactly 1 / 10000."""
    timescales = d // 2
    table = np.zeros((length, d))
    for position in range(length):
        for i in range(timescales):
            angle = position * np.exp(-i * np.log(10000.0) / (timescales - 1))
            table[position, i], table[position, timescales + i] = np.sin(angle), np.cos(angle)
    return table


class Marian:
    """Calls give the logits [1, tgt, vocab] after each prefix of a target whose first id stands for the beginning."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], options: Mapping[str, Any]):
        self.arrays = {name: array.astype(np.float64) for name, array in arrays.items() if ":" not in name}
        self.options = options

    def __call__(self, src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
        memory = self._stack("encoder", self._embed("encoder", src_ids[0].tolist(), begins=False), None)
        states = self._stack("decoder", self._embed("decoder", tgt_ids[0].tolist(), begins=True), memory)
        logits = states @ self._output()
        if "decoder_ff_logit_out_b" in self.arrays:
            logits = logits + self.arrays["decoder_ff_logit_out_b"][0]
        return torch.from_numpy(logits)[None]

    def _table(self, side: str) -> Array:
        return self.arrays.get("Wemb", self.arrays.get(f"{side}_Wemb"))

    def _output(self) -> Array:
        if self.options["tied-embeddings"] or self.options["tied-embeddings-all"]:
            return self._table("decoder").T
        if "decoder_ff_logit_out_W" in self.arrays:
            return self.arrays["decoder_ff_logit_out_W"]
        return self.arrays["decoder_ff_logit_out_Wt"].T

    def _embed(self, side: str, ids: list[int], *, begins: bool) -> Array:
        table = self._table(side)
        d = table.shape[1]
        rows = np.stack([np.zeros(d) if begins and t == 0 else table[index] for t, index in enumerate(ids)])
        if "Wpos" in self.arrays:
            states = rows + self.arrays["Wpos"][: len(ids)]
        else:
            states = rows * np.sqrt(d) + sinusoids(len(ids), d)
        return self._process(f"{side}_emb", self.options["transformer-postprocess-emb"], states, states, "_pre")

    def _stack(self, side: str, states: Array, memory: Array | None) -> Array:
        depth = self.options["enc-depth" if side == "encoder" else "dec-depth"]
        tied = self.options.get("transformer-tied-layers") or range(1, depth + 1)
        below = states
        for number in tied if side == "decoder" else range(1, depth + 1):
            layer = f"{side}_l{number}"
            states = self._sublayer(
                f"{layer}_self_Wo", states, lambda x, p=f"{layer}_self": self._attend(p, x, x, side)
            )
            if memory is not None:
                states = self._sublayer(
                    f"{layer}_context_Wo", states, lambda x, p=f"{layer}_context": self._attend(p, x, memory, "encoder")
                )
            states = self._sublayer(f"{layer}_ffn_ffn", states, lambda x, p=f"{layer}_ffn": self._feed_forward(p, x))
        return self._process(f"{side}_top", self.options["transformer-postprocess-top"], states, below, "")

    def _sublayer(self, norm: str, states: Array, function: Any) -> Array:
        inner = self._process(norm, self.options["transformer-preprocess"], states, states, "_pre")
        return self._process(norm, self.options["transformer-postprocess"], function(inner), states, "")

    def _process(self, norm: str, ops: str, states: Array, below: Array, suffix: str) -> Array:
        for op in ops:
            if op == "a":
                states = states + below
            elif op == "n":
                centred = states - states.mean(-1, keepdims=True)
                deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
                scale, bias = (self.arrays[f"{norm}_ln_{kind}{suffix}"][0] for kind in ("scale", "bias"))
                states = centred / deviation * scale + bias
        return states

    def _linear(self, name: str, part: str, states: Array) -> Array:
        return states @ self.arrays[f"{name}_W{part}"] + self.arrays[f"{name}_b{part}"][0]

    def _attend(self, name: str, states: Array, memory: Array, side: str) -> Array:
        queries, keys, values = (
            self._linear(name, part, x) for part, x in (("q", states), ("k", memory), ("v", memory))
        )
        heads = []
        for q, k, v in zip(
            *(np.split(x, self.options["transformer-heads"], axis=1) for x in (queries, keys, values)), strict=True
        ):
            scores = q @ k.T / np.sqrt(q.shape[1])
            if side == "decoder":
                scores = np.where(np.tri(len(q), len(k)) > 0, scores, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(weights / weights.sum(1, keepdims=True) @ v)
        return self._linear(name, "o", np.concatenate(heads, axis=1))

    def _feed_forward(self, name: str, states: Array) -> Array:
        hidden = self._linear(name, "1", states)
        kind = self.options["transformer-ffn-activation"]
        hidden = (
            np.maximum(hidden, 0)
            if kind == "relu"
            else hidden / (1 + np.exp(-hidden * (1.702 if kind == "gelu" else 1)))
        )
        return self._linear(name, "2", hidden)
