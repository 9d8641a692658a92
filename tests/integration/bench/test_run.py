"""`tfexport bench` and the scripts around it, in real processes over the tiny bundle; seconds are not looked at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.cpu import growth, matrix
from tfexport.bench import run
from tfexport.bench.machine import Peaks
from tfexport.bundle import reader as bundle_module
from tfexport.cli import app
from tfexport.errors import TfexportError


@pytest.fixture(autouse=True)
def few_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that a test can name them."""
    monkeypatch.setattr("tfexport.bench.plan.FEWEST_SENTENCES", 4)


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "peaks_of", lambda threads: PEAKS)
    monkeypatch.setattr(run, "busy_cpus", lambda: 1.5)


@pytest.mark.thorough
@pytest.mark.usefixtures("known_machine")
def test_the_command_measures_in_processes_of_their_own(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "ct2").mkdir()
    flags = ["--batch-size", "2", "--beam", "1,2", "--tokens", "4", "--rounds", "2", "-o", str(tmp_path / "out.json")]
    beside = ["--beside", f"ctranslate2={tmp_path / 'ct2'}"]
    done = CliRunner().invoke(app, ["bench", str(tiny_bundle), *flags, *beside], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "out.json").read_text())
    assert [cell["beam"] for cell in record["cells"]] == [1, 2]
    for cell in record["cells"]:
        own, other = cell["rows"]
        assert own["reason"] is None
        assert own["lengths"] == [4] * 4
        assert len(own["seconds"]) == 2
        assert own["parts"]["step"] > 0
        assert other["reason"]
        assert f"{cell['about']}: 4 sentences, outputs of 4 tokens" in done.output
    assert record["options"]["tokens"] == 4
    assert record["machine"]["cpus"] >= 1
    assert record["machine"]["busy_cpus"] == 1.5
    assert "warning: 1.5 CPUs are busy already" in done.stderr


@pytest.mark.thorough
@pytest.mark.usefixtures("known_machine")
def test_the_command_reads_sentences_and_gives_json(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "input.ids").write_text("4 5 6\nno\n7\n")
    flags = [
        "--input-format",
        "ids",
        "--free",
        "--max-length",
        "9",
        "--sentences",
        "3",
        "--batch-size",
        "1",
        "--rounds",
        "1",
    ]
    done = CliRunner().invoke(app, ["bench", str(tiny_bundle), str(tmp_path / "input.ids"), *flags, "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["options"]["tokens"] is None
    assert record["cells"][0]["source_lengths"] == [3, 1, 3]
    assert max(record["cells"][0]["rows"][0]["lengths"]) <= 9
    assert "1 lines of" in done.stderr


def test_where_nothing_can_be_measured_the_command_says_why(
    classifier_bundle: Path, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TfexportError, match="encoder classifier"):
        CliRunner().invoke(app, ["bench", str(classifier_bundle)], catch_exceptions=False)
    monkeypatch.setattr(run, "peaks_of", lambda threads: PEAKS)
    monkeypatch.setattr(run, "busy_cpus", lambda: None)
    with pytest.raises(TfexportError, match=r"nothing could be measured: .*bf16"):
        CliRunner().invoke(
            app,
            ["bench", str(tiny_bundle), "--precision", "bf16", "--batch-size", "1", "--tokens", "3"],
            catch_exceptions=False,
        )
    with pytest.raises(TfexportError, match="--beam is '0'"):
        CliRunner().invoke(app, ["bench", str(tiny_bundle), "--beam", "0"], catch_exceptions=False)


@pytest.mark.thorough
@pytest.mark.usefixtures("known_machine")
def test_the_matrix_is_measured_and_what_has_no_folder_is_a_row(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "peaks_of", lambda threads: PEAKS)
    (tmp_path / "input").write_text("de7 de8\nde9\n", encoding="utf-8")
    flags = ["--quick", "--precision", "fp32", "--only", "batch 1", "--beside", "ctranslate2", "--out", str(tmp_path)]
    assert matrix.main([str(tiny_bundle), *flags, "--input", str(tmp_path / "input")]) == 0
    (cell,) = matrix.read(tmp_path / "cpu.json")
    assert (cell["model"], cell["part"], cell["batch"]) == ("tiny", "forced", 1)
    assert row(cell, "ort-cpu")["lengths"] == [8] * 4
    assert row(cell, "ctranslate2")["reason"]
    assert cell["run"]["config"]["d_model"] == 24


@pytest.mark.thorough
def test_growth_is_measured_beside_its_floor_and_drawn(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "peaks_of", lambda threads: PEAKS)
    config = bundle_module.open_bundle(tiny_bundle).config
    monkeypatch.setattr(growth, "bundle_of", lambda *_: tiny_bundle)
    monkeypatch.setattr(growth, "model_of", lambda _: config)
    assert growth.main(["--quick", "--only", "batch,tokens", "--repeats", "1", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "growth.json").read_text())
    assert [(row["sweep"], row["value"]) for row in record["rows"]] == [
        *(("batch", 1), ("batch", 4), ("tokens", 8), ("tokens", 16)),
    ]
    for found in record["rows"]:
        assert found["reason"] is None
        assert len(found["step_seconds"]) == found["tokens"]
        assert found["tokens_per_second"] == pytest.approx(found["batch"] * found["tokens"] / found["seconds"][0])
        assert found["floor"]["steps"] == found["tokens"]
    assert (tmp_path / "growth.png").read_bytes()[1:4] == b"PNG"


PEAKS = {n: Peaks(n, {1: 1e9}, {"float32": 1e9, "int8": 1e9}) for n in (1, 2)}


def row(cell: Mapping[str, Any], name: str) -> dict[str, Any]:
    (found,) = (one for one in cell["rows"] if one["contestant"] == name)
    return found
