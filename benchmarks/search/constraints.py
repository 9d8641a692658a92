"""What required phrases cost: beam search with none, one and five of them for each sentence.

    python -m benchmarks.search.constraints BUNDLE TEXT

Phrases are random pieces of one or two tokens of what the model says: of the same sentence, which it would have said
anyway, and of another, which it would not. Searches take turns; told are medians of the wall time of a whole search, with
one thread and batches of 32.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tfexport.bundle.reader import open_bundle
from tfexport.decoding.line_reader import Reader
from tfexport.runtimes import load_runtime
from tfexport.search.hypothesis import Hypothesis, Phrase, Source
from tfexport.search.search import SearchOptions, search

ROUNDS, BATCH, BEAM, COUNTS = 5, 32, 5, (1, 5)


def with_phrases(sources: Sequence[Source], outputs: Sequence[Hypothesis], count: int) -> list[Source]:
    """Sources with `count` pieces of their outputs, which do not overlap where there are enough."""
    random, found = np.random.default_rng(1), []
    for source, output in zip(sources, outputs, strict=True):
        ids = output.ids[:-1]
        places = sorted(random.permutation(np.arange(0, len(ids), 2))[:count].tolist())
        pieces = [ids[place : place + int(random.integers(1, 3))] for place in places]
        found.append(replace(source, required=tuple(map(Phrase, pieces))))
    return found


def main(bundle_folder: str, text: str) -> None:
    bundle = open_bundle(Path(bundle_folder))
    runtime, reader = load_runtime("ort-cpu", bundle, threads=1), Reader.of(bundle, "text")
    sources = [Source(reader.ids(line)) for line in Path(text).read_bytes().splitlines()[: 2 * BATCH]]
    options = SearchOptions(beam=BEAM)
    outputs = [best for best, *_ in search(runtime, sources, options)]
    of_others = [*outputs[1:], outputs[0]]
    forms = {("none", 0): sources}
    forms |= {("of the sentence", count): with_phrases(sources, outputs, count) for count in COUNTS}
    forms |= {("of another", count): with_phrases(sources, of_others, count) for count in COUNTS}
    times: dict[tuple[str, int], list[float]] = {form: [] for form in forms}
    tokens = dict.fromkeys(forms, 0.0)
    for _ in range(1 + ROUNDS):  # the first warms up
        for form, of_form in forms.items():
            begin, found = time.perf_counter(), list[list[Hypothesis]]()
            for start in range(0, len(of_form), BATCH):
                found += search(runtime, of_form[start : start + BATCH], options)
            times[form].append(time.perf_counter() - begin)
            tokens[form] = statistics.mean(len(best.ids) for best, *_ in found)
            assert not any(best.missing for best, *_ in found)
    print("| phrases | number | tokens | sentences / s | x none |")
    print("|---|---|---|---|---|")
    plain = statistics.median(times["none", 0][1:])
    for (kind, count), taken in times.items():
        seconds = statistics.median(taken[1:])
        speed, part = len(sources) / seconds, seconds / plain
        print(f"| {kind} | {count} | {tokens[kind, count]:.1f} | {speed:.0f} | {part:.2f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
