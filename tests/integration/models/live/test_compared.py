"""Modules that deviate from what was read at few inputs only: the comparison must find these inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.live_modules import IDS, Tutorial, read
from tfexport.errors import CheckpointError
from tfexport.models.live.read import _unwrapped


class Deviating(Tutorial):
    """A module whose logits change where `deviates` says so; ids are length first."""

    def __init__(self, deviates: Callable[[Tensor, Tensor], Tensor | bool]):
        super().__init__()
        self.deviates = deviates

    def forward(self, src: Tensor, trg: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor) -> Tensor:
        logits = super().forward(src, trg, tgt_mask, src_padding_mask)
        return logits + 1e-3 * torch.as_tensor(self.deviates(src, trg)) * logits.sin()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "deviates",
    [
        lambda src, trg: len(src) == 13,
        lambda src, trg: (src[0] == 7)[None, :, None],
        lambda src, trg: (src[0] == IDS["eos_id"])[None, :, None],
        lambda src, trg: (src == 17).any(0)[None, :, None],
        lambda src, trg: ((trg == 9) & (trg.roll(1, 0) == IDS["bos_id"]))[..., None],
        lambda src, trg: (
            (torch.stack([src == src.roll(k, 0) for k in (1, 2, 3)]).all(0) & (src != 1)).any(0)[None, :, None]
            & (len(src) > 4)
        ),
    ],
    ids=["a length", "a first id", "eos in front", "an id anywhere", "an id after bos", "an id four times"],
)
def test_a_module_that_deviates_at_few_inputs_is_refused(deviates: Any) -> None:
    torch.manual_seed(7)
    with pytest.raises(CheckpointError, match="does not compute the same: the logits differ"):
        read(Deviating(deviates))


def test_a_huge_logit_hides_no_difference_of_the_others() -> None:
    class Suppressing(Deviating):
        def forward(self, src: Tensor, trg: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor) -> Tensor:
            logits = super().forward(src, trg, tgt_mask, src_padding_mask)
            return torch.where(torch.arange(logits.shape[-1]) == 1, -1e9, logits)

    with pytest.raises(CheckpointError, match="the logits differ"):
        read(Suppressing(lambda src, trg: True))


def test_hidden_bos_of_targets_is_refused_where_bos_is_padding() -> None:
    """The user's code hides padding among targets, and so their first token."""

    class Hiding(Tutorial):
        def forward(self, src: Tensor, trg: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor) -> Tensor:
            hidden = (trg == IDS["pad_id"]).T
            embedded = self.embed(src, self.src), self.embed(trg, self.tgt)
            pads = {"src_key_padding_mask": src_padding_mask, "memory_key_padding_mask": src_padding_mask}
            later = torch.ones(len(trg), len(trg), dtype=torch.bool).triu(1)
            return self.out(self.core(*embedded, tgt_mask=later, tgt_key_padding_mask=hidden, **pads))

    read(Hiding())
    with pytest.raises(CheckpointError, match="does not compute the same"):
        read(Hiding(), bos_id=1)


def test_a_wrapper_of_the_user_s_own_is_part_of_the_module() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Tutorial()

    wrapper = Wrapper()
    assert _unwrapped(wrapper) is wrapper
    assert _unwrapped(nn.DataParallel(wrapper.module)) is wrapper.module


def test_a_wrapper_with_a_hook_is_part_of_the_module() -> None:
    wrapper = nn.DataParallel(Tutorial())
    wrapper.register_forward_hook(lambda module, given, result: -result)
    assert _unwrapped(wrapper) is wrapper


def test_a_forward_that_cuts_its_source_is_named() -> None:
    class Cutting(Tutorial):
        def forward(self, src: Tensor, trg: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor) -> Tensor:
            return super().forward(src[:12], trg, tgt_mask, src_padding_mask[:, :12])

    with pytest.raises(CheckpointError, match=r"logits differ|ids of the encoder are not looked up as fewer are"):
        read(Cutting())


def test_a_forward_that_takes_few_tokens_is_named() -> None:
    module = Tutorial()
    module.table = module.table[:6]
    with pytest.raises(CheckpointError, match="forward fails for 7 source and 5 target tokens"):
        read(module)


def test_a_layer_that_does_not_run_is_left_alone() -> None:
    module = Tutorial()
    module.head = nn.Linear(5, 3)  # of a loss
    assert read(module).proof.error < 1e-12


def test_a_forward_that_ends_the_program_fails_like_any_other() -> None:
    class Ending(Tutorial):
        def embed(self, ids: Tensor, table: nn.Embedding) -> Tensor:
            try:
                return super().embed(ids, table) + torch.zeros(12 if len(ids) > 12 else len(ids), 1, 1)
            except:  # noqa: E722 (as people write it)
                sys.exit()

    live = read(Ending())
    assert (live.config.max_source_length, live.config.max_target_length) == (12, 12)
