"""The schedule of the training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.training import PAIRS, options, train
from tfexport.errors import TfexportError


def test_noam_factor_rises_to_the_end_of_warmup_and_falls_as_the_root() -> None:
    from tfexport.training.train import noam_factor

    rates = [noam_factor(step, 512, 4000) for step in (1, 2000, 4000, 16000)]
    assert rates == pytest.approx([512**-0.5 * 4000**-1.5, rates[2] / 2, (512 * 4000) ** -0.5, rates[2] / 2])


@pytest.mark.parametrize("wrong", [{"precision": "foo"}, {"accelerator": "gpu"}])
def test_options_that_cannot_be_trained_with_are_told(tmp_path: Path, wrong: dict[str, str]) -> None:
    if torch.cuda.is_available() and "accelerator" in wrong:
        pytest.skip("this machine has a GPU")
    with pytest.raises(TfexportError, match="--precision or --accelerator"):
        train(PAIRS, PAIRS, tmp_path / "run", options(**wrong))
