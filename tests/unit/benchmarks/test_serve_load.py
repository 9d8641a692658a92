"""The load test of HTTP servers: which rates it measures, and what it says of them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.serve import OURS
from benchmarks.serve.ladder import Ladder, keeps
from benchmarks.serve.report import markdown, sustained


@pytest.mark.parametrize("capacity", [20.0, 95.0, 700.0])
def test_the_search_of_rates_comes_close_to_what_a_server_can_do(capacity: float) -> None:
    ladder = Ladder(start=100.0)
    for _ in range(16):
        rate = ladder.next
        ladder.note(rate, kept=rate <= capacity)
    assert 0.9 * capacity <= ladder.best <= capacity


def test_a_rate_above_one_that_broke_the_limit_does_not_count() -> None:
    ladder = Ladder(start=100.0)
    for rate, kept in ((60.0, True), (78.0, False), (78.0, False), (101.0, True)):
        ladder.note(rate, kept=kept)
    assert ladder.best == 60.0
    assert 60.0 < ladder.next < 78.0


def test_a_rate_that_broke_the_limit_once_is_tried_again() -> None:
    ladder = Ladder(start=100.0)
    for rate, kept in ((60.0, True), (78.0, False)):
        ladder.note(rate, kept=kept)
    assert ladder.next == 78.0
    ladder.note(78.0, kept=True)
    assert ladder.best == 78.0
    assert ladder.next > 78.0


@pytest.mark.parametrize(
    ("p99", "failed", "requests", "kept"),
    [(0.1, 0, 1000, True), (0.3, 0, 1000, False), (0.1, 1, 1000, True), (0.1, 2, 1000, False), (0.0, 0, 0, False)],
)
def test_a_limit_is_kept_where_requests_are_answered_in_time(
    p99: float, failed: int, requests: int, kept: bool
) -> None:
    assert keeps(p99, failed, requests, 0.2) is kept


def _run(system: str, rate: float, *, kept: bool = True, **more: Any) -> dict[str, Any]:
    found = {"model": "small", "precision": "int8", "system": system, "rate": rate, "kept": kept, "limit": 0.2}
    latencies = {"p50": 0.01, "p99": 0.1, "cpu_per_request": 0.004, "memory": 2**20, "client_cpu": 0.1}
    return {**found, **latencies, "stream": False, **more}


def test_the_table_has_the_ratio_to_the_best_other_server() -> None:
    runs = [_run(OURS, 300.0), *2 * [_run(OURS, 400.0, kept=False)], _run("slow", 100.0), _run("slower", 50.0)]
    rows = [line for line in markdown({"about": {}, "runs": runs}).splitlines() if line.startswith("| small")]
    assert rows[0].startswith(f"| small | int8 | 200 ms | {OURS} | 300 | 3.00 |")
    assert [row.split(" | ")[3:6] for row in rows[1:]] == [["slow", "100 or more", ""], ["slower", "50 or more", ""]]


def test_a_server_that_never_kept_the_limit_has_no_rate() -> None:
    runs = [_run(OURS, 300.0), _run("slow", 100.0, kept=False)]
    assert sustained(runs[1:]) is None
    assert "| slow | below 100 |" in markdown({"about": {"preliminary": "busy"}, "runs": runs})


def test_streams_do_not_count_as_a_rate() -> None:
    stream = _run(OURS, 300.0, stream=True, first_p50=0.001, first_p99=0.005)
    assert sustained([_run(OURS, 100.0), stream]) == _run(OURS, 100.0)
    assert "| small | int8 | 300 | 1.0 | 5.0 |" in markdown({"about": {}, "runs": [_run(OURS, 100.0), stream]})


def test_the_bound_is_what_decoding_and_the_load_generator_leave() -> None:
    runs = [_run(OURS, 300.0), _run("slow", 100.0, client_cpu=0.05), _run("slow", 50.0, client_cpu=0.05)]
    alone = [{"model": "small", "precision": "int8", "cpu_seconds": 0.002}]
    machine = {"cpu": "x", "cpus": 2, "date": "2026-01-01T", "python": "3"}
    text = markdown({"about": {"machine": machine}, "offline": alone, "runs": runs})
    assert "| small | int8 | 2.00 | 0.33 | 857 | 200 |" in text  # 2 / (0.002 + 0.1 / 300)
