"""The rule of what is allowed: a few times PyTorch's own distance from float64, and a few units in the last place."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tfexport.contract import PRECISIONS, Precision
from tfexport.graph_checks.rounding import EPS, FACTOR, FLOOR, Rounding, logit_errors, logit_size, slack_of_hopeless


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_eps_is_that_of_the_precision(precision: Precision) -> None:
    assert torch.finfo(getattr(torch, precision)).eps == EPS[precision]


def test_what_is_allowed_is_a_multiple_of_pytorch_s_own_and_a_floor() -> None:
    rounding = Rounding(own=3.0, size=5.0)
    for precision in PRECISIONS.values():
        eps = EPS.get(precision, np.finfo(np.float32).eps)  # quantized graphs compute in float32
        assert rounding.allowed(precision) == FACTOR * 3.0 + FLOOR * eps * 5.0
    assert Rounding(own=3.0).allowed("float32") == 8 * 3.0
    assert Rounding(size=5.0).allowed("float16") == 4 * 2**-10 * 5.0
    assert Rounding().allowed("float32") == 0


@pytest.mark.parametrize("precision", list(PRECISIONS.values()))
def test_an_error_holds_up_to_what_is_allowed(precision: Precision) -> None:
    most = Rounding(own=1e-6, size=7.0).allowed(precision)
    for error, holds in (
        (0.0, True),
        (most, True),
        (math.nextafter(most, 1), False),
        (math.inf, False),
        (math.nan, False),
    ):
        assert Rounding(error, 1e-6, 7.0).holds(precision) == holds
    assert Rounding().holds(precision)  # of zeros that are zeros


def test_the_largest_of_all_tensors_counts() -> None:
    rounding = Rounding()
    for numbers in ((1.0, 0.5, 10.0), (3.0, 0.1, 2.0), (2.0, 0.7, 30.0)):
        rounding.add(*numbers)
    assert rounding == Rounding(3.0, 0.7, 30.0)


def test_an_error_that_is_no_number_stays() -> None:
    """max() passes over NaN where it is the second of two, and max(1.0, nan) is 1.0."""
    for errors in ([math.nan, 1.0], [1.0, math.nan], [1.0, math.nan, 2.0]):
        rounding = Rounding()
        for error in errors:
            rounding.add(error, 1.0, 1.0)
        assert math.isnan(rounding.error)
        assert not rounding.holds("float32")


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_numbers_of_pytorch_s_own_that_are_none_allow_nothing_more(bad: float) -> None:
    """Where it overflows itself, an overflow is no measure: else anything would pass."""
    rounding = Rounding()
    rounding.add(1.0, bad, 5.0)
    assert rounding.allowed("float32") == Rounding(size=5.0).allowed("float32")
    assert not rounding.holds("float32")
    rounding.add(0.0, 0.25, bad)
    assert (rounding.own, rounding.size) == (0.25, 5.0)
    rounding.add(0.0, bad, bad)
    assert (rounding.own, rounding.size) == (0.25, 5.0)


@pytest.mark.parametrize("n", [256, 768, 2048])
def test_the_mean_limit_of_squares_added_one_by_one_explains_a_sum_in_one_chain(n: int) -> None:
    """In float32, of rows of a norm without biases; and a fault of 0.002 % is no rounding."""
    rows = np.random.default_rng(1).normal(size=(200, n)).astype(np.float32)

    def normed(squares: np.ndarray) -> np.ndarray:
        return (rows / np.sqrt(squares[:, None] / np.float32(n))).astype(np.float64)

    exact = rows / np.sqrt(np.square(rows.astype(np.float64)).mean(axis=1, keepdims=True))
    blocks = np.abs(normed(np.square(rows).sum(axis=1, dtype=np.float32)) - exact)
    chain = np.abs(normed(np.cumsum(np.square(rows), axis=1, dtype=np.float32)[:, -1]) - exact)
    allowed = Rounding.of(chain, blocks, np.abs(exact))
    if n == 2048:
        assert not allowed.holds("float32")
    allowed.chain = n
    assert allowed.holds("float32")
    fault = Rounding.of(np.abs(exact * 1.00002 - exact), blocks, np.abs(exact))
    fault.chain = n
    assert not fault.holds("float32")


def test_hopeless_logits_have_a_slack_of_their_own() -> None:
    exact = np.array([[3.0, -2.0, -1e9], [1.0, -999.0, 0.0]])  # a distance of 1000 is within reach
    slack = slack_of_hopeless(exact)
    assert slack is not None
    assert slack.tolist() == [[0, 0, (1e9 + 3) / 16], [0, 0, 0]]
    assert logit_size(exact) == 999.0
    assert logit_size(exact[:1]) == 3.0
    for found, error in (
        (-1e9 - 64, 0.25),
        (5.0, 1e9),
        (-9e8, 1e9 * 3 / 80),
        (-math.inf, math.inf),
        (math.nan, math.nan),
    ):
        other = exact.copy()
        other[:, 0] += 0.25
        other[0, 2] = found
        assert logit_errors(exact, other) == pytest.approx([error, 0.25], rel=0.1, nan_ok=True), found


def test_logits_without_hopeless_words_have_no_slack() -> None:
    exact = np.array([[3.0, -2.0], [990.0, -1.0]])
    assert slack_of_hopeless(exact) is None
    assert logit_size(exact) == 990.0
    assert logit_errors(exact, exact + np.array([0.5, -1.0])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_infinite_logit_is_not_hopeless(bad: float) -> None:
    slack = slack_of_hopeless(np.array([[3.0, bad, -1.0], [2.0, -1e9, -1.0]]))
    assert slack is not None
    assert slack[0].tolist() == [0, 0, 0]
