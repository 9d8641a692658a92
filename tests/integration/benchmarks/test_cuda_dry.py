"""The dry run of `ort-cuda`: ONNX Runtime's CUDA provider over stand-ins, where `make cuda-dry` has made them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.cuda_dry import build, step_model
from benchmarks.cuda_dry.__main__ import main, run_cases
from benchmarks.cuda_dry.report import MEASURES, failures, step_failures, step_table, table
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
    assert step_failures(found["steps"]) == []
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


def test_a_greedy_step_of_the_base_model_has_a_limit_of_its_own() -> None:
    row = {**counted(), "model": "base", "beam": 1, "ahead": True}
    row["second"]["step"] = {**row["second"]["step"], "kernels": 2 * 121}
    (failure,) = failures([row])
    assert failure == "base fp16 beam 1: nodes a step: 121 is more than 120"
    assert failures([{**row, "beam": 4}]) == failures([{**row, "precision": "fp32"}]) == []
    row["second"]["step"]["kernels"] = 2 * 161
    assert len(failures([{**row, "beam": 4}])) == 1
    assert failures([{**row, "ahead": False}]) == []


def test_waits_in_text_have_a_limit_where_the_device_searches_ahead() -> None:
    row = {**counted(), "text": {"lines": 1000, "steps": 100, "total": {"waits": 26, "recordings": 1}}}
    assert failures([row]) == []
    (failure,) = failures([{**row, "ahead": True}])
    assert failure == "tiny fp16 beam 4: waits a step, text: 0.26 is more than 0.25"
    assert failures([{**row, "ahead": True, "text": {**row["text"], "lines": 64}}]) == []


def a_step(nodes: int, **changes: Any) -> dict[str, Any]:
    counts = {"kernels": nodes, "on_device": 0, "fills": 0, "to_device": 0, "to_host": 0}
    row = {"model": "base", "precision": "fp16", "dialect": "ort-cuda", "role": "decoder_step", "batch": 1}
    return {**row, "counts": {**counts, **{k: changes.pop(k) for k in list(changes) if k in counts}}, **changes}


def test_a_step_with_more_launches_than_its_limit_is_a_failure() -> None:
    assert step_failures([a_step(120), a_step(225, dialect="onnx24"), a_step(154, precision="fp32")]) == []
    (failure,) = step_failures([a_step(121)])
    assert failure == "base fp16 ort-cuda decoder_step batch 1: 121 nodes are more than 120"
    (failure,) = step_failures([a_step(5, to_host=1)])
    assert failure.endswith("1 copies between host and GPU within a step")


def test_steps_are_a_row_for_each_graph_with_a_column_for_each_batch() -> None:
    head, rows = step_table([a_step(105), a_step(106, batch=32), a_step(225, dialect="onnx24")])
    assert head[-2:] == ["batch 1", "batch 32"]
    assert rows == [
        ["base", "fp16", "ort-cuda", "decoder_step", "105", "106"],
        ["base", "fp16", "onnx24", "decoder_step", "225", ""],
    ]


def test_a_step_takes_its_launches_and_what_is_larger_than_one() -> None:
    """One sentence is bound by launches; 1,024 rows by memory and arithmetic, of which the output projection has most."""
    small, large = (step_model.step_seconds(step_model.CUDA, 100, batch, 1) for batch in (1, 1024))
    assert 100 * step_model.GAP < small < 1.5 * 100 * step_model.GAP
    assert large > 2 * small
    exact = replace(step_model.CUDA, projection="float32")
    assert step_model.step_seconds(exact, 100, 1024, 1) > 1.5 * large
    gathered = replace(step_model.CUDA, shares_cache=False)
    assert step_model.step_seconds(gathered, 100, 256, 4) > step_model.step_seconds(step_model.CUDA, 100, 256, 4)


def test_the_model_of_steps_has_a_row_for_each_search_batch_and_engine() -> None:
    roles = {"ort-cuda": ("decoder_step", "beam_step"), "onnx24": ("decoder_step",)}
    searches = [
        a_step(nodes, dialect="onnx24", role=role, batch=batch)
        for role, nodes in (("greedy_search", 4), ("beam_search", 17))
        for batch in step_model.BATCHES
    ]
    steps = searches + [
        a_step(100, dialect=dialect, role=role, batch=batch)
        for dialect, some in roles.items()
        for role in some
        for batch in step_model.BATCHES
    ]
    head, rows = step_model.table(steps)
    assert len(rows) == 2 * 3 * 3
    assert {len(row) for row in rows} == {len(head)}
    launches = {(row[0], row[2]): row[3] for row in rows}
    assert launches["beam 4", "onnx24"] == "101"
    assert (launches["greedy", "ort-cuda"], launches["beam 4", "ort-cuda"]) == ("104", "117"), "with the search"


def test_computed_steps_are_compared_with_measured_ones_of_ort_cuda_in_fp16() -> None:
    """The smaller vocabulary of the measured model is computed, and the search counts."""
    steps = [
        a_step(nodes, dialect=dialect, role=role, batch=256)
        for dialect, role, nodes in (("ort-cuda", "beam_step", 100), ("onnx24", "beam_search", 17))
    ]
    setting = {"batch": 256, "beam": 4}
    measured = [
        {"runtime": "ort-cuda", "precision": "fp16", **setting, "step_ms": {"median": 1.0}},
        {"runtime": "ort-cuda", "precision": "bf16", **setting, "step_ms": {"median": 2.0}},
        {"runtime": "torch-cuda", "precision": "fp16", **setting, "step_ms": {"median": 3.0}},
        {"runtime": "ort-cuda", "precision": "fp16", **setting, "step_ms": None},
    ]
    ((search, batch, computed, found, ratio),) = step_model.measured_table(steps, measured, words=8000)[1]
    assert (search, batch, found) == ("beam 4", "256", "1.00")
    assert float(computed) == pytest.approx(
        1e3 * step_model.step_seconds(step_model.CUDA, 117, 256, 4, 8000), abs=0.005
    )
    assert float(ratio) == pytest.approx(1 / float(computed), rel=0.05)
    assert float(computed) < 1e3 * step_model.step_seconds(step_model.CUDA, 117, 256, 4)
