"""The cases of a dry run, in a process that meets the stand-ins: what each counts, as JSON on stdout."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cuda_dry import stand_in

stand_in.use()  # before anything imports CUDA

from benchmarks.cuda_dry.stand_in import Counts  # noqa: E402
from benchmarks.cuda_dry.step_graphs import bundle_sizes, step_rows  # noqa: E402
from benchmarks.cuda_dry.workload import MODELS, Scripted, batches, sources, text_lengths, write_bundle  # noqa: E402
from tfexport.bundle.reader import open_bundle  # noqa: E402
from tfexport.contract import FLOATS  # noqa: E402
from tfexport.runtimes import load_runtime  # noqa: E402
from tfexport.runtimes.cuda import CudaDevice  # noqa: E402
from tfexport.search.search import SearchOptions, search  # noqa: E402

SENTENCES, BATCH, THREADS = 8, 32, 4
STEP_BATCHES = (1, 32, 256)


@dataclass(frozen=True)
class Case:
    """A model in a precision, decoded with a beam; `lines` of text besides, where that is not 0."""

    model: str
    precision: str
    beam: int
    lines: int = 0


def all_cases(*, short: bool, lines: int) -> list[Case]:
    """Every model, precision and beam; the text with the model of the tutorial in half precision."""
    if short:
        return [Case("tiny", "fp16", 4, lines)]
    return [
        Case(model, precision, beam, lines if (model, precision) == ("tutorial", "fp16") else 0)
        for model in MODELS
        for precision in FLOATS
        for beam in (1, 4)
    ]


def run(case: Case, directory: Path) -> dict[str, Any]:
    """Load the runtime, decode two batches, then one in each of some threads; load it again and decode text."""
    start, before = time.perf_counter(), Counts.now()
    runtime = _load(case, directory)
    options = SearchOptions(beam=case.beam)
    capabilities = runtime.capabilities
    lengths = np.linspace(10, 24, SENTENCES).astype(np.int64)
    batch = sources(runtime.config, lengths)
    row: dict[str, Any] = {"model": case.model, "precision": case.precision, "beam": case.beam}
    row["ahead"] = capabilities.greedy_ahead if case.beam == 1 else capabilities.beam_ahead
    row["first"] = _decode(runtime, [batch], options)
    row["second"] = _decode(runtime, [batch], options)
    row["threads"] = _in_threads(runtime, batch, options)
    if case.lines:
        runtime = _load(case, directory)
        text = sources(runtime.config, text_lengths(case.lines))
        row["text"] = {"lines": case.lines, **_decode(runtime, batches(text, BATCH), options)}
    row["all"] = Counts.now().since(before)
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def _load(case: Case, directory: Path) -> Scripted:
    return Scripted(load_runtime("ort-cuda", open_bundle(directory), precision=FLOATS[case.precision]))


def _decode(runtime: Scripted, work: Iterable[Sequence[list[int]]], options: SearchOptions) -> dict[str, Any]:
    """Counts of everything, of the encoders and of the steps."""
    runtime.start()
    before = Counts.now()
    for batch in work:
        search(runtime, batch, options)
        runtime.finish()
    total = Counts.now().since(before)
    nothing = Counts(dict.fromkeys(stand_in.COUNTS, 0))
    encoders, steps = sum(runtime.encoders, nothing), sum(runtime.steps, nothing)
    counted = {"total": total, "encoder": encoders, "step": steps}
    return {"batches": len(runtime.encoders), "steps": runtime.step_count, **counted}


def _in_threads(runtime: Scripted, batch: Sequence[list[int]], options: SearchOptions) -> Counts:
    """What new threads add that decode the same batch, one after the other."""
    before = Counts.now()
    for _ in range(THREADS):
        thread = threading.Thread(target=_decode, args=(runtime, [batch], options))
        thread.start()
        thread.join()
    return Counts.now().since(before)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--lines", type=int, default=1000)
    options = parser.parse_args()
    rows, steps, sizes = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        bundles: dict[str, Path] = {}
        for case in all_cases(short=options.short, lines=options.lines):
            if case.model not in bundles:
                bundles[case.model] = write_bundle(case.model, Path(folder))
            rows.append(run(case, bundles[case.model]))
            print(f"{case}: {rows[-1].pop('seconds')} s", file=sys.stderr)
        for model in ("tiny",) if options.short else ("tutorial", "base"):
            steps += step_rows(open_bundle(bundles[model]), model, CudaDevice(), STEP_BATCHES)
            sizes[model] = bundle_sizes(bundles[model])
    found = {"rows": rows, "steps": steps, "sizes": sizes, "violations": stand_in.violations()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
