"""The examples of pipelines in the guide, with Ray Data, Spark and Hugging Face datasets, as they stand there."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tfexport
from makers.paths import ROOT
from makers.tiny import SRC_VOCAB

pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install 'tfexport[ray]'")

from pyarrow import parquet  # noqa: E402

pytestmark = pytest.mark.thorough

LINES = [" ".join(f"de{4 + (n * 7 + place * 3) % (SRC_VOCAB - 4)}" for place in range(1 + n % 9)) for n in range(60)]
MOST_LINES = 11
"""Of our own code in an example: under a dozen."""


def example(heading: str, bundle: Path) -> str:
    """The code below a heading, with a bundle that is there."""
    page = (ROOT / "docs/guides/pipelines.md").read_text(encoding="utf-8")
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
    assert all(len([x for x in block.splitlines() if x]) <= MOST_LINES for block in blocks)
    return "\n".join(blocks).replace("/models/de-en", str(bundle)).replace("num_proc=8", "num_proc=2")


def run(code: str, folder: Path) -> Any:
    """The table that code writes to `translated`, from a corpus in `news`."""
    (folder / "news").mkdir()
    for name, rows in (("a", LINES[:25]), ("b", [*LINES[25:], None])):
        parquet.write_table(pa.table({"de": rows, "status": range(len(rows))}), folder / "news" / f"{name}.parquet")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home")}
    environment |= {"HF_HUB_OFFLINE": "1", "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return parquet.read_table(folder / "translated")


def wanted(bundle: Path) -> dict[str | None, str]:
    found = tfexport.load(bundle, threads=1).translate(LINES, beam=4)
    return {line: one.text for line, one in zip(LINES, found, strict=True)} | {None: ""}


def test_spark(tiny_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="PySpark is not installed: pip install pyspark pandas")
    pytest.importorskip("pandas", reason="pandas is not installed: pip install pandas")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Spark needs Java 17, which is not installed")
    session = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
"""
    rows = run(session + example("Spark", tiny_bundle), tmp_path).to_pylist()
    expected = wanted(tiny_bundle)
    assert sorted(str(row["de"]) for row in rows) == sorted(map(str, [*LINES, None]))
    assert all(row["translation"]["text"] == expected[row["de"]] for row in rows)
    assert [row["translation"]["status"] for row in rows if row["de"] is None] == ["null"]


def test_ray_data(tiny_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.data", reason="Ray Data is not installed: pip install 'tfexport[ray]'")
    code = example("Ray Data", tiny_bundle).replace("s3://bucket/", f"{tmp_path}/")
    assert "size=7),  # of 8 CPUs" in code
    code = code.replace("size=7", "size=1")
    start = "import ray\nray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)\n"
    rows = run(start + code, tmp_path).to_pylist()
    expected = wanted(tiny_bundle)
    assert sorted(str(row["de"]) for row in rows) == sorted(map(str, [*LINES, None]))
    assert all(row["text"] == expected[row["de"]] for row in rows)
    assert "input_status" in rows[0]


def test_hugging_face_datasets(tiny_bundle: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("Hugging Face datasets is not installed: pip install datasets")
    code = example("Hugging Face datasets", tiny_bundle)
    save = '\nimport os\nos.mkdir("translated")\ndataset.to_parquet("translated/a.parquet")\n'
    table = run(code + save, tmp_path)
    expected = wanted(tiny_bundle)
    assert table["de"].to_pylist() == [*LINES, None]
    assert table["text"].to_pylist() == [expected[line] for line in (*LINES, None)]
    assert table.column_names == ["de", "input_status", "text", "status", "message", "score"]
    assert table["status"].to_pylist()[-1] == "null"
