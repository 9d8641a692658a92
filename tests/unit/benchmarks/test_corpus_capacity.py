"""Capacity for corpora: what follows from times that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.corpora import capacity as corpus_capacity
from benchmarks.corpora.capacity import capacity_table, core_hours, main, markdown, measured_table, rate, start

SETTINGS = {"few": 100, "many": 1100, "rows_per_shard": 25, "repeats": 3, "text": "some.de"}


def times(few: float, many: float) -> dict[str, list[float]]:
    """Of three runs, one of which was disturbed."""
    return {"few": [few, few, 99.0], "many": [many, 99.0, many]}


@pytest.fixture
def record() -> dict[str, Any]:
    """One worker computes 100 lines a second, two 200; actors a tenth less, after 20 seconds."""
    plain = {"1": times(2, 12), "2": times(1.5, 6.5)}
    ray = {"1": times(20 + 100 / 90, 20 + 1100 / 90), "2": times(20 + 100 / 180, 20 + 1100 / 180)}
    model = {"model": "m", "precision": "int8", "tokens_per_line": 12.0, "seconds": {"plain": plain, "ray": ray}}
    about = {"cpu": "a CPU", "cpus": 2, "date": "2026-01-01T00:00:00", "versions": {"tfexport": "0.1.0"}}
    return {"machine": about, "settings": SETTINGS, "usd_per_core_hour": 0.05, "models": [model]}


def test_rates_have_no_start_in_them(record: dict[str, Any]) -> None:
    (model,) = record["models"]
    assert [rate(model, "plain", count, SETTINGS) for count in (1, 2)] == pytest.approx([100, 200])
    assert [rate(model, "ray", count, SETTINGS) for count in (1, 2)] == pytest.approx([90, 180])
    assert start(model, "ray", 2, SETTINGS) == pytest.approx(20)


def test_hours_and_cost_follow_from_the_rate_of_two_actors(record: dict[str, Any]) -> None:
    assert core_hours(record["models"][0], SETTINGS) == pytest.approx(1e9 / 90 / 3600)
    row = capacity_table(record, lines=3600 * 90 * 64, cores=(1, 64))[-1]
    assert row == "| m | int8 | 64.0 | 1.0 | 64 | 3 |"
    measured = measured_table(record)[-1]
    assert measured == "| m | int8 | 12.0 | 100 | 90 | 200 | 180 | 0.90 | 0.90 | 1,080 | 20 |"


def test_too_few_lines_are_an_error(record: dict[str, Any]) -> None:
    record["models"][0]["seconds"]["ray"]["2"] = {"few": [5.0], "many": [4.0]}
    with pytest.raises(ValueError, match="Measure more --lines"):
        markdown(record)


def test_a_short_run_says_so(record: dict[str, Any]) -> None:
    assert "short run" not in markdown(record)
    assert "short run" in markdown({**record, "settings": {**SETTINGS, "repeats": 2}})


def test_tables_are_written_from_the_record_alone(record: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "corpus_capacity.json").write_text(json.dumps(record), encoding="utf-8")
    main(["--table", "--results", str(tmp_path)])
    assert markdown(record) in (tmp_path / "corpus_capacity.md").read_text(encoding="utf-8")


def test_the_tables_of_the_repository_are_those_of_its_record() -> None:
    path = corpus_capacity.RESULTS / "corpus_capacity.json"
    assert path.exists() == path.with_suffix(".md").exists()
    if not path.exists():
        pytest.skip("nothing was measured yet (make corpus-capacity)")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert markdown(record) in (corpus_capacity.RESULTS / "corpus_capacity.md").read_text(encoding="utf-8")
