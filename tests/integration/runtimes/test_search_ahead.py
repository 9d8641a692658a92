"""Searches that a runtime makes by itself, several steps at once, beside the same searches on the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.ahead import ahead_runtime
from tests.support.tiny import MAX_LENGTH, SRC_VOCAB
from tfexport.bundle.reader import open_bundle
from tfexport.decoding.search import Hypothesis, SearchOptions, Source, search, search_steps
from tfexport.runtimes.buckets import Buckets, cpu_buckets
from tfexport.runtimes.loop import LoopRuntime
from tfexport.runtimes.ort import ort_cpu_portable

RANDOM = np.random.default_rng(4)
SOURCES = [RANDOM.integers(4, SRC_VOCAB, length).tolist() for length in (7, 1, 20, 3, 12, 5, 9, 2, 17, 4, 6)]
BUCKETS = Buckets((8, 16, 24), (1, 2, 4, 8, 16), (8, 16, 20), shrink=2)


def on_host(runtime: LoopRuntime, sources: list[list[int]], options: SearchOptions) -> list[list[Hypothesis]]:
    """What the search finds that sees each step."""
    steps = search_steps(runtime, sources, options)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)


@pytest.fixture
def runtime(tiny_bundle: Path, tmp_path: Path) -> LoopRuntime:
    return ahead_runtime(tiny_bundle, tmp_path, BUCKETS)


@pytest.mark.parametrize("beam", [1, 2, 3, 5, 9])
def test_the_device_finds_what_the_host_finds(runtime: LoopRuntime, tiny_bundle: Path, beam: int) -> None:
    options = SearchOptions(beam=beam, nbest=beam, max_length=19, token_scores=True)
    wanted = on_host(runtime, SOURCES, options)
    for _ in range(2):
        assert search(runtime, SOURCES, options) == wanted
    other = search(ort_cpu_portable(open_bundle(tiny_bundle), threads=1), SOURCES, options)
    assert [[h.ids for h in found] for found in wanted] == [[h.ids for h in found] for found in other]
