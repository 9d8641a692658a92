"""Compiled PyTorch, which takes minutes to compile, beside eager PyTorch and `ort-cuda`."""

from __future__ import annotations

import sys

from benchmarks.gpu_day import models
from benchmarks.gpu_day.stage import Task, main
from benchmarks.gpu_day.stages.speed import Matrix, measure_all

PEERS = ("torch-cuda", "torch-cuda-compiled", "ort-cuda")
MATRIX = Matrix(settings=((1, 1), (32, 1), (32, 4), (1, 4)))


def run(task: Task) -> bool:
    """Measure compiled PyTorch; each setting compiles again."""
    task.found["rows"] = []
    return measure_all(task, models.base(task), PEERS, MATRIX)


if __name__ == "__main__":
    sys.exit(main(run, stand_ins=True))
