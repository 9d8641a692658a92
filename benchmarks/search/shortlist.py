"""What a shortlist saves: a random base model with a vocabulary of 32,000, decoded without one, with its logits masked, and
with the output projection of the listed words alone.

    python -m benchmarks.search.shortlist FOLDER

The three take turns, on one thread; told are medians of wall time and of this process' CPU time, which other processes
disturb less, of a whole search to 24 tokens. Each sentence has 1,000 words, of so many that the batch has together.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks import base_model
from tfexport.bundle.reader import MANIFEST, Bundle, open_bundle
from tfexport.exporter.pipeline import export
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, Source, search

ROUNDS, TOKENS, WORDS = 5, 24, 1000
CASES = [(1, 1000, 1), (32, 1000, 1), (32, 6000, 1), (1, 1000, 4), (8, 3000, 4)]
"""Sentences, words of the batch together, beam."""


def bundle_in(folder: Path) -> Bundle:
    config = base_model.BASE.replace(src_vocab_size=32_000, tgt_vocab_size=32_000)
    if not (folder / "bundle" / MANIFEST).exists():
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = base_model.random_checkpoint(config, folder / "base.safetensors")
        export(checkpoint, folder / "bundle", precisions=("int8",), shortlist=True)
    return open_bundle(folder / "bundle")


def sources_of(batch: int, together: int, vocab: int) -> list[Source]:
    random = np.random.default_rng(1)
    pool = random.permutation(np.arange(4, vocab))[:together]
    return [
        Source(random.integers(4, vocab, 20).tolist(), candidates=random.choice(pool, WORDS, replace=False))
        for _ in range(batch)
    ]


def main() -> None:
    torch.set_num_threads(1)
    bundle = bundle_in(Path(sys.argv[1]))
    print("| precision | sentences | words | beam | without, ms (CPU) | masked | gathered | CPU, without / gathered |")
    print("|---|---|---|---|---|---|---|---|")
    for precision in ("float32", "int8"):
        plain, gathered = (
            load_runtime("ort-cpu", bundle, precision=precision, threads=1, shortlist=shortlist)
            for shortlist in (False, True)
        )
        for batch, together, beam in CASES:
            listed = sources_of(batch, together, bundle.config.tgt_vocab_size)
            options = SearchOptions(beam=beam, max_length=TOKENS, min_length=TOKENS - 1)
            forms = {
                "without": (plain, [Source(source.ids) for source in listed]),
                "masked": (plain, listed),
                "gathered": (gathered, listed),
            }
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
            found = {}
            for _ in range(1 + ROUNDS):  # the first warms up
                for name, (runtime, sources) in forms.items():
                    wall, cpu = time.perf_counter(), time.process_time()
                    hypotheses = search(runtime, sources, options)
                    times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
                    found[name] = [[hypothesis.ids for hypothesis in one] for one in hypotheses]
            assert found["masked"] == found["gathered"]
            median = {
                name: [statistics.median(column) * 1e3 for column in zip(*taken[1:], strict=True)]
                for name, taken in times.items()
            }
            cells = " | ".join(f"{wall:.0f} ({cpu:.0f})" for wall, cpu in median.values())
            ratio = median["without"][1] / median["gathered"][1]
            print(f"| {precision} | {batch} | {together:,} | {beam} | {cells} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
