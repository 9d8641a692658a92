"""Whether one peer of the speed stage decodes the base model, in a process of its own.

python -m benchmarks.gpu_day.trial NAME --work DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu_day.stage import Task, say
from benchmarks.gpu_day.stand_ins import use_stand_ins


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    task = Task(options.work / "trial.json", options.work, 600.0, options.rehearse)
    if task.rehearsal:
        use_stand_ins(say)
    from benchmarks.gpu.timing import Setting
    from benchmarks.gpu_day import models
    from benchmarks.gpu_day.stages.speed import FIRST, peer
    from tfexport.verification.parity import random_sources

    bundle = models.base(task)
    found = peer(task, options.name, bundle, FIRST.precisions[0])
    sources = random_sources(bundle.config, 2)
    for beam in (1, 4):
        found.decode(sources, Setting(sources, beam, tokens=4).options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
