"""The table of a run over many rows."""

from __future__ import annotations

import pytest

from benchmarks.corpora.run import growth, markdown, steady_rate

RAY = {
    "run": "2 actors of corpus",
    "seconds": 30.0,
    "cpu_seconds": 58.0,
    "samples": [(2.0, 0, 10.0), (10.0, 100, 80.0), (20.0, 600, 90.0), (26.0, 900, 90.0), (28.0, 900, 95.0)],
    "same_text": True,
}
PLAIN = {
    "run": "2 workers of decode",
    "seconds": 20.0,
    "cpu_seconds": 39.0,
    "samples": [(2.0, None, 50.0), (18.0, None, 60.0)],
}
LARGE = {**PLAIN, "run": f"{PLAIN['run']}, large", "seconds": 16.0, "same_text": True}
RECORD = {
    "machine": {"cpu": "A CPU", "cpus": 2, "date": "2026-01-01T00:00:00"},
    "rows": 1000,
    "precision": "fp32",
    "runs": [PLAIN, RAY, LARGE],
}


def test_the_steady_rate_leaves_out_the_start_and_the_wait_for_the_end() -> None:
    assert steady_rate(RAY, 1000) == pytest.approx(800 / 16)
    assert steady_rate(PLAIN, 1000) == pytest.approx(50)


def test_growth_compares_the_second_fifth_with_the_last() -> None:
    assert growth(RAY) == (80.0, 95.0)


def test_the_table_has_each_run_and_what_it_wrote() -> None:
    lines = markdown(RECORD).splitlines()
    assert lines[-3:] == [
        "| 2 workers of decode | 20 | 50 | 1.000 | 0.800 | 39 | 50 |  | 50, at the end 60 |",
        "| 2 actors of corpus | 30 | 33 | 0.667 | 0.533 | 58 | 50 | yes | 80, at the end 95 |",
        "| 2 workers of decode, large | 16 | 62 | 1.250 | 1.000 | 39 | 62 | yes | 50, at the end 60 |",
    ]
    assert "NO" in markdown({**RECORD, "runs": [PLAIN, {**RAY, "same_text": False}, LARGE]})
