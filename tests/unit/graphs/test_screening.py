"""Bounds of logits: what is screened out cannot be the best."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.fakes import ScriptedRuntime, tiny_config
from tests.support.fakes import random_model as scripted_model
from tfexport.errors import TfexportError
from tfexport.graphs.linear_quantized import from_blocks
from tfexport.graphs.screening import LEVELS, screening_tensors
from tfexport.search.search import SearchOptions, search

SCORED, ALONE = SearchOptions(max_length=30), SearchOptions(max_length=30, scores=False)


def stored_of(weight: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    return {name.removeprefix("screening."): tensor for name, tensor in screening_tensors(weight).items()}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.integers(1, 40),
    spread=st.sampled_from([1e-38, 1e-6, 1.0, 1e6]),
    outliers=st.booleans(),
)
def test_no_logit_is_above_its_bound(seed: int, width: int, spread: float, outliers: bool) -> None:
    """With what is stored, in exact arithmetic: the inequality that the proof rests on."""
    random = np.random.default_rng(seed)
    weight = (random.standard_normal((50, width)) * spread).astype(np.float32)
    states = random.standard_normal(width).astype(np.float32)
    if outliers:
        weight[7], weight[8, 0], states[0] = 0.0, spread * 1e3, 30.0
    stored = stored_of(weight)
    numbers, exact = np.rint(states / (np.abs(states).max() / LEVELS)), states.astype(np.float64)
    rounded = numbers * float(np.abs(states).max() / LEVELS)
    columns = from_blocks(stored["int8"], *weight.shape).T.astype(np.float64)
    approximate = rounded @ (columns * stored["scale"])
    room = np.linalg.norm(exact - rounded) * stored["norm"] + np.linalg.norm(rounded) * stored["error"]
    assert (weight.astype(np.float64) @ exact <= approximate + room * (1 + 1e-12)).all()
    assert np.abs(numbers).max() * np.abs(stored["int8"].astype(np.int64)).max() * 2 < 2**15  # no kernel can overflow


def test_a_projection_that_is_no_numbers_is_refused() -> None:
    with pytest.raises(TfexportError, match="output projection has weights that are not finite"):
        screening_tensors(np.array([[1.0, np.inf]], np.float32))
    with pytest.raises(TfexportError, match=r"output projection has weights above 1e\+30"):
        screening_tensors(np.array([[1.0, 2e30]], np.float32))


def test_scores_that_nobody_asked_for_are_none() -> None:
    runtime = ScriptedRuntime(scripted_model(3, 12), tiny_config(tgt_vocab_size=12))
    (scored,), (alone,) = search(runtime, [[5, 6]], SCORED)[0], search(runtime, [[5, 6]], ALONE)[0]
    assert scored.ids == alone.ids
    assert math.isfinite(scored.score)
    assert math.isnan(alone.score)
    assert math.isnan(alone.log_prob)
    with pytest.raises(TfexportError, match="token_scores need scores"):
        SearchOptions(scores=False, token_scores=True)
