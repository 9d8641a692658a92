"""Steps that `ort-cpu` makes by itself, beside the same searches step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from makers.ahead import on_host
from makers.ort_bundles import CONFIG, random_model, with_end, write_bundle
from makers.tiny import SRC_VOCAB
from tfexport.bundle.reader import Bundle
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Ahead
from tfexport.runtimes.ort_cpu.beam_state import BeamState
from tfexport.runtimes.ort_cpu.context import CacheLayout
from tfexport.runtimes.ort_cpu.greedy_state import GreedyState
from tfexport.runtimes.ort_cpu.load import ort_cpu
from tfexport.runtimes.outputs import Continuations
from tfexport.search.search import SearchOptions, Source, search

RANDOM = np.random.default_rng(4)
SOURCES = [RANDOM.integers(4, SRC_VOCAB, length).tolist() for length in (7, 1, 20, 3, 12, 5, 9, 2, 17, 4, 6)]
IDS_ONLY = SearchOptions(max_length=30, scores=False)
BEAM = SearchOptions(beam=3, nbest=3, max_length=30, token_scores=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Its sentences end at different steps."""
    model = with_end(random_model(CONFIG.replace(output_bias=True, max_target_length=40), seed=8), 1.5)
    return write_bundle(model, tmp_path_factory.mktemp("ahead") / "bundle")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Its sentences end at their limits."""
    model = with_end(random_model(CONFIG.replace(output_bias=True, max_target_length=30), seed=8), -30.0)
    return write_bundle(model, tmp_path_factory.mktemp("endless") / "bundle")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of steps of each call of `search_ahead` from now on."""
    steps: list[int] = []
    for state in (BeamState, GreedyState):

        def noted(self: Any, request: Ahead, go_ahead: Any = state.search_ahead) -> Continuations:
            continuations: Continuations = go_ahead(self, request)
            steps.append(len(continuations.tokens))
            return continuations

        monkeypatch.setattr(state, "search_ahead", noted)
    return steps


@pytest.mark.parametrize("batch", [1, 2, 11])
@pytest.mark.parametrize("layout", [CacheLayout(), CacheLayout(block=1, room=3)])
@pytest.mark.parametrize(
    "options",
    [
        IDS_ONLY,
        replace(IDS_ONLY, scores=True),
        replace(IDS_ONLY, scores=True, min_length=6, suppress=(5, 9), suppress_first=(7,)),
        replace(IDS_ONLY, min_length=6, suppress=(5, 9), suppress_first=(7,)),
        BEAM,
        replace(BEAM, beam=8, nbest=8),
        replace(BEAM, min_length=6, suppress=(5, 9), suppress_first=(7,), length_penalty=1.0),
        SearchOptions.for_profile("opennmt", beam=3),
        SearchOptions.for_profile("fairseq", beam=3),
        SearchOptions.for_profile("hf", beam=3, early_stopping="never", length_penalty=1.0),
    ],
)
def test_several_steps_give_the_bits_of_single_steps(
    bundle: Bundle, calls: list[int], options: SearchOptions, layout: CacheLayout, batch: int
) -> None:
    runtime = ort_cpu(bundle, threads=1, layout=layout)
    expected = on_host(runtime, SOURCES[:batch], options)
    assert not calls
    for actual, wanted in zip(search(runtime, SOURCES[:batch], options), expected, strict=True):
        assert [h.ids for h in actual] == [h.ids for h in wanted]
        assert not options.scores or actual == wanted
    assert calls


@pytest.mark.parametrize("options", [IDS_ONLY, replace(IDS_ONLY, scores=True), replace(BEAM, nbest=1)])
def test_as_many_steps_as_no_sentence_can_end_in(endless: Bundle, calls: list[int], options: SearchOptions) -> None:
    """At the limit of a short sentence the batch stops; afterwards the limits of the others count."""
    sources = [[5, 6, 7], *([8] * length for length in (20, 20, 20, 20))]
    runtime = ort_cpu(endless, threads=1, layout=CacheLayout(room=32))
    limited = replace(options, max_length=30, max_length_ratio=1.0)
    expected = [[h.ids for h in nbest] for nbest in on_host(runtime, sources, limited)]
    assert [[h.ids for h in nbest] for nbest in search(runtime, sources, limited)] == expected
    assert [len(nbest[0]) for nbest in expected] == [3, 20, 20, 20, 20]
    assert calls == [3, 8, 8, 1]


@pytest.mark.parametrize("beam", [1, 3])
def test_no_step_after_the_last_position(endless: Bundle, beam: int) -> None:
    runtime: Any = ort_cpu(endless, threads=1, layout=CacheLayout(room=16))
    state = runtime.encode(np.array([[5, 6]]), np.array([2]), beam=beam)
    log_probs = None if beam == 1 else np.zeros((1, beam))
    request = Ahead(np.full(beam, 1), log_probs, 2 * beam - (beam == 1), ((),) * 8, (), best_only=True)
    made = [len(runtime.search_ahead(state, request)[0].tokens) for _ in range(4)]
    assert made == [8, 8, 8, 6]
    with pytest.raises(TfexportError, match="30 target positions"):
        runtime.search_ahead(state, request)


@pytest.mark.parametrize(
    ("options", "sources"),
    [
        (replace(BEAM, no_repeat_ngram=2), SOURCES),
        (SearchOptions.for_profile("marian", beam=3), SOURCES),
        (IDS_ONLY, [Source(source, prefix=(7,) * 40) for source in SOURCES]),
    ],
)
def test_other_searches_see_each_step(
    bundle: Bundle, calls: list[int], options: SearchOptions, sources: Any, caplog: pytest.LogCaptureFixture
) -> None:
    search(ort_cpu(bundle, threads=1), sources, options)
    assert not calls
    assert not caplog.records


def test_without_kernels_beams_see_each_step(bundle: Bundle, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFEXPORT_KERNELS", "0")
    runtime = ort_cpu(bundle, threads=1)
    search(runtime, SOURCES, BEAM)
    assert not calls
    expected = [[h.ids for h in nbest] for nbest in on_host(runtime, SOURCES, IDS_ONLY)]
    assert [[h.ids for h in nbest] for nbest in search(runtime, SOURCES, IDS_ONLY)] == expected
    assert max(calls) > 1
