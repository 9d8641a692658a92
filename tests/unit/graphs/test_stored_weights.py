"""Tensors of weights files that are several weights of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tfexport.graphs.stored_weights import StoredWeights

PATH = "decoder.layers.0.self_attention"


@pytest.mark.parametrize(("kind", "shape"), [("weight", (6, 4)), ("bias", (6,))])
def test_query_key_and_value_are_thirds_of_the_tensor_that_is_all_three(
    tmp_path: Path, kind: str, shape: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(shape), dtype=np.float16).reshape(shape)
    save_file({f"{PATH}.query_key_value.{kind}": array, "other.weight": np.ones(3, np.float16)}, tmp_path / "weights")
    stored = StoredWeights(tmp_path / "weights")
    for part, wanted in zip(("query", "key", "value"), np.split(array, 3), strict=True):
        assert stored.shape(f"{PATH}.{part}.{kind}") == list(wanted.shape)
        assert np.array_equal(stored.tensor(f"{PATH}.{part}.{kind}").numpy(), wanted)
    assert np.array_equal(stored.tensor(f"{PATH}.query_key_value.{kind}").numpy(), array)
    assert f"{PATH}.output.{kind}" not in stored
