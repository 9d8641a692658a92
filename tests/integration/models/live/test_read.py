"""Models that are read from live modules: the same function, or a refusal that names the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.live_modules import Tutorial, read, with_norms
from tfexport.errors import CheckpointError
from tfexport.models.transformer import Transformer


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


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("norm", [lambda: nn.RMSNorm(16), Bare], ids=["module", "function"])
def test_an_epsilon_that_depends_on_the_type_is_that_of_float32(norm: Callable[[], nn.Module]) -> None:
    live = read(with_norms(Tutorial(norm_first=True), norm))
    assert (live.config.norm, live.config.norm_eps) == ("rms", torch.finfo(torch.float32).eps)


def test_lengths_are_those_of_each_side_and_those_that_the_forward_cannot_take_are_refused() -> None:
    config = read(Tutorial(), max_lengths={"encoder": 14, "decoder": 9}).config
    assert (config.max_source_length, config.max_target_length) == (14, 9)
    assert read(Tutorial()).config.max_source_length == 16  # the rows of the table
    with pytest.raises(CheckpointError, match="has 16 positions, not 17"):
        read(Tutorial(), max_lengths={"encoder": 17})


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
        read(Cut(), max_lengths={"encoder": 14})


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
    with pytest.raises(CheckpointError, match=rf"{about}.*live_modules\.py, line \d+"):
        read(module)


def other_sizes(module: Tutorial) -> None:
    layer = module.core.encoder.layers[0]
    layer.linear1, layer.linear2 = nn.Linear(16, 31), nn.Linear(31, 16)


def other_heads(module: Tutorial) -> None:
    module.core.encoder.layers[0].self_attn = nn.MultiheadAttention(16, 4)


def one_norm(module: Tutorial) -> None:
    module.core.encoder.norm = None


class AfterNorm(nn.Module):
    def __init__(self, stack: nn.Module):
        super().__init__()
        self.norm, self.stack = nn.LayerNorm(16), stack

    def forward(self, states: Tensor, **options: Any) -> Any:
        return self.stack(self.norm(states), **options)


def one_embedding_norm(module: Tutorial) -> None:
    module.core.encoder = AfterNorm(module.core.encoder)


def another_epsilon(module: Tutorial) -> None:
    module.core.encoder.norm.eps = module.core.decoder.norm.eps = 1e-3


def without_positions(module: Tutorial) -> None:
    module.table.zero_()


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (other_sizes, {"d_ff": 31}),
        (other_heads, {"n_heads": 2, "n_encoder_heads": 4}),
        (one_norm, {"final_norm": True, "final_norm_in": "decoder"}),
        (one_embedding_norm, {"embedding_norm": True, "embedding_norm_in": "encoder"}),
        (another_epsilon, {"norm_eps": 1e-5, "final_norm_eps": 1e-3}),
        (without_positions, {"positions": "none"}),
    ],
)
def test_stacks_that_differ_are_read(change: Any, fields: dict[str, Any]) -> None:
    module = Tutorial(norm_first=True)
    change(module)
    live = read(module)
    assert live.proof.error < 1e-12
    assert {name: getattr(live.config, name) for name in fields} == fields


class Relative(Tutorial):
    """Positions that are counted from the end."""

    def embed(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        place = torch.arange(len(ids), 0, -1, dtype=torch.float64)[:, None, None]
        return table(ids) + torch.sin(place * torch.arange(1, 17))


def test_positions_that_depend_on_the_length_are_named() -> None:
    with pytest.raises(CheckpointError, match="positions depend on the length of the sequence"):
        read(Relative())
