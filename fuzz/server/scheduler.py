"""Random requests through a scheduler, against each sentence alone: the same text, tokens and scores, to the last bit.

    python -m fuzz.server.scheduler [--requests 2000] [--seed 0] [--bundle DIR] [--http]

Requests of all kinds of search come at random moments, stream, are cancelled, and lose their workers. Budgets are drawn at
random too. With --http they go to `tfexport serve`, a process of its own; see `over_http`. The bundle is of a small
random model, or DIR; it is decoded in each of its precisions that joins batches. The exit code is 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fuzz.server import over_http
from makers.scheduling import drive, problems
from makers.serving_bundle import write_bundle
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.runtimes import load_runtime

AT_ONCE = 100
"""Requests of a run, each with budgets of its own."""


def check(bundle: Bundle, precision: str, requests: int, seed: int) -> tuple[int, list[str]]:
    """Answers that were compared, and what differs."""
    runtime = load_runtime("ort-cpu", bundle, precision=precision, threads=1)  # type: ignore[arg-type]
    attention = bundle.has_graph("beam_step_attention", runtime.precision, "ort")
    compared, found = 0, []
    for start in range(0, requests, AT_ONCE):
        count = min(AT_ONCE, requests - start)
        vocab = min(bundle.config.src_vocab_size, bundle.config.tgt_vocab_size)
        _, answers = drive(
            runtime,
            seed + start,
            count,
            vocab=vocab,
            max_length=30,
            attention=attention,
            workers=1 + start // AT_ONCE % 2,
        )
        compared += sum(answer.outputs is not None for answer in answers)
        found += [problem for answer in answers for problem in problems(runtime, answer)]
    return compared, found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random requests through a scheduler.")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--http", action="store_true", help="send them to a server")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        bundle = open_bundle(options.bundle) if options.bundle else write_bundle(Path(folder), with_words=options.http)
        for precision in (one for one in ("float32", "int8", "int4") if one in bundle.precisions):
            began = time.monotonic()
            run = over_http.check if options.http else check
            compared, found = run(bundle, precision, options.requests, options.seed)
            for problem in found[:5]:
                print(problem, flush=True)
            bad += len(found)
            seconds = time.monotonic() - began
            print(
                f"{precision}: {options.requests} requests, {compared} compared, {len(found)} differ; {seconds:.0f} s"
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
