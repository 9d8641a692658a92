"""Modules with parts that the canonical model lacks, which are folded into its weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.live_modules import read

WORDS, WIDTH, PAD = 24, 16, 1


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, states: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        query, key, value = (
            part(given).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
            for part, given in ((self.query, states), (self.key, memory), (self.value, memory))
        )
        scores = (query @ key.mT / math.sqrt(WIDTH // 2)).masked_fill(~keep, -math.inf)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A post-norm Transformer of one encoder layer and two decoder layers; batch first, without masks as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.src, self.tgt, self.out = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.places = nn.Parameter(torch.randn(16, WIDTH))
        self.attentions = nn.ModuleList(Attention() for _ in range(5))
        self.forwards = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH)) for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(8))
        self.of_memory: Any = nn.ModuleList(nn.Identity() for _ in range(2))

    def embed(self, ids: Tensor, table: nn.Module) -> Tensor:
        return table(ids) + self.places[: ids.shape[1]]

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        keep = (src != PAD)[:, None, None]
        memory = self.embed(src, self.src)
        memory = self.norms[0](memory + self.attentions[0](memory, memory, keep))
        memory = self.norms[1](memory + self.forwards[0](memory))
        earlier = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        states = self.embed(tgt, self.tgt)
        for layer in range(2):
            own, cross = self.attentions[1 + 2 * layer : 3 + 2 * layer]
            norms = self.norms[2 + 3 * layer : 5 + 3 * layer]
            states = norms[0](states + own(states, states, earlier))
            states = norms[1](states + cross(states, self.of_memory[layer](memory), keep))
            states = norms[2](states + self.forwards[1 + layer](states))
        return self.out(states)


class OneHot(nn.Module):
    """Embeddings as a product with one-hot vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(F.one_hot(ids, WORDS).to(self.table.weight.dtype))


class Scattered(OneHot):
    def forward(self, ids: Tensor) -> Tensor:
        vectors = torch.zeros(*ids.shape, WORDS)
        return self.table(vectors.scatter_(2, ids[..., None], 1.0))


def without_output_projections(module: Model) -> None:
    for attention in module.attentions:
        attention.out = nn.Identity()


def with_norms_of_memory(module: Model) -> None:
    module.of_memory = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))


def with_small_embeddings(module: Model) -> None:
    module.src = nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WIDTH, bias=False))
    module.tgt = nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WIDTH))


def with_one_hot_vectors(module: Model) -> None:
    module.src, module.tgt = OneHot(), Scattered()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (without_output_projections, {"d_model": WIDTH, "n_heads": 2}),
        (with_norms_of_memory, {"final_norm": True, "final_norm_in": "encoder"}),
        (with_small_embeddings, {"src_vocab_size": WORDS}),
        (with_one_hot_vectors, {"src_vocab_size": WORDS, "tgt_vocab_size": WORDS}),
    ],
)
def test_parts_are_folded_into_weights(change: Callable[[Model], None], fields: dict[str, Any]) -> None:
    torch.manual_seed(8)
    module = Model()
    change(module)
    live = read(module)
    assert live.proof.error < 1e-12
    assert {name: getattr(live.config, name) for name in fields} == fields
    assert not live.doubts


class Learned(nn.Module):
    """A sublayer whose result is multiplied by a learnt number (Bachlechner et al. 2020)."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.factor = inner, nn.Parameter(torch.zeros(1) + 0.3)

    def forward(self, *given: Tensor) -> Tensor:
        return self.factor * self.inner(*given)


class Scale(nn.Module):
    def __init__(self, table: nn.Module):
        super().__init__()
        self.table, self.scale = table, nn.Parameter(torch.tensor(3.0))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) * self.scale


def with_learnt_sublayers(module: Model) -> None:
    module.forwards = nn.ModuleList(Learned(part) for part in module.forwards)


def with_learnt_scales(module: Model) -> None:
    module.src, module.tgt = Scale(module.src), Scale(module.tgt)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("change", "scale", "learnt"),
    [
        (with_learnt_sublayers, 1.0, {"encoder.layers.0.feed_forward.output.weight"}),
        (with_learnt_scales, 3.0, set[str]()),
    ],
)
def test_numbers_that_were_learnt_are_those_of_the_checkpoint(
    change: Callable[[Model], None], scale: float, learnt: set[str]
) -> None:
    torch.manual_seed(9)
    module = Model()
    change(module)
    live = read(module)
    assert live.proof.error < 1e-12
    assert live.config.embedding_scale == scale
    assert learnt <= {name for name, made in live.made.items() if made is None}  # no family file may have its factor
