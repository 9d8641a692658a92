"""The search for what stays in float32: what harms, and nothing more."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tfexport.errors import TfexportError
from tfexport.verification import budget as module
from tfexport.verification.budget import Budget, Choice, choose


def chosen(monkeypatch: pytest.MonkeyPatch, losses: dict[str, float], limit: float) -> tuple[Choice, list[int]]:
    """The choice where each module that is not kept loses its share, and how many were kept at each trial."""
    kept: list[int] = []

    class Trials:
        count = 0

        def __init__(self, *_: Any) -> None:
            pass

        def loss(self, keep: Collection[str]) -> float:
            kept.append(len(keep))
            return sum(loss for name, loss in losses.items() if name not in keep)

        harm = loss

    class OfTwo:
        sentences = 2

    monkeypatch.setattr(module, "Trials", Trials)
    monkeypatch.setattr(module, "modules_of", lambda *_: dict.fromkeys(losses, 10))
    nothing: Any = None
    text: Any = OfTwo()
    return choose(nothing, "int8", Path(), text, Budget("bleu", limit)), kept


@pytest.mark.parametrize(
    ("text", "within", "beyond"),
    [
        ("bleu=0.1", 0.1, 0.11),
        ("chrf=0", -1.0, 0.001),
        ("top1=0.999", 0.001, 0.0011),
        ("identical=1", 0.0, 0.001),
    ],
)
def test_budget_holds_what_it_says(text: str, within: float, beyond: float) -> None:
    budget = Budget.parse(text)
    assert str(budget) == text
    assert budget.holds(within)
    assert not budget.holds(beyond)
    assert not budget.holds(math.inf)


@pytest.mark.parametrize(
    "text", ["", "bleu", "bleu=", "bleu=x", "bleu=-1", "top1=1.5", "ter=0.1", "top1=nan", "bleu=inf"]
)
def test_budget_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(TfexportError, match="Give bleu=POINTS"):
        Budget.parse(text)


def test_nothing_is_kept_where_nothing_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, trials = chosen(monkeypatch, {"a": 0.1, "b": 0.2}, 0.5)
    assert choice.kept == ()
    assert choice.lost == choice.lost_without == pytest.approx(0.3)
    assert trials == [0]


def test_exactly_what_is_needed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {f"m{i}": 0.001 for i in range(60)} | {"bad": 1.0, "worse": 2.0}
    choice, trials = chosen(monkeypatch, losses, 0.1)
    assert {kept.module: kept.loss for kept in choice.kept} == pytest.approx({"bad": 1.06, "worse": 2.06})
    assert choice.lost == pytest.approx(0.06)
    assert choice.lost_without == pytest.approx(3.06)
    assert len(trials) == 1 + 1 + 62 + 6 + 2 + 1  # nothing, all, each alone, the bisection, each let go, the choice


def test_what_is_kept_in_vain_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, _ = chosen(monkeypatch, {"a": 3.0, "b": 2.0, "c": 2.0}, 3.0)
    assert [kept.module for kept in choice.kept] in (["b", "c"], ["a", "b"], ["a", "c"])
    without = choice.lost + min({"a": 3.0, "b": 2.0, "c": 2.0}[kept.module] for kept in choice.kept)
    assert without > 3.0


def test_budget_that_nothing_keeps_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Budget, "holds", lambda *_: False)
    with pytest.raises(TfexportError, match="even with all modules in fp32"):
        chosen(monkeypatch, {"a": 1.0}, 0.1)
