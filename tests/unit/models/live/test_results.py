"""The logits among what a module returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfexport.models.live.results import logits_of_run

SHAPE, VOCAB = (3, 5), 20
LOGITS, STATES = torch.randn(3, 5, VOCAB), torch.randn(3, 5, 8)


class Module(nn.Module):
    """A module with an embedding, which tells the number of logits, and a projection that does not run."""

    def __init__(self, out: nn.Module | None = None):
        super().__init__()
        self.table = nn.Embedding(VOCAB, 8)
        if out is not None:
            self.out = out


def run(returned: Any, *, out: nn.Module | None = None) -> Tensor:
    module = Module(out)

    def forward() -> Any:
        module.table(torch.tensor([1]))
        return returned

    return logits_of_run(module, forward, SHAPE, None)


@pytest.mark.parametrize(
    "returned",
    [
        LOGITS,
        LOGITS.flatten(0, 1),
        (LOGITS, torch.zeros(3, 2, 5, 5)),
        (torch.zeros(()), LOGITS),
        (STATES, LOGITS),
        {"aux": torch.randn(3, 5, VOCAB), "logits": LOGITS},
        {"loss": torch.zeros(()), "scores": LOGITS},
        SimpleNamespace(hidden=STATES, logits=LOGITS),
    ],
)
def test_logits_are_known_by_their_name_or_shape(returned: Any) -> None:
    assert torch.equal(run(returned), LOGITS)


@pytest.mark.parametrize("returned", [[LOGITS, LOGITS + 1], {"aux": LOGITS, "out": LOGITS + 1}, (LOGITS, LOGITS.exp())])
def test_one_of_several_is_not_chosen(returned: Any) -> None:
    with pytest.raises(ValueError, match="2 tensors that may be the logits"):
        run(returned)


def test_a_projection_that_did_not_run_is_applied_to_states_alone() -> None:
    out = nn.Linear(8, VOCAB)
    assert torch.equal(run(STATES, out=out), out(STATES))
    for leftover in (nn.Linear(VOCAB, VOCAB), nn.Linear(5, 3), nn.CosineEmbeddingLoss()):
        assert torch.equal(run(LOGITS, out=leftover), LOGITS)


def test_states_as_wide_as_the_vocabulary_are_projected_too() -> None:
    module = nn.Module()
    module.table, module.inner, module.out = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def states() -> Tensor:
        return module.inner(module.table(torch.zeros(SHAPE, dtype=torch.int64))) + 1

    assert torch.equal(logits_of_run(module, states, SHAPE, None), module.out(states()))
    assert torch.equal(logits_of_run(module, lambda: module.inner(STATES), SHAPE, None), module.inner(STATES))


def test_a_loss_that_did_not_run_changes_nothing() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            raise AssertionError

    assert torch.equal(run(STATES, out=Loss()), STATES)
