"""Modules with attentions of their own, written in several ways: the same function, or a refusal that names the cause."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.live_modules import Tutorial, read, with_norms
from tfexport.errors import CheckpointError


class Axes(nn.Module):
    """An attention in which heads and sequences come last, and keys are an axis in the middle."""

    def __init__(self, hides_later: bool):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.hides_later = hides_later

    def forward(self, states: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = (
            part(x).view(*x.shape[:2], 2, 8)
            for part, x in ((self.query, states), (self.key, memory), (self.value, memory))
        )
        scores = torch.einsum("ibhd,jbhd->ijbh", query, key) / math.sqrt(8)
        scores = scores.masked_fill(hidden.T[None, :, :, None], -1e9)
        if self.hides_later:
            later = torch.ones(len(states), len(states), dtype=torch.bool).triu(1)
            scores[later] = -math.inf
        return self.out(torch.einsum("ijbh,jbhd->ibhd", self.weights(scores), value).flatten(2))

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(1)


class OtherAxes(nn.Module):
    """A post-norm Transformer with such attentions, whose positions are a parameter and the row of a segment."""

    def __init__(self) -> None:
        super().__init__()
        self.src, self.tgt, self.out = nn.Embedding(24, 16), nn.Embedding(24, 16), nn.Linear(16, 24)
        self.places, self.segments = nn.Parameter(torch.randn(24, 16)), nn.Embedding(2, 16)
        self.attentions = nn.ModuleList(Axes(hides_later=later) for later in (False, True, False))
        self.forwards = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(5))

    def embed(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        embedded = table(ids) + self.segments(torch.zeros_like(ids))
        return embedded.transpose(0, 1) + self.places[: ids.shape[1], None]

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        hidden, visible = src == 1, torch.zeros_like(tgt, dtype=torch.bool)
        states = self.embed(src, self.src)
        states = self.norms[0](states + self.attentions[0](states, states, hidden))
        memory = self.norms[1](states + self.forwards[0](states))
        states = self.embed(tgt, self.tgt)
        states = self.norms[2](states + self.attentions[1](states, states, visible))
        states = self.norms[3](states + self.attentions[2](states, memory, hidden))
        states = self.norms[4](states + self.forwards[1](states))
        logits: Tensor = self.out(states).transpose(0, 1)
        return logits


def test_axes_may_have_any_order_and_positions_may_be_sums_of_parameters() -> None:
    torch.manual_seed(4)
    module = OtherAxes()
    expected = (module.places + module.segments.weight[0]).detach().clone()
    live = read(module)
    assert live.proof.error < 1e-12
    torch.testing.assert_close(live.weights["encoder.positions.table"], expected[: live.config.max_source_length])


class WrittenOut(Axes):
    """A softmax that is written out."""

    def weights(self, scores: Tensor) -> Tensor:
        exponentials = (scores - scores.amax(1, keepdim=True)).exp()
        return exponentials / self.total(exponentials)

    def total(self, exponentials: Tensor) -> Tensor:
        return exponentials.sum(1, keepdim=True)


class PerHead(Axes):
    """An attention with one matrix for all heads, as the number of columns of a head."""

    def __init__(self, hides_later: bool):
        super().__init__(hides_later)
        self.query, self.key, self.value = (OfHead(nn.Linear(8, 8)) for _ in range(3))


class OfHead(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor) -> Tensor:
        return self.inner(states.unflatten(-1, (2, 8))).flatten(-2)


class ReadAgain(Axes):
    """An attention whose values read the same states from another operation, as from a norm that is computed again."""

    def __init__(self, hides_later: bool):
        super().__init__(hides_later)
        self.value = nn.Sequential(Again(), self.value)  # type: ignore[assignment]


class Again(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        return states * 1.0


class OneNumber(nn.Module):
    """A norm whose weight and bias are one number each, for all features."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.tensor([1.5])), nn.Parameter(torch.tensor([0.3]))

    def forward(self, states: Tensor) -> Tensor:
        deviation = states.std(-1, keepdim=True) + 1e-6
        return self.alpha * (states - states.mean(-1, keepdim=True)) / deviation + self.beta


class Unused(OtherAxes):
    """A forward with a layer whose result nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = Axes(hides_later=False)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        self.idle(self.embed(tgt, self.tgt), self.embed(src, self.src), src == 1)
        return super().forward(src, tgt)


def with_attentions(kind: type[Axes]) -> nn.Module:
    module = OtherAxes()
    module.attentions = nn.ModuleList(kind(hides_later=later) for later in (False, True, False))
    return module


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    "module",
    [
        lambda: with_attentions(WrittenOut),
        lambda: with_attentions(PerHead),
        lambda: with_attentions(ReadAgain),
        lambda: with_norms(Tutorial(), OneNumber),
        Unused,
    ],
    ids=["softmax", "heads", "again", "norms", "unused"],
)
def test_other_ways_to_write_the_same_are_read(module: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    assert read(module()).proof.error < 1e-12


class ByRow(OtherAxes):
    """Positions that are taken by the row of the batch, as in a class for sequences that come length first."""

    def embed(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        return table(ids).transpose(0, 1) + self.places[: len(ids)]


def test_a_module_that_computes_something_else_in_a_batch_is_read_alone() -> None:
    live = read(ByRow())
    assert live.proof.error < 1e-12
    assert any("other logits in a batch than alone" in note for note in live.notes)


class Shifting(OtherAxes):
    """A forward that puts the first target token itself."""

    def __init__(self, start: int):
        super().__init__()
        self.start = start

    def embed(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        return table(ids).transpose(0, 1) + self.places[: ids.shape[1], None]

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return super().forward(src, torch.cat([torch.full_like(tgt[:, :1], self.start), tgt[:, :-1]], 1))


class Copying(Shifting):
    """The same, with a copy into new memory."""

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        shifted = tgt.new_zeros(tgt.shape)
        shifted[:, 1:] = tgt[:, :-1].clone()
        shifted[:, 0] = self.start
        return OtherAxes.forward(self, src, shifted)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", [Shifting, Copying])
def test_a_forward_that_shifts_targets_is_read_with_bos_as_their_first_token(kind: type[Shifting]) -> None:
    torch.manual_seed(6)
    live = read(kind(2))
    assert live.proof.error < 1e-12
    assert any("puts the first target token itself" in note for note in live.notes)
    with pytest.raises(CheckpointError, match=r"must be bos \(2\).*correct bos"):
        read(kind(5))


class Packed(OtherAxes):
    def embed(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        longer = torch.cat([torch.full_like(ids[:, :1], 2), ids], 1)
        return super().embed(longer, table)[1:]


def test_ids_that_are_moved_before_their_lookup_are_named() -> None:
    with pytest.raises(
        CheckpointError, match=r"packed, padded or moved before .* \(test_own_attentions.py, line \d+\)"
    ):
        read(Packed())


class Leaking(WrittenOut):
    """Attention weights whose sum is below 1 (Miller 2023)."""

    def total(self, exponentials: Tensor) -> Tensor:
        return super().total(exponentials) + 1


class Exchanging(Axes):
    """Attention whose heads take the weights of each other."""

    def weights(self, scores: Tensor) -> Tensor:
        return super().weights(scores).flip(3)


@pytest.mark.parametrize(
    ("kind", "places", "about"),
    [
        (Leaking, (0, 1, 2), "attention without PyTorch's softmax: use torch.softmax"),
        (Exchanging, (0,), "changed or moved after their softmax"),
    ],
)
def test_attention_weights_of_another_kind_are_named(kind: type[Axes], places: tuple[int, ...], about: str) -> None:
    module = OtherAxes()
    for place in places:
        module.attentions[place] = kind(hides_later=place == 1)
    with pytest.raises(CheckpointError, match=re.escape(about)):
        read(module)
