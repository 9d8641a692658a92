"""Watches what a call runs on the GPU: PyTorch's profiler (CUPTI) sees the kernels of every library of the process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu_day import spans
from benchmarks.gpu_day.spans import Span
from benchmarks.gpu_day.stand_ins import have_stand_ins


@dataclass(frozen=True)
class Seen:
    """What ran, and who saw it."""

    by: str
    spans: list[Span] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """How often each kernel ran."""


def watch(work: Callable[[], object]) -> Seen:
    """Do `work` and note its kernels: by PyTorch's profiler where there is a GPU, by the stand-ins in a rehearsal."""
    if have_stand_ins():
        from benchmarks.cuda_dry import stand_in

        stand_in.forget_kernels()
        work()
        return Seen("stand-ins", counts=stand_in.kernels())
    import torch
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities() or not torch.cuda.is_available():
        work()
        return Seen("nothing: there is no profiler of GPUs here")
    torch.cuda.init()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        found = spans.from_torch(trace)
    counts: dict[str, int] = {}
    for span in found:
        counts[span.name] = counts.get(span.name, 0) + 1
    return Seen("torch.profiler", found, counts)
