"""The CPU time of a sentence without a server: whole batches, decoded one after the other.

    python -m benchmarks.serve.offline BUNDLE TEXT --precision int8

No server on the same CPUs can answer more requests than this work allows. The last line is the number of seconds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tfexport

BATCH = 64
"""Sentences of a batch: larger ones take no less time for each."""
ROUNDS = 3


def seconds_of(bundle: Path, text: Path, precision: str) -> float:
    """User and system time of a sentence, in a process with one thread."""
    command = [sys.executable, "-m", __name__, str(bundle), str(text), "--precision", precision]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The CPU time of a sentence without a server.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--precision", required=True)
    options = parser.parse_args(arguments)
    lines = [line for line in options.text.read_text(encoding="utf-8").splitlines() if line.strip()][:1000]
    model = tfexport.load(options.bundle, precision=options.precision, threads=1)
    taken = []
    for _ in range(1 + ROUNDS):
        began = time.process_time()
        model.translate(lines, batch_size=BATCH, scores=False)
        taken.append((time.process_time() - began) / len(lines))
    print(min(taken[1:]))  # the first warms up


if __name__ == "__main__":
    main()
