"""Models that are read from live modules: the same function, or a refusal that names the cause."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.errors import CheckpointError
from tfexport.models.live.read import LiveModel, ReadingOptions, read_module
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


def read(module: nn.Module, **options: Any) -> LiveModel:
    def with_ids(fields: Any) -> ModelConfig:
        return ModelConfig.from_dict({**fields, **IDS})

    ids = frozenset(IDS.values())
    return read_module(module, ReadingOptions(pad_id=1, special_ids=ids, with_ids=with_ids, **options))


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
    assert (live.config.norm_first, live.config.activation) == (bool(options), options.get("activation", "relu"))
    model = Transformer(live.config).eval()
    model.load_state_dict(live.weights)
    with torch.no_grad():
        logits = model(src, torch.tensor([4]), tgt)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


class Bare(nn.Module):
    """A norm without weights and epsilon."""

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.rms_norm(states, (states.shape[-1],))


def with_norms(module: nn.Module, norm: Callable[[], nn.Module]) -> nn.Module:
    """The module with another norm in place of LayerNorm."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.LayerNorm):
                setattr(part, name, norm())
    return module


@pytest.mark.parametrize("norm", [lambda: nn.RMSNorm(16), Bare], ids=["module", "function"])
def test_an_epsilon_that_depends_on_the_type_is_that_of_float32(norm: Callable[[], nn.Module]) -> None:
    live = read(with_norms(Tutorial(norm_first=True), norm))
    assert (live.config.norm, live.config.norm_eps) == ("rms", torch.finfo(torch.float32).eps)


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
        self.places, self.segments = nn.Parameter(torch.randn(30, 16)), nn.Embedding(2, 16)
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


def test_lengths_are_those_of_each_side_and_those_that_the_forward_cannot_take_are_refused() -> None:
    config = read(Tutorial(), max_lengths={"encoder": 20, "decoder": 9}).config
    assert (config.max_source_length, config.max_target_length) == (20, 9)
    assert read(Tutorial()).config.max_source_length == 30  # the rows of the table
    with pytest.raises(CheckpointError, match="has 30 positions, not 31"):
        read(Tutorial(), max_lengths={"encoder": 31})


class Cut(Tutorial):
    """A forward that takes fewer tokens than there are positions."""

    def embed(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        assert len(ids) <= 12, "a mask of 12 tokens"
        return super().embed(ids, table)


def test_a_forward_that_fails_for_long_sequences_limits_them_with_its_error() -> None:
    live = read(Cut())
    assert (live.config.max_source_length, live.config.max_target_length) == (12, 12)
    assert any("at most 12 tokens" in note and "a mask of 12 tokens" in note for note in live.notes)
    with pytest.raises(CheckpointError, match="at most --max-length 12"):
        read(Cut(), max_lengths={"encoder": 20})


def test_an_activation_that_the_model_lacks_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="tanh"):
        read(Tutorial(activation=torch.tanh))


ODD = 1999
"""An id that no random sequence of a proof has, so that only the comparison of every id finds it."""


class Large(Tutorial):
    def __init__(self) -> None:
        super().__init__()
        self.src = nn.Embedding(2000, 16)


def test_an_id_that_is_scaled_differently_is_named() -> None:
    class Odd(Large):
        def embed(self, ids: Tensor, table: nn.Embedding) -> Tensor:
            return super().embed(ids, table) + (ids == ODD)[..., None] * 1e-3

    with pytest.raises(CheckpointError, match=f"embedding of id {ODD} of the encoder"):
        read(Odd())


def test_an_id_that_is_hidden_as_padding_is_named() -> None:
    class Hiding(Large):
        def forward(self, src: Tensor, trg: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor) -> Tensor:
            return super().forward(src, trg, tgt_mask, src_padding_mask | (src.T == ODD))

    with pytest.raises(CheckpointError, match=f"hides id {ODD} of the encoder"):
        read(Hiding())


def test_attention_that_is_as_sharp_as_a_mask_is_read() -> None:
    module = Tutorial()
    with torch.no_grad():
        module.src.weight.mul_(1000)
    assert read(module).proof.error < 1e-9


class Times(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, states: Tensor) -> Tensor:
        return states * self.factor


def test_a_factor_after_the_last_norm_goes_into_that_norm() -> None:
    module = Tutorial()
    module.out = nn.Sequential(Times(0.25), module.out)  # type: ignore[assignment]
    weight = module.core.decoder.norm.weight.detach().clone()
    live = read(module)
    torch.testing.assert_close(live.weights["decoder.norm.weight"], 0.25 * weight)


def test_weights_that_arithmetic_makes_are_those_of_the_parameters() -> None:
    module = Tutorial()
    module.out = nn.utils.parametrizations.weight_norm(module.out)
    with torch.no_grad():
        module.out.parametrizations.weight.original0.mul_(3)  # type: ignore[union-attr, index, operator]
        expected = module.out.weight.clone()
    torch.testing.assert_close(read(module).weights["output_weight"], expected)


@pytest.mark.parametrize(
    ("change", "about"),
    [
        (lambda module: module.core.decoder.layers[0].norm3.__setattr__("eps", 1e-3), "norms with two epsilons"),
        (
            lambda module: module.core.encoder.layers[0].__setattr__("norm2", nn.RMSNorm(16, eps=1e-5)),
            "norms of two kinds",
        ),
        (lambda module: module.core.decoder.layers[0].__setattr__("activation", torch.sigmoid), "sigmoid"),
    ],
    ids=["eps", "kind", "activation"],
)
def test_layers_that_differ_are_refused_by_name(change: Any, about: str) -> None:
    module = Tutorial()
    change(module)
    with pytest.raises(CheckpointError, match=rf"{about}.*test_read\.py, line \d+"):
        read(module)


def other_sizes(module: Tutorial) -> None:
    layer = module.core.encoder.layers[0]
    layer.linear1, layer.linear2 = nn.Linear(16, 31), nn.Linear(31, 16)


def other_heads(module: Tutorial) -> None:
    module.core.encoder.layers[0].self_attn = nn.MultiheadAttention(16, 4)


def one_norm(module: Tutorial) -> None:
    module.core.encoder.norm = None


def without_positions(module: Tutorial) -> None:
    module.table.zero_()


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (other_sizes, {"d_ff": 31}),
        (other_heads, {"n_heads": 2, "n_encoder_heads": 4}),
        (one_norm, {"final_norm": True, "final_norm_in": "decoder"}),
        (without_positions, {"positions": "none"}),
    ],
)
def test_stacks_that_differ_are_read(change: Any, fields: dict[str, Any]) -> None:
    module = Tutorial(norm_first=True)
    change(module)
    live = read(module)
    assert live.proof.error < 1e-12
    assert {name: getattr(live.config, name) for name in fields} == fields


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


@pytest.mark.parametrize(
    "module",
    [
        lambda: with_attentions(WrittenOut),
        lambda: with_attentions(PerHead),
        lambda: with_norms(Tutorial(), OneNumber),
        Unused,
    ],
    ids=["softmax", "heads", "norms", "unused"],
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


class Packed(OtherAxes):
    def embed(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        longer = torch.cat([torch.full_like(ids[:, :1], 2), ids], 1)
        return super().embed(longer, table)[1:]


def test_ids_that_are_moved_before_their_lookup_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"packed, padded or moved before .* \(test_read.py, line \d+\)"):
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


class Relative(Tutorial):
    """Positions that are counted from the end."""

    def embed(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        place = torch.arange(len(ids), 0, -1, dtype=torch.float64)[:, None, None]
        return table(ids) + torch.sin(place * torch.arange(1, 17))


def test_positions_that_depend_on_the_length_are_named() -> None:
    with pytest.raises(CheckpointError, match="positions depend on the length of the sequence"):
        read(Relative())
