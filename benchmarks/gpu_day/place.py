"""What a stage decodes with: on the GPU, or in a rehearsal on the CPU and over the stand-ins of CUDA."""

from __future__ import annotations

from benchmarks.gpu_day.stage import Task
from benchmarks.gpu_day.stand_ins import have_stand_ins
from tfexport.bundle.reader import Bundle
from tfexport.contract import Precision
from tfexport.errors import RuntimeUnavailable
from tfexport.runtimes import load_runtime
from tfexport.runtimes.base import Runtime

ON_CPU = {"torch-cuda": "torch", "torch-cuda-compiled": "torch-compiled"}
"""Who takes the place of a runtime in a rehearsal."""


def device(task: Task) -> str:
    return "cpu" if task.rehearsal else "cuda"


def runtime(task: Task, name: str, bundle: Bundle, precision: Precision) -> Runtime:
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
