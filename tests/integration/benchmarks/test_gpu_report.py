"""The logic of the benchmark scripts, with peers that are scripted."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import report, timing
from benchmarks.machine import machine
from tfexport.errors import TfexportError
from tfexport.search.search import SearchOptions


def measured(asked: list[str], **lengths: Sequence[int | Exception]) -> dict[str, Any]:
    scripted = [Scripted(name, given, asked) for name, given in lengths.items()]
    meters = {name: timing.Meter("cpu", True) for name in lengths}
    setting = timing.Setting([[4], [5]], beam=2, tokens=6)
    return timing.measure(scripted, meters, setting, warmup=1, repeats=3)  # type: ignore[arg-type]


class Scripted:
    """A peer that gives outputs of the lengths it is told, and notes when it is asked."""

    precision = "float32"
    steps = (0.25, 0.75)

    def __init__(self, name: str, lengths: Sequence[int | Exception], asked: list[str]):
        self.name, self._lengths, self._asked = name, list(lengths), asked

    def decode(self, sources: Sequence[Sequence[int]], options: SearchOptions) -> list[tuple[int, ...]]:
        self._asked.append(self.name)
        length = self._lengths.pop(0)
        if isinstance(length, Exception):
            raise length
        return [(7,) * length for _ in sources]


def test_peers_take_turns() -> None:
    asked: list[str] = []
    measured(asked, a=[6] * 4, b=[6] * 4)
    assert "".join(asked) == "ab" + "ab" + "ba" + "ab"


def test_a_peer_that_fails_keeps_its_error_and_the_others_go_on() -> None:
    asked: list[str] = []
    broken = ValueError("broken\nin two lines")
    runs = measured(asked, a=[6] * 4, b=[6, 6, broken], c=[5], d=[TfexportError("Do this.")])
    assert [runs[name].error for name in "abcd"] == [
        None,
        "ValueError: broken",
        "it gave outputs of [5] tokens where 6 were asked for.",
        "Do this.",
    ]
    assert len(runs["a"].seconds) == 3
    rows = {name: timing.summary(runs[name], runs["a"], 12) for name in "abcd"}
    assert rows["a"]["step_ms"]["median"] == pytest.approx(500.0)
    for name in "bcd":
        assert rows[name]["ratio"] is rows[name]["tokens_per_second"] is None
    assert timing.summary(runs["a"], runs["b"], 12)["ratio"] is None
    assert measured(asked) == {}


def test_the_ratio_is_taken_round_by_round() -> None:
    mine, base = timing.Runs(seconds=[1.0, 2.0, 4.0]), timing.Runs(seconds=[2.0, 4.0, 4.0])
    row = timing.summary(mine, base, 8)
    assert row["ratio"]["median"] == 2.0
    assert row["tokens_per_second"]["median"] == 4.0
    assert row["step_ms"] is None


def test_memory_is_what_a_peer_holds_since_before_it_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the GPU: `live` bytes allocated, `peak` at most since the last reset."""
    gpu_memory = SimpleNamespace(live=0, peak=0)

    def use(live: int, peak: int) -> None:
        gpu_memory.live += live
        gpu_memory.peak = max(gpu_memory.peak, gpu_memory.live + peak)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: gpu_memory.live)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: gpu_memory.peak)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9 - gpu_memory.live, 10**9))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(gpu_memory, "peak", gpu_memory.live))
    mib = 2**20
    own, other = timing.Meter("cuda", True), timing.Meter("cuda", False)
    own.around(lambda: use(5 * mib, 0))
    other.around(lambda: use(7 * mib, 0))
    assert own.around(lambda: use(1 * mib, 2 * mib)) == {"mib": 8.0, "how": "torch.cuda.max_memory_allocated"}
    assert other.around(lambda: use(3 * mib, 9 * mib)) == {"mib": 10.0, "how": "cudaMemGetInfo"}
    assert own.around(lambda: use(0, 1 * mib)) == {"mib": 7.0, "how": "torch.cuda.max_memory_allocated"}


def test_a_table_says_of_a_gpu_what_it_is_and_of_memory_how_it_was_measured() -> None:
    spread = {"median": 2.0, "p10": 1.0, "p90": 3.0}
    place = {"runtime": "ort-cuda", "precision": "float16", "batch": 1, "beam": 4}
    speed = {"error": None, "tokens_per_second": spread, "step_ms": spread, "ratio": spread}
    failed = {
        "passed": False,
        "identical": 4,
        "sentences": 5,
        "logits_max_error": "not finite",
        "top1_agree": 6,
        "steps": 7,
    }
    record = {
        "machine": {
            **machine("cpu"),
            "gpu": {"name": "NVIDIA X", "driver": "580.1"},
        },
        "options": {"tokens": 32, "repeats": 10, "warmup": 3, "runtimes": ["torch-cuda"]},
        "model": "small",
        "parity": [{**place, "error": None, **failed, "bleu": 30.0, "bleu_reference": 31.0}],
        "benchmark": [
            {**place, **speed, "memory": {"mib": 12.4, "how": "cudaMemGetInfo"}},
            {**place, "error": "a | b", "memory": None},
        ],
    }
    lines = report.markdown(record).splitlines()
    assert lines[0] == "# NVIDIA X, driver 580.1"
    assert "| ort-cuda | fp16 | 1 | 4 | 4 of 5 | not finite | 6 of 7 | 30.00 (31.00) | NO |" in lines
    assert "| ort-cuda | fp16 | 1 | 4 | 2 (1 to 3) | 2.000 (1.000 to 3.000) | 2.00 (1.00 to 3.00) | 12 free |" in lines
    assert "| ort-cuda | fp16 | 1 | 4 | a / b |  |  |  |" in lines
