"""Conditions on tokens and on states are told from masks of padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfexport.models.live.conditions import conditions_on

PAD, WORD = 1, 17
TABLE = nn.Embedding(4000, 8).double()
SRC, TGT = torch.arange(20, 44).view(3, 8), torch.arange(50, 68).view(3, 6)
"""They do not have the word."""


def lines_in(change: Callable[[Tensor, Tensor], Tensor]) -> tuple[int, int]:
    """The number of lines with conditions on tokens, and on states."""
    on_tokens, on_states = conditions_on(lambda src, tgt: change(src, TABLE(src)), SRC, TGT, PAD)
    return len(on_tokens), len(on_states)


def between(src: Tensor, states: Tensor) -> Tensor:
    hidden = (src == PAD) | ((src == WORD).cumsum(1) % 2 == 1)
    return states.masked_fill(hidden[..., None], 0.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda src, states: torch.where((src == WORD)[..., None], states * 2, states),
        lambda src, states: states + (src == WORD).double()[..., None],
        lambda src, states: states.masked_fill((src == src.roll(1, 1))[..., None], 0.0),
        lambda src, states: states * torch.isin(src, torch.tensor([WORD, 18]))[..., None],
        between,
    ],
    ids=["where", "sum", "neighbours", "isin", "joined with padding"],
)
def test_conditions_on_other_tokens_are_named(change: Any) -> None:
    assert lines_in(change) == (1, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda src, states: states.masked_fill((src == PAD)[..., None], 0.0),
        lambda src, states: states + (1.0 - (src != PAD).double())[..., None] * -1e9,
        lambda src, states: states * (torch.arange(8) < (src != PAD).sum(1, keepdim=True))[..., None],
        lambda src, states: states + TABLE((src != PAD).cumsum(1)),
        lambda src, states: states * torch.ones(8, 1).tril(),
    ],
    ids=["mask", "added", "lengths", "positions", "causal"],
)
def test_masks_of_padding_and_constants_are_no_conditions(change: Any) -> None:
    assert lines_in(change) == (0, 0)


def test_conditions_on_states_are_named() -> None:
    assert lines_in(lambda src, states: torch.where(states > 50, 50.0, states)) == (0, 1)
