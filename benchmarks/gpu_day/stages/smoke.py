"""Whether `ort-cuda` decodes as PyTorch does: 8 sentences in each precision, greedy and with a beam, and its kernels."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.gpu_day import models, place
from benchmarks.gpu_day.spans import attention_kernels
from benchmarks.gpu_day.stage import Task, main, say
from benchmarks.gpu_day.unpack import ROOT
from benchmarks.gpu_day.watch import watch
from benchmarks.peers.decoders import one_line
from tfexport.bundle.reader import Bundle
from tfexport.contract import FLOATS, Precision
from tfexport.decoding.line_reader import Reader
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, search
from tfexport.verification.parity import compare

SENTENCES, BEAMS, LONGEST = 8, (1, 4), 64
TEXT = ROOT / "benchmarks" / "sentences.de"
MOST_KERNELS = 60


def run(task: Task) -> bool:
    """Compare ort-cuda with PyTorch on the CPU."""
    bundle, origin = models.embedded(task)
    reader = Reader.of(bundle, "text")
    sources = [reader.ids(line) for line in TEXT.read_bytes().splitlines()[:SENTENCES]]
    reference = TorchRuntime.from_bundle(bundle)
    rows: list[dict[str, Any]] = []
    task.found |= {"bundle": origin, "sentences": len(sources), "rows": rows}
    for short, precision in FLOATS.items():
        for row in _precision(task, bundle, precision, reference, sources):
            rows.append({"precision": short, **row})
            task.save()
            say(str({name: value for name, value in row.items() if name != "tokens"}))
    # A profiler may hang or crash. By now all comparisons are saved.
    for row in rows:
        if row["beam"] is not None:
            row |= _kernels(task, bundle, row["precision"], row["beam"], sources)
            task.save()
            if "kernels_error" in row:
                say(f"{row['precision']}, beam {row['beam']}: no kernels were seen: {row['kernels_error']}")
    if task.rehearsal:
        return True
    return all(row["error"] is None and row["passed"] for row in rows)


def _precision(
    task: Task, bundle: Bundle, precision: Precision, reference: TorchRuntime, sources: list[list[int]]
) -> Iterator[dict[str, Any]]:
    """A row for each beam."""
    try:
        runtime = place.runtime(task, "ort-cuda", bundle, precision)
    except Exception as error:  # the library's errors have no common base
        yield {"beam": None, "error": one_line(error), "passed": False}
        return
    for beam in BEAMS:
        yield _row(task, runtime, reference, sources, beam)


def _row(task: Task, runtime: Runtime, reference: TorchRuntime, sources: list[list[int]], beam: int) -> dict[str, Any]:
    options = SearchOptions(beam=beam, max_length=LONGEST)
    row: dict[str, Any] = {"beam": beam, "error": None, "passed": None}
    try:
        begin = time.perf_counter()
        outputs = [hypotheses[0].ids for hypotheses in search(runtime, sources, options)]
        row["first_seconds"] = time.perf_counter() - begin
        row["tokens"] = outputs
        if task.rehearsal:  # the stand-ins compute nothing: PyTorch is compared with itself
            _compared(reference, reference, sources[:2], replace(options, max_length=4))
        else:
            row |= _compared(reference, runtime, sources, options)
    except Exception as error:  # the library's errors have no common base
        row |= {"error": one_line(error), "passed": False}
    return row


def _kernels(task: Task, bundle: Bundle, short: str, beam: int, sources: list[list[int]]) -> dict[str, Any]:
    """The kernels of a search, and how often each was started."""
    try:
        runtime = place.runtime(task, "ort-cuda", bundle, FLOATS[short])
        options = SearchOptions(beam=beam, max_length=LONGEST)
        search(runtime, sources, options)  # records: the next search is the one to watch
        seen = watch(lambda: search(runtime, sources, options))
    except Exception as error:  # the library's errors have no common base
        return {"kernels_error": one_line(error)}
    names = sorted(seen.counts, key=lambda name: -seen.counts[name])
    counts = {name[:200]: seen.counts[name] for name in names[:MOST_KERNELS]}
    return {"seen_by": seen.by, "attention": attention_kernels(names), "kernels": counts}


def _compared(
    reference: TorchRuntime, runtime: Runtime, sources: list[list[int]], options: SearchOptions
) -> dict[str, Any]:
    report = compare(reference, runtime, sources, options, batch_size=len(sources))
    return {
        **{"identical": report.identical, "steps": report.steps, "top1_agree": report.top1_agree},
        **{"logits_error": report.logits.error, "logits_own": report.logits.own},
        **{"passed": report.passed, "failures": report.failures},
    }


if __name__ == "__main__":
    sys.exit(main(run, stand_ins=True))
