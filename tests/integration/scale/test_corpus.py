"""`tfexport corpus` with Ray on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tfexport
from tests.support.paths import ROOT
from tests.support.tiny import SRC_VOCAB

pytest.importorskip("ray.data", reason="Ray Data is not installed: pip install 'tfexport[ray]'")
import pyarrow as pa
from pyarrow import parquet

pytestmark = pytest.mark.thorough

LINES = [" ".join(f"de{4 + (n * 7 + place * 3) % (SRC_VOCAB - 4)}" for place in range(1 + n % 9)) for n in range(400)]
ENVIRONMENT = {
    **os.environ,
    **{"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)},
}


def corpus(bundle: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tfexport", "corpus", str(bundle), *map(str, arguments)]
    options = ["--actors", "2", "--rows-per-shard", "64", "--max-length", "12"]
    return subprocess.run([*command, *options], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_parquet_has_the_text_of_the_model_and_a_lost_part_is_made_again(tiny_bundle: Path, tmp_path: Path) -> None:
    table = pa.table({"n": range(400), "de": LINES})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=150)
    given = (tmp_path / "in.parquet", "-o", tmp_path / "out", "--text-column", "de")
    done = corpus(tiny_bundle, *given)
    assert done.returncode == 0, done.stderr
    found = parquet.read_table(tmp_path / "out")
    wanted = [one.text for one in tfexport.load(tiny_bundle, threads=1).translate(LINES, max_length=12)]
    assert found["text"].to_pylist() == wanted
    assert found["id"].to_pylist() == [f"0:{number}" for number in range(400)]
    assert found.select(["n", "de"]).equals(table)
    parts = sorted((tmp_path / "out").glob("part-*"))
    assert len(parts) == 8
    content = parts[3].read_bytes()
    parts[3].unlink()
    times = [part.stat().st_mtime_ns for part in parts if part.exists()]
    done = corpus(tiny_bundle, *given, "--resume")
    assert done.returncode == 0, done.stderr
    assert parts[3].read_bytes() == content
    assert [part.stat().st_mtime_ns for part in parts if part != parts[3]] == times
    summary = json.loads((tmp_path / "out" / "_tfexport" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["rows"], sum(summary["statuses"].values()), summary["parts"]) == (400, 400, 8)


def test_bad_rows_are_counted(tiny_bundle: Path, tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "de4"}, {"text": None}, {"text": "de5 " * 2_500_000, "more": 1}, {"text": 7}]
    content = "".join(json.dumps(row) + "\n" for row in rows) + "broken\n"
    (tmp_path / "in.jsonl").write_text(content, encoding="utf-8")
    (tmp_path / "empty.jsonl").touch()
    done = corpus(tiny_bundle, tmp_path / "*.jsonl", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    (part,) = (tmp_path / "out").glob("part-*")
    found = [json.loads(line) for line in part.read_bytes().splitlines()]
    assert [row["status"] for row in found][1:] == ["null", "too_long", "not_text", "invalid_json"]
    assert found[2]["input_text"] == rows[2]["text"]
    assert found[2]["more"] == 1


def test_what_cannot_be_written_is_one_line_and_the_run_goes_on(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    given = (tmp_path / "in.txt", "-o", tmp_path / "out", "--resume")
    part = tmp_path / "out" / "part-00000-000000000064-64.txt"
    part.mkdir(parents=True)  # a file cannot take the name
    done = corpus(tiny_bundle, *given)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: cannot write {part}: ")
    part.rmdir()
    assert corpus(tiny_bundle, *given).returncode == 0
    content = b"".join(part.read_bytes() for part in sorted((tmp_path / "out").glob("part-*")))
    wanted = [one.text for one in tfexport.load(tiny_bundle, threads=1).translate(LINES, max_length=12)]
    assert content.decode("utf-8").splitlines() == wanted


def test_an_error_in_a_worker_is_one_line(tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(pa.table({"text": [os.urandom(8).hex() for _ in range(5000)]}), path, use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(3000) + whole[3004:])
    done = corpus(tiny_bundle, path, "-o", tmp_path / "out")
    assert done.returncode == 2
    assert f"error: cannot read {path} as parquet" in done.stderr.splitlines()[-1]
