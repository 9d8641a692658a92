"""One decode of the base model between cudaProfilerStart and cudaProfilerStop, for Nsight Systems.

nsys profile --capture-range=cudaProfilerApi ... python -m benchmarks.gpu_day.profiled --work DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.gpu_day import models
from benchmarks.gpu_day.stage import Task
from benchmarks.gpu_day.stages.profile import SETTINGS, decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    task = Task(options.work / "profiled.json", options.work, 600.0, rehearsal=False)
    peer, setting = decoder(task, models.base(task), *SETTINGS[0])
    torch.cuda.profiler.start()
    peer.decode(setting.sources, setting.options)
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
