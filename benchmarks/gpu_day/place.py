"""What a stage decodes with: on the GPU, or in a rehearsal on the CPU and over the stand-ins of CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_day.stage import Task
from tfexport.bundle.reader import Bundle
from tfexport.contract import Precision
from tfexport.errors import RuntimeUnavailable
from tfexport.runtimes import load_runtime
from tfexport.runtimes.base import Runtime

ON_CPU = {"torch-cuda": "torch", "torch-cuda-compiled": "torch-compiled"}
"""Who takes the place of a runtime in a rehearsal."""
STAND_INS = "benchmarks.cuda_dry.stand_in"


def use_stand_ins(say: Callable[[str], None]) -> None:
    """Let this process, which has not imported CUDA, meet the stand-ins, where they have been made."""
    try:
        from benchmarks.cuda_dry import stand_in
    except (OSError, ImportError) as error:
        say(f"note: no stand-ins of CUDA here, so ort-cuda is not rehearsed: {error}")
        return
    stand_in.use()


def have_stand_ins() -> bool:
    return STAND_INS in sys.modules


def device(task: Task) -> str:
    return "cpu" if task.rehearsal else "cuda"


def runtime(task: Task, name: str, bundle: Bundle, precision: Precision) -> Runtime[Any]:
    """A runtime of a GPU. In a rehearsal `ort-cuda` does all its work over the stand-ins and tells random tokens.

    Raises:
        TfexportError: it cannot run here, or not this model or precision.
    """
    if not task.rehearsal:
        return load_runtime(name, bundle, precision=precision)
    if name != "ort-cuda":
        return load_runtime(ON_CPU.get(name, name), bundle, precision=precision)
    if not have_stand_ins():
        raise RuntimeUnavailable("ort-cuda is not rehearsed: there are no stand-ins of CUDA. Run make cuda-dry first.")
    from benchmarks.cuda_dry.workload import Scripted

    return Scripted(load_runtime(name, bundle, precision=precision))
