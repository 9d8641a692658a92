"""The measurement of memory under load: what it counts, and its table."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory import load
from benchmarks.memory.commands import Memory
from tfexport.errors import TfexportError

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def test_memory_that_is_written_to_is_unique() -> None:
    before = Memory.of(os.getpid())
    array = bytearray(50 * 2**20)
    array[:: 2**12] = b"x" * len(array[:: 2**12])
    after = Memory.of(os.getpid())
    assert before is not None
    assert after is not None
    # Threads that earlier tests of this process left allocate too: 2.02 MiB were seen once.
    assert after.uss - before.uss == pytest.approx(50, abs=5)
    assert after.own - before.own == pytest.approx(50, abs=5)
    assert after.uss <= after.pss <= after.rss


def test_a_process_that_has_ended_has_no_memory() -> None:
    process = os.fork()
    if not process:
        os._exit(0)
    os.waitpid(process, 0)
    assert Memory.of(process) is None


def test_growth_is_from_where_memory_has_settled_to_the_end() -> None:
    samples = [(1_000, 50.0), (10_000, 100.0), (20_000, 102.0), (50_000, 300.0), (95_000, 110.0), (100_000, 112.0)]
    found = load.summary(samples)
    assert found == {
        "settled": 10_000,
        "before": 101.0,
        "after": 111.0,
        "most": 300.0,
        "growth": pytest.approx(10 / 101),
    }


def test_lines_are_repeated_each_time_in_another_order() -> None:
    lines = [b"%d" % number for number in range(50)]
    found = load.repeated(lines, 120)
    assert len(found) == 120
    assert sorted(found[:50]) == sorted(found[50:100]) == sorted(lines)
    assert found[:50] != found[50:100]


def test_a_window_is_as_many_lines_as_a_command_reads_before_it_answers() -> None:
    lines = [b"x\n"] * 100
    assert load.window_of(lines, 1) == [b"x\n"] * 16
    assert load.window_of(lines, 32) == [b"x\n"] * 32 + [b"\n"] * 480


def test_rows_of_the_same_settings_are_replaced() -> None:
    old = [{"model": "a", "beam": 1, "n": 1}, {"model": "a", "beam": 4, "n": 2}]
    assert load.merged(old, [{"model": "a", "beam": 1, "n": 3}]) == [
        {"model": "a", "beam": 1, "n": 3},
        {"model": "a", "beam": 4, "n": 2},
    ]


def test_a_command_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(TfexportError, match=r"answered 0 of 1 lines: error: .* is not a bundle"):
        load.memory_of_many(1, [str(tmp_path)], [b"x\n"])


def test_both_parts_are_measured_and_shown(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "seconds_of_one_line", lambda flags, line: 1.5)
    (tmp_path / "text").write_text("".join(f"de{4 + n % 20} de5\n" for n in range(40)))
    flags = [str(tmp_path / "text"), "--bundle", f"tiny={tiny_bundle}", "--precision", "fp32", "--beam", "1"]
    flags += ["--processes", "1", "--batch-size", "1", "--repeats", "1", "--sentences", "8000", "--workers", "1"]
    assert load.main([*flags, "--out", str(tmp_path)]) == 0
    record: dict[str, Any] = json.loads((tmp_path / "load.json").read_text(encoding="utf-8"))
    assert [row["share_weights"] for row in record["processes"]] == [False, True]
    assert all(len(row["processes"]) == 1 and 0 < row["unique_part"] < 2 for row in record["processes"])
    (row,) = record["growth"]
    assert row["samples"][-1][0] <= row["sentences"] == 8000
    page = (tmp_path / "load.md").read_text(encoding="utf-8")
    assert page.count("| tiny | fp32 | 1 | 1 |") == 2
    assert (tmp_path / "load.png").exists()
