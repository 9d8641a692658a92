"""The kernels of beam search beside the functions of the search that define them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tfexport.runtimes.base import Ahead
from tfexport.runtimes.ort_cpu import native_beams
from tfexport.runtimes.outputs import Best
from tfexport.runtimes.shared_cache_mask import see_new_slots
from tfexport.search.beam import let_go_on, places_among_first, rank_continuations
from tfexport.search.search_batch import is_end

VOCAB, EOS, STEPS, SLOTS = 12, 2, 4, 40


class Step:
    """A step graph that returns given best tokens.

    Args:
        log_probs, ids: for each step, [steps, rows, best].
    """

    def __init__(self, log_probs: Any, ids: Any, places: int, width: int):
        self._outputs = iter(zip(log_probs, ids, strict=True))
        self._arrays = np.empty_like(log_probs[0]), np.empty_like(ids[0])
        self.config = SimpleNamespace(eos_id=EOS)
        self.tokens = np.full((places, width), -1)
        self.position = np.zeros((places, width), dtype=np.int32)
        self.binding = SimpleNamespace(run=self._run)
        self.bind_best = lambda count: self._arrays

    def _run(self) -> None:
        for array, values in zip(self._arrays, next(self._outputs), strict=True):
            array[:] = values


def scripted_best(random: np.random.Generator, rows: int, best: int, kind: str) -> tuple[Any, Any]:
    """Best tokens of some steps, with equal numbers; some of probability 0."""
    ids = np.stack([random.permutation(VOCAB)[:best] for _ in range(STEPS * rows)]).reshape(STEPS, rows, best)
    log_probs = -random.integers(0, 4, ids.shape).astype(np.float32)
    if kind == "impossible":
        log_probs[random.random(ids.shape) < 0.5] = -np.inf
        log_probs[..., 0] = 0.0
    log_probs = -np.sort(-log_probs, axis=2)
    if kind == "not finite":
        log_probs[2, -1, 0] = random.choice([np.nan, np.inf, -np.inf])
    return log_probs, ids


@pytest.mark.parametrize("kind", ["plain", "impossible", "not finite"])
@pytest.mark.parametrize("seed", range(40))
def test_steps_are_those_of_the_search(seed: int, kind: str) -> None:
    random = np.random.default_rng(seed)
    beam, count = int(random.integers(1, 5)), int(random.integers(1, 4))
    places = np.sort(random.choice(count + 2, count, replace=False))
    ends = (EOS,) if random.random() < 0.7 else (EOS, 5)
    candidates = (1 + len(ends)) * beam
    most_banned = min(3, VOCAB - candidates)  # with more, the search makes a step by itself
    banned = tuple(random.choice(VOCAB, int(random.integers(0, most_banned + 1)), replace=False).tolist())
    best = candidates + len(banned)
    width = 1 if seed % 5 == 0 else beam
    steps = 1 if width < beam else STEPS
    log_probs, ids = scripted_best(random, (count + 2) * width, best, kind)
    live = np.where(random.random((count, beam)) < 0.2, -np.inf, -random.integers(0, 3, (count, beam)).astype(float))
    live[:, 0] = 0.0
    mask = random.random((count + 2, 1, beam, SLOTS)) < 0.5
    mask[..., 8:] = False
    slot = np.full(count + 2, 8)
    step: Any = Step(log_probs, ids, count + 2, width)
    request = Ahead(np.full(count * beam, 1), live.copy(), candidates, (banned,) * STEPS, ends)
    actual_mask, actual_slot = mask.copy(), slot.copy()
    actual = native_beams.run_steps(step, request, steps, beam=beam, places=places, slot=actual_slot, mask=actual_mask)
    rows = (places[:, None] * width + (np.arange(beam) if width == beam else np.zeros(beam, dtype=int))).ravel()
    for index in range(len(actual.tokens)):
        if width == beam:
            see_new_slots(mask, places, slot[places])
        output = Best(log_probs[index][rows].astype(np.float32), ids[index][rows])
        wrong = ~np.isfinite(output.log_probs[:, 0]).reshape(count, beam).all(axis=1)
        assert (np.isnan(actual.log_probs[index]).all(axis=1) == wrong).all()
        if wrong.any():
            assert index == len(actual.tokens) - 1
            return
        kept = output.without(banned, candidates, eos=EOS) if banned else output
        ranked = rank_continuations(live, kept, candidates).at(None)
        for name, value in zip(("log_probs", "parents", "tokens"), ranked, strict=True):
            exists = ranked.log_probs[0] > -np.inf
            assert (getattr(actual, name)[index][exists] == value[0][exists]).all(), name
        is_eos = is_end(ranked.tokens, ends)
        ending = places_among_first(is_eos, beam)
        if len(ending):
            assert index == len(actual.tokens) - 1
            let_go_on(ranked, is_eos, ending, beam)
        live, parents = ranked.log_probs[0, :, :beam], ranked.parents[0, :, :beam]
        mask[places, 0] = mask[places[:, None], 0, parents]
        slot = slot + beam
        if width == beam:
            exists = live > -np.inf
            last_tokens = ranked.tokens[0, :, :beam]
    assert len(actual.tokens) == steps or len(ending)
    assert (actual_slot == slot).all()
    assert (step.position == len(actual.tokens)).all()
    exists = live > -np.inf
    assert (actual_mask[places, 0][exists] == mask[places, 0][exists]).all()
    if width == beam:
        assert (step.tokens[places][exists] == last_tokens[exists]).all()
