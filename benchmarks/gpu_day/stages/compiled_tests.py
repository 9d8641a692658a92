"""The tests of tests/gpu that compile a model: minutes each."""

from __future__ import annotations

import sys

from benchmarks.gpu_day.stage import Task, main
from benchmarks.gpu_day.stages.tests import run_tests


def run(task: Task) -> bool:
    """The tests that compile."""
    return run_tests(task, "gpu and compiles")


if __name__ == "__main__":
    sys.exit(main(run))
