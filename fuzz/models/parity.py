"""Random models through export and decoding, against PyTorch: the same tokens, greedy and with beams, in every dialect.

    python -m fuzz.models.parity [--models 300] [--seed 0]

Sizes, heads, norms, positions, ties, biases, activations and depths are drawn at random, and so are weights and sources.
Each model is written as a bundle whose graphs are checked as those of an export are, in float32 and in another precision;
then ONNX Runtime decodes over two of its dialects. The exit code is 1 where one differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from fuzz.models.random_models import random_config, random_model
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.bundle.writer import write_manifest
from tfexport.config import ModelConfig
from tfexport.contract import PRECISIONS, Precision
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.weights import write_variant
from tfexport.graph_checks.definition import Definition
from tfexport.graph_checks.gate import check_written
from tfexport.models.transformer import Transformer
from tfexport.runtimes.ort import ort_cpu_portable
from tfexport.runtimes.ort_cpu.load import ort_cpu
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions
from tfexport.verification.parity import compare_all, random_sources


def write_bundle(model: Transformer, folder: Path, *others: Precision) -> Bundle:
    """What an export writes in float32 and in `others`, checked against PyTorch as it does."""
    folder.mkdir()
    graphs = []
    for precision in ("float32", *others):
        stored = write_variant(model, precision, folder)
        made = write_graphs(model.config, precision, folder, alignments=True, shortlist=True)
        check_written(Definition.of(model, precision, stored), made, folder)
        graphs += made
    write_manifest(folder, model.config, graphs, {"source": {"sha256": "", "family": "native", "given": {}}})
    return open_bundle(folder)


def check(config: ModelConfig, seed: int, folder: Path) -> Counter[str]:
    """Counts of what was compared and what differed; raises what an export raises."""
    other = [*PRECISIONS.values()][1 + seed % (len(PRECISIONS) - 1)]
    bundle = write_bundle(random_model(config, seed), folder, other)
    runtimes = [ort_cpu(bundle, threads=1), ort_cpu_portable(bundle, threads=1)]
    searches = [SearchOptions(beam=beam, max_length=40) for beam in (1, 2, 4)]
    sources = random_sources(config, 8, seed=seed)
    found: Counter[str] = Counter()
    for report in compare_all(TorchRuntime.from_bundle(bundle), runtimes, sources, searches, batch_size=5):
        found["outputs"] += report.sentences
        found["identical"] += report.identical
        found["ties"] += report.ties
        found["failed"] += not report.passed
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random models through export and decoding.")
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, total, bad = time.monotonic(), Counter[str](), 0
    for index in range(options.models):
        seed = options.seed + index
        config = random_config(random.Random(seed))
        with tempfile.TemporaryDirectory() as temporary:
            try:
                found = check(config, seed, Path(temporary) / "bundle")
            except Exception as error:  # whatever it is, it is a fault of this model
                found = Counter(failed=1)
                print(f"seed {seed}: {type(error).__name__}: {error}\n    {config}", flush=True)
            else:
                if found["failed"]:
                    print(f"seed {seed}: {dict(found)}\n    {config}", flush=True)
        bad += found["failed"] > 0
        total += found
    same = f"{total['identical']:,} of {total['outputs']:,} outputs identical, {total['ties']} ties"
    print(f"{options.models} models, {bad} that differ; {same}; {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
