"""What an output costs that is not the reference's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tfexport.search.search import SearchOptions
from tfexport.verification import compare
from tfexport.verification.compare import loss_per_token
from tfexport.verification.report import Divergence


def test_greedy_outputs_are_compared_by_the_mean_of_a_token() -> None:
    own, theirs = np.full(8, -0.5), np.full(2, -0.75)
    assert loss_per_token(SearchOptions(), own, theirs) == pytest.approx(0.25)


@pytest.mark.parametrize("profile", ["tfexport", "hf", "marian"])
def test_outputs_of_a_beam_that_score_alike_cost_little_whatever_their_lengths(profile: str) -> None:
    """By the mean of a token, a short output may seem to cost nats that its score does not have."""
    options = SearchOptions(beam=4, profile=profile, length_penalty=0.6)
    own = np.full(24, -0.6)
    score = options.normalise(float(own.sum()), 24)
    theirs = np.full(2, (score - 0.1) / options.normalise(1.0, 2) / 2)
    assert options.normalise(float(theirs.sum()), 2) == pytest.approx(score - 0.1)
    assert own.mean() - theirs.mean() > 0.8
    assert 0 < loss_per_token(options, own, theirs) < 0.1


@pytest.mark.parametrize(("profile", "penalty"), [("tfexport", 0.6), ("hf", 1.0), ("hf", 2.0), ("joeynmt", -1)])
def test_of_one_length_it_is_the_difference_of_the_means(profile: str, penalty: float) -> None:
    options = SearchOptions(beam=4, profile=profile, length_penalty=penalty)
    own, theirs = np.linspace(-1, -0.25, 7), np.linspace(-2, -0.5, 7)
    assert loss_per_token(options, own, theirs) == pytest.approx(own.mean() - theirs.mean())


def test_a_short_output_that_rounding_removes_from_the_beam_costs_no_more_than_its_tokens() -> None:
    """Scores are sums here. An output of one token scores -1, the 24 tokens that replace it -12."""
    options = SearchOptions(beam=4, length_penalty=0.0)
    own, theirs = np.array([-1.0]), np.full(24, -0.5)
    assert loss_per_token(options, own, theirs) == pytest.approx(11 / 24)


@pytest.mark.parametrize(("narrower", "loss", "beam"), [(-0.9, 0.1, 1), (-1.5, 0.0, 1), (-0.25, 0.5, None)])
def test_an_output_that_beats_a_narrower_beam_gains_nothing(
    narrower: float, loss: float, beam: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gain would make up for the losses of other sentences."""
    found = SimpleNamespace(log_probs=lambda row: np.full(4, -1.0))
    alone: Any = SimpleNamespace(of=lambda *arguments: SimpleNamespace(log_probs=lambda row: np.full(4, narrower)))
    memory: Any = SimpleNamespace(sources=[[4]])
    monkeypatch.setattr(compare, "Memory", SimpleNamespace(of=lambda *arguments: memory))
    monkeypatch.setattr(compare, "Along", alone)
    monkeypatch.setattr(compare, "search", lambda *arguments: [[SimpleNamespace(ids=(5,))]])
    divergences = [Divergence(1, 1, 5, 6, 0.0, ((5,), (6,)), 0.0, 0.5)]
    compare._search_narrower(SimpleNamespace(), memory, found, divergences, SearchOptions(beam=2), 0.1)  # type: ignore[arg-type]
    assert (divergences[0].loss, divergences[0].beam) == (pytest.approx(loss), beam)
