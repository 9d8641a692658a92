"""Searches that a runtime makes by itself, several steps at once, beside the same searches on the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from makers.ahead import ahead_runtime, late_runtime, on_host
from makers.tiny import SRC_VOCAB
from tfexport.bundle.reader import open_bundle
from tfexport.runtimes.buckets import Buckets
from tfexport.runtimes.loop import LoopRuntime
from tfexport.runtimes.ort import ort_cpu_portable
from tfexport.search.search import SearchOptions, Source, search

RANDOM = np.random.default_rng(4)
SOURCES = [RANDOM.integers(4, SRC_VOCAB, length).tolist() for length in (7, 1, 20, 3, 12, 5, 9, 2, 17, 4, 6)]
BUCKETS = Buckets((8, 16, 24), (1, 2, 4, 8, 16), (8, 16, 20), shrink=2)


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> LoopRuntime:
    return ahead_runtime(tiny_bundle, tmp_path_factory.mktemp("search"), BUCKETS)


def launches(runtime: LoopRuntime, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths after which the runtime went ahead, from now on."""
    found: list[int] = []
    go_ahead = LoopRuntime.search_ahead

    def noted(self: LoopRuntime, state: Any, request: Any) -> Any:
        found.append(state._filled)
        return go_ahead(self, state, request)

    monkeypatch.setattr(LoopRuntime, "search_ahead", noted)
    return found


@pytest.mark.parametrize("beam", [1, 3, 8])
def test_the_device_finds_what_the_host_finds(
    runtime: LoopRuntime, tiny_bundle: Path, beam: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits. The second time over the memory and the recordings of the first."""
    options = SearchOptions(beam=beam, nbest=beam, max_length=19, token_scores=True)
    went = launches(runtime, monkeypatch)
    wanted = on_host(runtime, SOURCES, options)
    assert not went
    for _ in range(2):
        assert search(runtime, SOURCES, options) == wanted
    assert set(went) == {0, 8, 16}
    other = search(ort_cpu_portable(open_bundle(tiny_bundle), threads=1), SOURCES, options)
    assert [[h.ids for h in found] for found in wanted] == [[h.ids for h in found] for found in other]


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("make", [ahead_runtime, late_runtime])
def test_the_next_steps_begin_before_the_host_has_taken_the_last(
    tiny_bundle: Path, tmp_path: Path, make: Any, beam: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that does all at once, and on one that does nothing before it is waited for. They do not begin where a
    smaller batch may come first.
    """
    runtime = make(tiny_bundle, tmp_path, Buckets((24,), (4, 16), (20,), shrink=2))
    options = SearchOptions(beam=beam, nbest=beam, min_length=18, max_length=24)
    wanted = on_host(runtime, SOURCES, options)
    begin = LoopRuntime.begin_ahead
    for certain, begins in ((None, True), (1, False)):
        begun = []

        def noted(
            self: Any, state: Any, request: Any, sentences: int, certain: Any = certain, begun: Any = begun
        ) -> None:
            begin(self, state, request, certain or sentences)
            begun.append(state._begun is not None)

        monkeypatch.setattr(LoopRuntime, "begin_ahead", noted)
        for _ in range(2):
            assert search(runtime, SOURCES, options) == wanted
        assert begun == [begins] * 4


def test_a_wide_beam_takes_its_best_tokens_from_the_logits(runtime: LoopRuntime) -> None:
    options = SearchOptions(beam=11, nbest=11, max_length=19)
    for one, other in zip(search(runtime, SOURCES, options), on_host(runtime, SOURCES, options), strict=True):
        assert [h.ids for h in one] == [h.ids for h in other]
        assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "sources", "lengths"),
    [
        (SearchOptions(beam=3, min_length=4, suppress=(5, 9)), SOURCES, {0, 8, 16}),
        (SearchOptions(min_length=4, suppress=(5, 9)), SOURCES, {0, 8, 16}),
        (SearchOptions(beam=2), [Source(source, prefix=(7, 8)) for source in SOURCES], {2, 10, 18}),
        (SearchOptions.for_profile("opennmt", beam=3), SOURCES, {1, 9, 17}),
        (SearchOptions.for_profile("marian", beam=3), SOURCES, set()),
        (SearchOptions.for_profile("fairseq", beam=3, max_length=19), SOURCES, {0, 8}),
        (SearchOptions(samples=2), SOURCES, set()),
        (SearchOptions(beam=2, no_repeat_ngram=2), SOURCES, set()),
    ],
)
def test_the_host_makes_the_steps_that_need_more_than_the_best_tokens(
    runtime: LoopRuntime,
    options: SearchOptions,
    sources: Sequence[Any],
    lengths: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = on_host(runtime, sources, options)
    went = launches(runtime, monkeypatch)
    assert search(runtime, sources, options) == wanted
    assert lengths >= set(went) >= set(sorted(lengths)[:1])


def test_numbers_that_are_not_finite_are_an_error(runtime: LoopRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    from tfexport.errors import TfexportError
    from tfexport.runtimes import launches as module

    run = module.Recording.__call__

    def spoilt(self: module.Recording) -> None:
        run(self)
        name = "best.log_probs" if "candidates.tokens" in self.log.names else "next.log_probs"
        self.log[name][2] = np.nan

    monkeypatch.setattr(module.Recording, "__call__", spoilt)
    for beam in (1, 3):
        with pytest.raises(TfexportError, match="not finite numbers"):
            search(runtime, SOURCES, SearchOptions(beam=beam))
