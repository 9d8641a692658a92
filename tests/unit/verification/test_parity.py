"""How a comparison judges: errors, best tokens and sentences, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tfexport.contract import Precision
from tfexport.graph_checks.rounding import EPS, FACTOR, FLOOR
from tfexport.verification.report import LIMITS, Divergence, Errors, Limits, ParityReport, Position, kl_divergence


def report_of(
    precision: Precision, *, limits: Limits | None = None, steps: int = 10_000, agree: int = 10_000, **found: Any
) -> ParityReport:
    """A report that passes but for what was `found`."""
    positions = [Position(size=1.0, steps=steps, behind=[1.0] * (steps - agree))] if steps else []
    perfect = {"sentences": 10, "identical": 10, "positions": positions}
    return ParityReport("x", precision, limits or LIMITS[precision], 1, **{**perfect, **found})


def divergence(sentence: int, margin: float, *, is_tie: bool, loss: float = 0.0) -> Divergence:
    return Divergence(sentence, 1, 5, 6, margin, ((5,), (6,)), math.inf if is_tie else 0.0, loss)


def test_errors_do_not_pass_over_nan() -> None:
    errors, zeros = Errors(), np.zeros(3)
    errors.compare(zeros, zeros, np.array([0.0, np.nan, 0.0]))
    errors.compare(zeros, zeros, np.ones(3))
    assert np.isnan(errors.error)
    for limits in (LIMITS["float32"], Limits(1.0, 1.0, 1.0, error=10.0)):
        assert not report_of("float32", cross={"cross.0.key": errors}, limits=limits).passed
        position = Position(10_000)
        position.compare(np.zeros((1, 3)), 0.0, np.array([[0.0, np.nan, 0.0]]), math.nan)
        assert not report_of("float32", positions=[position], limits=limits).passed


def test_errors_are_of_the_exact_numbers() -> None:
    exact, own, found = np.array([1.0, -4.0]), np.array([1.5, -4.0]), np.array([1.0, -6.0])
    errors = Errors()
    errors.compare(exact, own, found)  # type: ignore[arg-type]
    assert (errors.error, errors.own, errors.size, errors.mean) == (2.0, 0.5, 4.0, 1.0)
    errors.compare(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros((0, 2)))  # type: ignore[arg-type]
    assert (errors.error, errors.count) == (2.0, 2)


def test_a_position_tells_by_how_much_another_token_is_behind() -> None:
    exact = np.array([[3.0, 1.0, 2.5], [0.0, 4.0, 1.0]])
    position = Position()
    position.compare(exact, 0.25, np.array([[3.0, 1.0, 3.5], [0.0, 4.0, 1.0]], np.float32), 1.0)
    assert (position.steps, position.error, position.own, position.size) == (2, 1.0, 0.25, 4.0)
    assert position.behind == [0.5]
    assert position.divergence > 0


@pytest.mark.parametrize("precision", LIMITS)
def test_a_divergence_has_a_limit(precision: Precision) -> None:
    """Of all steps in the mean; in float32 it follows from what a logit may be off by."""
    report = report_of(precision)
    most = report.allowed_divergence
    assert (most < 1e-11) if precision == "float32" else (most == LIMITS[precision].kl > 0)
    report.positions[0].divergence = 0.9 * most * report.steps
    assert report.passed
    for divergence in (1.1 * most * report.steps, math.nan):
        report.positions[0].divergence = divergence
        assert [failure.split(" is ")[0] for failure in report.failures] == ["the mean KL divergence"]


def test_few_outputs_may_be_those_of_a_narrower_beam() -> None:
    """A runtime whose beam is always too narrow loses nothing against a narrower beam."""
    for count, passes in ((0, True), (5, True), (6, False), (16, False)):
        narrower = [replace(divergence(number + 1, 0.0, is_tie=False), beam=2) for number in range(count)]
        report = report_of("int8", sentences=16, identical=16 - count, divergences=narrower)
        assert (report.narrower, report.passed) == (count, passes), report.failures
        assert report.summary()["narrower"] == count


def test_report_of_nothing_does_not_pass() -> None:
    for precision in LIMITS:
        assert not ParityReport("x", precision, LIMITS[precision], 1).passed
        assert not report_of(precision, sentences=0, identical=0, steps=0).passed


@pytest.mark.parametrize(
    ("precision", "fewest"),
    [("float32", 10_000), ("float16", 9_870), ("bfloat16", 9_433), ("int8", 8_906), ("int4", 4_788)],
)
def test_best_tokens_of_each_precision(precision: Precision, fewest: int) -> None:
    """All of float32's, 99 % of float16's and so on, less three deviations: of float16 100 of 10,000 may differ, +- 10."""
    assert report_of(precision, agree=fewest).passed
    failed = report_of(precision, agree=fewest - 1)
    assert failed.failures == [f"the best token is the same at {fewest - 1} of 10000 steps, {fewest} are required"]


def test_few_steps_need_no_larger_share_than_many() -> None:
    assert report_of("float16", steps=1000, agree=981).fewest_agreeing == 981
    assert report_of("float16", steps=1, agree=1).fewest_agreeing == 1
    assert report_of("float32", steps=3, agree=3).fewest_agreeing == 3


def test_float32_may_be_off_by_what_rounding_explains() -> None:
    rounding = {"own": 1e-6, "size": 10.0}
    most = FACTOR * 1e-6 + FLOOR * EPS["float32"] * 10.0
    for error, passes in ((most * 0.999, True), (most * 1.001, False), (math.nan, False), (math.inf, False)):
        report = report_of("float32", cross={"cross.0.key": Errors(), "cross.0.value": Errors(error, **rounding)})
        assert report.passed == passes
        assert ("cross.0.value is off by" in " ".join(report.failures)) == (not passes)
        report = report_of("float32", positions=[Position(steps=9), Position(error, **rounding, steps=9)])
        assert report.passed == passes
        assert ("logits of step 2 are off by" in " ".join(report.failures)) == (not passes)


def test_below_float32_outputs_are_judged_and_graphs_elsewhere() -> None:
    """The numbers of rounded weights are other ones: what they compute is held against their definition."""
    for precision in LIMITS:
        report = report_of(precision, positions=[Position(5.0, 1e-6, 10.0, steps=10_000)])
        assert report.passed == (precision != "float32")
        own = replace(LIMITS[precision], error=4.0)  # of float32 alone
        assert replace(report, limits=own).passed == (precision != "float32")
        assert replace(report, limits=replace(own, error=5.0)).passed
        wrong = replace(report, limits=own, positions=[Position(math.nan, steps=9)])
        assert not wrong.passed


def test_a_best_token_that_is_as_good_is_the_same() -> None:
    """Where float64 prefers its own by less than two logits may be off, float32 may prefer the other."""
    tie = 2 * (FACTOR * 1e-6 + FLOOR * EPS["float32"] * 10.0)
    for margin, same in ((tie * 0.999, 10), (tie * 1.001, 9), (math.nan, 9)):
        position = Position(own=1e-6, size=10.0, steps=10, behind=[margin])
        report = report_of("float32", positions=[position])
        assert (report.top1_agree, report.passed) == (same, same == 10)


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8", "int4"])
def test_below_float32_a_best_token_is_as_good_within_the_mean_loss(precision: Precision) -> None:
    """A model that is not trained prefers no token."""
    loss = LIMITS[precision].loss
    for margin, same in ((loss * 0.999, 10), (loss * 1.001, 9), (math.nan, 9)):
        position = Position(own=1e-6, size=10.0, steps=10, behind=[margin])
        assert report_of(precision, positions=[position]).top1_agree == same


def test_a_float32_sentence_that_differs_fails_and_one_in_half_precision_is_only_told() -> None:
    for precision in LIMITS:
        report = report_of(precision, identical=9, divergences=[divergence(4, 0.5, is_tie=False)])
        assert report.passed == (precision != "float32")
        assert report.to_dict()["divergences"][0]["sentence"] == 4
        assert report.to_dict()["precision"] == precision


def test_a_tie_that_flipped_does_not_fail() -> None:
    tie, error = divergence(4, 1e-6, is_tie=True), divergence(5, 0.5, is_tie=False)
    assert report_of("float32", identical=9, divergences=[tie]).passed
    assert not report_of("float32", identical=8, divergences=[tie, error]).passed
    assert report_of("float32", identical=9, divergences=[tie]).ties == 1


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8", "int4"])
def test_below_float32_other_outputs_may_cost_so_much(precision: Precision) -> None:
    """In the mean over all sentences, and the worst of them."""
    limits = LIMITS[precision]
    at_most = [divergence(4, 0.5, is_tie=False, loss=4 * limits.loss * 0.999)]
    above = [divergence(4, 0.5, is_tie=False, loss=4 * limits.loss * 1.001)]
    assert report_of(precision, sentences=4, identical=3, divergences=at_most).passed
    assert not report_of(precision, sentences=4, identical=3, divergences=above).passed
    assert not report_of(precision, identical=9, divergences=[divergence(4, 0.5, is_tie=False, loss=math.nan)]).passed
    for furthest, passes in ((limits.furthest * 0.999, True), (limits.furthest * 1.001, False)):
        one = [divergence(4, 0.5, is_tie=False, loss=furthest)]
        assert report_of(precision, sentences=1000, identical=999, divergences=one).passed == passes


def test_an_output_that_is_none_of_its_logits_fails_in_every_precision() -> None:
    for precision in LIMITS:
        report = report_of(precision, founded=[(2, 0.0), (3, 1.0), (4, -1.0), (5, math.nan)])
        assert not report.passed
        assert report.failures == [
            "2 outputs do not follow from the logits of the runtime, the first that of sentence 3"
        ]


def test_divergence_of_distributions_by_hand() -> None:
    """KL(p || q) = sum of p log(p / q), whatever is added to all logits of a row."""
    p, q = np.array([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]]), np.array([[0.25, 0.5, 0.25], [0.9, 0.05, 0.05]])
    logits = [(np.log(rows) + 7).astype(np.float32) for rows in (p, q)]
    wanted = [0.5 * math.log(2) + 0.25 * math.log(0.5), 0.0]
    np.testing.assert_allclose(kl_divergence(*logits), wanted, atol=1e-6)
