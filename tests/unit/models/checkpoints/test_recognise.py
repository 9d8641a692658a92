"""Which family weights are of, and what is said where their names are odd."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tfexport.errors import CheckpointError
from tfexport.models.checkpoints.recognise import family_of
from tfexport.models.families.family import Family

PADDED = {f"encoder.layers.0{layer}.fc.weight": torch.ones(1) for layer in range(2)}


@pytest.mark.parametrize("chosen", [None, "tutorial"])
def test_numbers_that_begin_with_0_are_named(chosen: str | None) -> None:
    with pytest.raises(CheckpointError, match=r"ckpt.pt has numbers that begin with 0.*layers.00.fc.weight") as error:
        family_of(Path("ckpt.pt"), PADDED, chosen)
    assert "layers.1 for layers.01" in str(error.value)


def test_a_family_file_may_have_such_numbers() -> None:
    renames = {"encoder.layers.0{i}.fc.{p}": "encoder.layers.{i}.feed_forward.hidden.{p}"}
    own = Family(name="a", about="", renames=renames, signature=(*PADDED,), read_config=lambda weights: {})
    assert family_of(Path("ckpt.pt"), PADDED, (own,)) is own
    assert own.canonical_names("encoder.layers.01.fc.weight") == ("encoder.layers.1.feed_forward.hidden.weight",)
