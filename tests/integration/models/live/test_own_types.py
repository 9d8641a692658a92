"""Modules whose result depends on the type of their tensors, or on Python code that reads tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.live_modules import IDS, Tutorial, read
from tfexport.errors import CheckpointError


class Changed(Tutorial):
    """A module whose forward changes its logits; ids are length first."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.change = change

    def forward(self, src: Tensor, trg: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor) -> Tensor:
        return self.change(src, super().forward(src, trg, tgt_mask, src_padding_mask))


def test_a_branch_on_the_type_is_refused() -> None:
    module = Changed(lambda src, logits: logits.sin() if logits.dtype == torch.float32 else logits)
    with pytest.raises(CheckpointError, match=r"in float32, its logits differ by .* from those of the export"):
        read(module)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "narrow", [nn.Module.bfloat16, partial(Changed, lambda src, logits: logits.bfloat16().float())]
)
def test_arithmetic_in_a_narrower_type_is_said(narrow: Any) -> None:
    module = narrow(Tutorial()) if narrow is nn.Module.bfloat16 else narrow()
    assert list(read(module).doubts) == ["rounding of bfloat16"]


def test_a_module_has_its_own_tensors_again_after_it_was_read() -> None:
    class Caching(Tutorial):
        def forward(self, src: Tensor, trg: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor) -> Tensor:
            if not hasattr(self, "bonus"):
                self.bonus = torch.full((1,), 0.1)
            return super().forward(src, trg, tgt_mask, src_padding_mask) + self.bonus

    module = Caching()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert not read(module).doubts
    assert module.bonus.dtype == torch.float32
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(tensor.dtype == torch.float32 for tensor in module.state_dict().values())


def test_code_that_keeps_tensors_outside_of_the_module_is_not_compared_in_its_own_types() -> None:
    kept: list[Tensor] = []

    def add_kept(src: Tensor, logits: Tensor) -> Tensor:
        if not kept:
            kept.append(torch.zeros(23))
        assert kept[0].dtype == logits.dtype, "other types, which many operations refuse"
        return logits + kept[0]

    assert "its forward fails" in read(Changed(add_kept)).doubts["its own types"]


FIRST = 17


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize(
    "reads",
    [
        lambda src: bool(src[0, 0] == FIRST),
        lambda src: src[0, 0].item() == FIRST,
        lambda src: src.tolist()[0][0] == FIRST,
        lambda src: src.numpy()[0, 0] == FIRST,
        lambda src: len((src[0, :1] == FIRST).nonzero()) > 0,
        lambda src: len(src[0, :1][src[0, :1] == FIRST]) > 0,
        lambda src: torch.equal(src[0, :1], torch.tensor([FIRST])),
        lambda src: int(src[0, :1].aminmax().max) == FIRST,
        lambda src: len(src[0, :1].bincount()) == FIRST + 1,
        lambda src: str(src[0, 0]) == f"tensor({FIRST})",
    ],
    ids=["bool", "item", "tolist", "numpy", "nonzero", "index", "equal", "aminmax", "bincount", "str"],
)
def test_a_branch_on_the_first_sequence_of_a_batch_is_refused(reads: Callable[[Tensor], bool]) -> None:
    module = Changed(lambda src, logits: logits.sin() if reads(src) else logits)
    module.src = nn.Embedding(900, 16)  # so many that random sequences rarely begin with the one
    with pytest.raises(CheckpointError, match="the logits differ"):
        read(module)


def test_a_branch_on_tokens_that_changes_nothing_is_said() -> None:
    def checked(src: Tensor, logits: Tensor) -> Tensor:
        assert int(src.max()) < 40
        return logits

    assert "test_own_types.py, line" in read(Changed(checked)).doubts["branches on tokens"]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "change",
    [
        lambda src, logits: torch.where(logits > 50, 50.0, logits),
        lambda src, logits: logits.masked_fill(logits > 50, 50.0),
        lambda src, logits: torch.fmin(logits, torch.full_like(logits, 50.0)),
        lambda src, logits: torch.nn.functional.hardtanh(logits, -50, 50),
    ],
    ids=["where", "masked_fill", "fmin", "hardtanh"],
)
def test_a_condition_on_values_that_no_sequence_meets_is_said(change: Any) -> None:
    assert "test_own_types.py, line" in read(Changed(change)).doubts["limits of values"]


def test_shapes_and_masks_are_no_branch_on_tokens() -> None:
    def masked(src: Tensor, logits: Tensor) -> Tensor:
        assert src.shape[0] > 0
        return logits.masked_fill((src == IDS["pad_id"]).any(0)[None, :, None], 0.0)

    assert not read(Changed(masked)).doubts


@pytest.mark.parametrize("bonus", [0.0, 100.0])
def test_a_module_that_hides_padding_which_it_gives_itself_is_not_fully_confirmed(bonus: float) -> None:
    class Hiding(Tutorial):
        def forward(self, src: Tensor, trg: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor) -> Tensor:
            pads = {"src_key_padding_mask": src_padding_mask, "memory_key_padding_mask": src_padding_mask}
            hidden = (trg == IDS["pad_id"]).T
            embedded = self.embed(src, self.src), self.embed(trg, self.tgt)
            later = torch.ones(len(trg), len(trg), dtype=torch.bool).triu(1)
            return self.out(self.core(*embedded, tgt_mask=later, tgt_key_padding_mask=hidden, **pads))

    module = Hiding()
    with torch.no_grad():
        module.out.bias[IDS["pad_id"]] = bonus - 50
    assert ("padding in outputs" in read(module).doubts) == (bonus > 50)


def test_compiled_functions_run_uncompiled() -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        raise AssertionError("compiled")

    doubled = torch.compile(lambda logits: logits * 2.0, backend=refuse)
    assert read(Changed(lambda src, logits: doubled(logits))).proof.error < 1e-12
