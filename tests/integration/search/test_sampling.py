"""Drawn tokens on a bundle."""

from __future__ import annotations

from pathlib import Path

from tfexport.bundle.reader import open_bundle
from tfexport.decoding.batches import decode_all
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, Source, search


def test_a_bundle_draws_the_same_alone_in_batches_and_with_workers(tiny_bundle: Path) -> None:
    runtime = load_runtime("ort-cpu", open_bundle(tiny_bundle), threads=1)
    sources = [Source([2, 4 + line % 20, *[7] * (line % 5), 3], line=line) for line in range(30)]
    options = SearchOptions(samples=3, top_p=0.9, seed=11, max_length=12)
    alone = [[h.ids for h in search(runtime, [source], options)[0]] for source in sources]
    for batch_size, workers in ((7, 1), (30, 1), (4, 2)):
        together = decode_all(runtime, sources, options, batch_size=batch_size, workers=workers)
        assert [[h.ids for h in hypotheses] for hypotheses in together] == alone
    assert len({ids for several in alone for ids in several}) > 60


def test_the_best_token_alone_is_greedy_search(tiny_bundle: Path) -> None:
    runtime = load_runtime("ort-cpu", open_bundle(tiny_bundle), threads=1)
    sources = [[2, 5, 6, 3], [2, 9, 3], [2, 30, 4, 4, 7, 3]]
    greedy = [h.ids for [h] in search(runtime, sources, SearchOptions())]
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-5}):
        found = search(runtime, sources, SearchOptions(samples=2, **settings))  # type: ignore[arg-type]
        assert [h.ids for hypotheses in found for h in hypotheses] == [ids for ids in greedy for _ in range(2)]
