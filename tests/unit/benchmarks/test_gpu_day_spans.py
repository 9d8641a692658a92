"""What the records of a profiler say of a decoding step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.gpu_day.spans import Span, about, attention_kernels, from_nsys, from_torch, launches_of, whole

NSYS = """Generating SQLite file
Processing [x.sqlite] with [cuda_gpu_trace.py]...

Start (ns),Duration (ns),CorrId,GrdX,Bytes (MB),Strm,Name
2000,500,7,1,,7,"void gemm<float, 3>(int)"
1000,250,6,,0.01,7,[CUDA memcpy Host-to-Device]
"""


def step(start: float) -> list[Span]:
    """Two kernels of 3 and 5 microseconds, 1 apart, and a copy to the host 2 after them."""
    return [
        Span("gemm", start, 3.0),
        Span("flash_fwd", start + 4, 5.0),
        Span("Memcpy DtoH (Device -> Pinned)", start + 11, 1.0),
    ]


def test_a_step_ends_with_its_copy_to_the_host() -> None:
    first = [Span("encoder", 0.0, 50.0), *step(60)]
    last = [Span("reorder", 400.0, 1.0)]
    assert launches_of([*first, *step(100), *step(130), *last]) == [step(100), step(130)]


def test_medians_of_a_step() -> None:
    found = about([*step(0), *step(100), *step(130), *step(160)])
    assert found is not None
    assert (found["steps"], found["nodes"]) == (3, 3)
    assert (found["step_us"], found["busy_us"], found["host_us"]) == (12, 9, 18)
    assert (found["node_us"], found["gap_us"], found["gaps_us"]) == (3, 1.5, 3)
    assert found["kernels"][0] == {"name": "flash_fwd", "a_step": 1, "us_a_step": 5}


def test_steps_that_were_made_at_once_are_told_one_by_one() -> None:
    """Two steps of two kernels each end with one copy to the host."""

    def launch(start: float) -> list[Span]:
        return [*(Span("gemm", start + 4 * number, 3.0) for number in range(4)), Span("Memcpy DtoH", start + 16, 1.0)]

    found = about([*launch(0), *launch(100), *launch(130), *launch(160)], at_once=2)
    assert found is not None
    assert (found["steps"], found["nodes"], found["node_us"], found["gap_us"]) == (6, 2.5, 3, 1)
    assert (found["step_us"], found["busy_us"], found["gaps_us"], found["host_us"]) == (8.5, 6.5, 2, 6.5)
    assert found["kernels"][0] == {"name": "gemm", "a_step": 2, "us_a_step": 6}


def test_a_decode_is_told_by_the_token() -> None:
    found = whole([Span("encoder", 0.0, 50.0), *step(60), *step(100)], tokens=2)
    assert found == {"nodes_a_token": 3.5, "busy_us_a_token": 34, "us_a_token": 56}


def test_nodes_that_run_at_once_have_no_gap() -> None:
    one = [Span("a", 0.0, 10.0), Span("b", 5.0, 10.0), Span("Memcpy DtoH", 15.0, 1.0)]
    shifted = [span._replace(start=span.start + 50) for span in one]
    found = about([*one, *shifted, *(span._replace(start=span.start + 50) for span in shifted)])
    assert found is not None
    assert found["gaps_us"] == 0


def test_nothing_is_said_where_no_step_can_be_told() -> None:
    assert about([]) is None
    assert about([Span("gemm", 0.0, 1.0)]) is None
    assert about(step(0)) is None


@pytest.mark.parametrize("packed", [False, True])
def test_traces_of_pytorch_are_read(tmp_path: Path, packed: bool) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "later", "ts": 20.5, "dur": 2},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 9},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": "10", "dur": 1.5},
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / ("trace.json.gz" if packed else "trace.json")
    data = json.dumps({"traceEvents": events}).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    assert from_torch(path) == [Span("Memcpy DtoH", 10.0, 1.5), Span("later", 20.5, 2.0)]


def test_reports_of_nsys_are_read() -> None:
    found = from_nsys(NSYS)
    assert found == [Span("[CUDA memcpy Host-to-Device]", 1.0, 0.25), Span("void gemm<float, 3>(int)", 2.0, 0.5)]
    assert not found[0].to_host
    assert Span("[CUDA memcpy Device-to-Host]", 0, 1).to_host
    assert from_nsys("SKIPPED: no data") == []


def test_kernels_of_attention_are_known_by_their_names() -> None:
    names = ["void flash_fwd_kernel<x>", "gemm", "fmha_cutlassF_f16", "cudnn_sdpa_fprop", "softmax_warp", "gemm"]
    assert attention_kernels(names) == [
        "cudnn_sdpa_fprop",
        "fmha_cutlassF_f16",
        "softmax_warp",
        "void flash_fwd_kernel<x>",
    ]
