"""The dry run of `ort-cuda`: ONNX Runtime's CUDA provider over stand-ins, where `make cuda-dry` has made them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cuda_dry import build
from benchmarks.cuda_dry.__main__ import main, run_cases
from benchmarks.cuda_dry.report import MEASURES, failures, table
from tfexport.runtimes.base import AHEAD


@pytest.mark.thorough
def test_the_provider_decodes_over_the_stand_ins_within_the_limits() -> None:
    try:
        build.prepare(download=False)
    except build.Missing as missing:
        pytest.skip(f"the dry run of ort-cuda was not done: {missing}")
    found = run_cases("--short", "--lines", "64")
    assert found["violations"] == []
    assert failures(found["rows"]) == []
    (row,) = found["rows"]
    assert row["text"]["lines"] == 64
    replays = row["second"]["total"]["replays"]
    assert replays * (AHEAD if row["ahead"] else 1) > row["second"]["steps"] / 2


def test_what_is_missing_is_named_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("sys.argv", ["cuda_dry", "--short"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("SKIPPED: the dry run of ort-cuda was not done: there is no C++ compiler")


def counted(**changes: int) -> dict[str, Any]:
    counts = dict.fromkeys(
        ("kernels", "on_device", "fills", "launches", "to_device", "to_host", "waits", "allocations", "recordings"), 0
    )
    batch = {"batches": 1, "steps": 2, "total": {**counts, **changes}, "step": counts, "encoder": counts}
    return {
        "model": "tiny", "precision": "fp16", "beam": 4, "ahead": False, "first": batch, "second": batch, "threads": counts,
        "all": {**counts, "plans": 0, "violations": 0},
    }  # fmt: skip


def test_a_broken_limit_is_a_failure_and_the_table_has_the_limits() -> None:
    assert failures([counted()]) == []
    (failure,) = failures([counted(allocations=1)])
    assert failure == "tiny fp16 beam 4: allocations, second batch: 1 is more than 0"
    head, rows = table([counted()])
    assert len(head) == 3 + len(MEASURES)
    assert {len(row) for row in rows} == {len(head)}
    assert [row[0] for row in rows[-2:]] == ["limit", "limit, ahead"]


def test_a_device_that_searches_ahead_waits_once_in_eight_steps() -> None:
    row = {**counted(), "ahead": True}
    row["second"]["step"] = {**row["second"]["step"], "waits": 1}
    (failure,) = failures([row])
    assert failure == "tiny fp16 beam 4: waits a step: 0.5 is more than 0.125"
    assert failures([{**row, "ahead": False}]) == []
