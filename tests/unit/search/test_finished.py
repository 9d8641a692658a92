"""Finished hypotheses: several steps at once, and one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tfexport.runtimes.outputs import Continuations
from tfexport.search.finished import Ends, FinishedHypotheses
from tfexport.search.options import SearchOptions

STEPS, SENTENCES, BEAM = 8, 6, 3
OPTIONS = [
    SearchOptions(beam=BEAM),
    SearchOptions(beam=BEAM, nbest=3, patience=2.0),
    SearchOptions(beam=BEAM, length_penalty=-0.5),
    SearchOptions.for_profile("hf", beam=BEAM, early_stopping="never"),
    SearchOptions.for_profile("hf", beam=BEAM, nbest=2, early_stopping="true"),
    SearchOptions.for_profile("opennmt", beam=BEAM, length_penalty=0.0),
    SearchOptions.for_profile("fairseq", beam=BEAM, nbest=2),
    SearchOptions.for_profile("joeynmt", beam=BEAM),
]


def ends_of(flags: Any, found: Continuations) -> Ends | None:
    return Ends.of(np.flatnonzero(flags), found)


def told(found: FinishedHypotheses) -> list[Any]:
    """All that a search reads of it."""
    endings, counts = found.best(np.arange(SENTENCES))
    return [found.count.tolist(), counts.tolist(), *(field.tolist() for field in endings)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("options", OPTIONS)
def test_steps_at_once_finish_what_steps_one_by_one_finish(options: SearchOptions, seed: int) -> None:
    """Whatever comes after a sentence was done, or at its limit, changes nothing. Scores are equal now and then."""
    random = np.random.default_rng(seed)
    shape = STEPS, SENTENCES, BEAM
    limits = np.array([5, 40, 40, 7, 40, 40])
    log_probs = np.sort(random.choice([-1.0, -1.5, -2.0, -9.0], shape), axis=2)[..., ::-1]
    found = Continuations(log_probs, random.integers(0, BEAM, shape), random.integers(0, 9, shape))
    ends, new = random.random(shape) < 0.2, random.random(shape) < 0.8
    best_live = np.sort(random.choice([-0.5, -1.0, -3.0, -20.0], shape[:2]), axis=0)[::-1]
    at_limit = limits == np.arange(1, STEPS + 1)[:, None]
    at_once, one_by_one = (FinishedHypotheses(options, limits) for _ in range(2))

    every = np.arange(SENTENCES)
    stops = at_once.take(ends_of(ends, found), best_live, every, 1, at_limit, counts=new) | at_limit
    live = np.ones(SENTENCES, dtype=bool)
    for step in range(STEPS):
        sentences = every[live]
        there = slice(step, step + 1), live
        done = one_by_one.take(
            ends_of(ends[there], found.at(there)),
            *(best_live[there], sentences, step + 1, at_limit[there]),
            counts=new[there],
        )
        assert (done[0] | at_limit[step, live]).tolist() == stops[step, live].tolist()
        live[sentences] = ~(done[0] | at_limit[step, live])
    assert told(at_once) == told(one_by_one)
    assert any(told(at_once)[0])
