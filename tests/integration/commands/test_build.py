"""`tfexport build`: engines, and what they would cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from makers.processes import ENVIRONMENT
from makers.tiny import (
    TinyCheckpoint,
)
from tests.support.commands import Run, last_error, one_error
from tfexport.bundle.reader import open_bundle
from tfexport.errors import EngineError, RuntimeUnavailable
from tfexport.exporter.engines import Builder
from tfexport.system.gpu import Gpu


def test_a_dry_run_tells_the_cost_and_builds_nothing(build: Run, own_bundle: Path) -> None:
    before = {path.name: path.read_bytes() for path in own_bundle.iterdir()}
    outcome = build("--dry-run", "--gpu", "sm89,sm120", "--max-batch", "8", "--max-beam", "5")
    assert outcome.code == 0
    assert outcome.stderr == ""
    # The model has 20 positions: sources end aligned, and one cache holds them all.
    assert (
        outcome.lines[0]
        == "plan for fp32: batches to 8, beams to 5, sources to 24 ids with padding, caches of 32 slots"
    )
    assert outcome.lines[-2].endswith("MiB of 1024")
    assert outcome.lines[-1].startswith("  to build: 6 engines, about 20 MiB on disk, about ")
    assert {path.name: path.read_bytes() for path in own_bundle.iterdir()} == before


def test_a_dry_run_tells_of_each_precision(build: Run) -> None:
    outcome = build("--dry-run", "--precision", "fp16,bf16")
    plans = [line.partition(":")[0] for line in outcome.lines if line.startswith("plan")]
    assert plans == ["plan for fp16", "plan for bf16"]


def test_what_is_assumed_of_the_gpu_is_said(run: Run, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu() -> None:
        raise RuntimeUnavailable("none")

    monkeypatch.setattr("tfexport.exporter.engine_request.find_gpu", no_gpu)
    outcome = run("build", tiny_bundle, "--dry-run")
    assert outcome.code == 0
    gpu, memory = outcome.stderr.splitlines()
    assert gpu == "note: building for portable engines: there is no GPU here; --gpu names others"
    assert memory == "note: 8 GiB of GPU memory are assumed; --gpu-memory says how much there is"

    monkeypatch.setattr("tfexport.exporter.engine_request.find_gpu", lambda: Gpu("NVIDIA L4", "sm89", 5 << 30))
    outcome = run("build", tiny_bundle, "--dry-run")
    assert outcome.stderr == "note: building for NVIDIA L4; --gpu names others\n"
    assert outcome.lines[-2].endswith("MiB of 5120")
    assert run("build", tiny_bundle, "--dry-run", "--gpu", "here").stderr == ""


def test_nothing_is_built_twice(build: Run) -> None:
    once, twice = build("--dry-run"), build("--dry-run", "--precision", "fp32, fp32", "--gpu", "SM89,sm89")
    assert once.code == 0
    assert twice == once


@pytest.mark.parametrize("gpu", ["portable", "sm89"])
def test_full_tensorrt_builds_for_no_gpu_elsewhere_and_a_dry_run_says_so(build: Run, gpu: str) -> None:
    line = one_error(build("--dry-run", "--library", "tensorrt", "--gpu", gpu))
    with pytest.raises(EngineError) as refused:  # as building itself does
        Builder.generation(SimpleNamespace(library="tensorrt"), gpu)  # type: ignore[arg-type]
    assert line == f"error: {refused.value}"
    assert f"not ahead of time for {gpu}. Use --gpu here, or --library tensorrt_rtx." in line


def test_a_dry_run_refuses_what_the_library_does_not_build(build: Run) -> None:
    pytest.importorskip("tensorrt_rtx")
    line = one_error(build("--dry-run", "--library", "tensorrt_rtx", "--gpu", "sm90"))
    assert "does not build for sm90. It knows" in line


WITHOUT_ONNX = """
import sys
sys.modules["onnx"] = None
from tfexport.__main__ import main
for arguments in (["build", sys.argv[1]], ["export", "missing.pt"]):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as stop:
        assert stop.code == 2
"""


@pytest.mark.thorough
def test_building_without_onnx_names_the_extra_that_brings_it(tiny_bundle: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_ONNX, tiny_bundle]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=True)
    for line, extra in zip(done.stderr.splitlines(), ("tensorrt-rtx", "export"), strict=True):
        assert line.endswith(f"needs onnx, which is not installed: pip install 'tfexport[{extra}]'.")


def test_lengths_are_planned_from_a_text(build: Run, own_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"de5 de6\n\nde9 de4\n\xff\n")
    for arguments, stdin in (((tmp_path / "in.txt",), b""), (("-",), (tmp_path / "in.txt").read_bytes())):
        outcome = build("--dry-run", "--max-batch", "2", "--plan-for", *arguments, stdin=stdin)
        assert outcome.code == 0, outcome.stderr
        assert (
            outcome.lines[0]
            == "plan for fp32: batches to 2, beams to 4, sources to 24 ids with padding, caches of 32 slots"
        )
    arguments = ("--dry-run", "--plan-for", "-", "--input-format", "ids")
    assert "no line that can be decoded" in one_error(build(*arguments, stdin=b"de5 de6\n"))
    assert build(*arguments, stdin=b"2 5 6 3\n").code == 0


def test_engines_are_built_into_the_bundle(build: Run, own_bundle: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="the tensorrt-rtx extra is not installed")
    outcome = build()
    assert outcome.code == 0, outcome.stderr
    built = [line.partition(":")[0] for line in outcome.lines if line.startswith("built")]
    assert built == [
        "built encoder fp32 sm89",
        "built select_rows fp32 sm89",
        "built decoder_step fp32 sm89 cache 32",
    ]
    assert outcome.lines[-1] == f"next: tfexport decode {own_bundle} INPUT --runtime tensorrt, on such a GPU"
    assert [engine.cache for engine in open_bundle(own_bundle).engines] == [0, 0, 32]


@pytest.mark.thorough
def test_engines_are_built_with_the_export(
    run: Run, here: Path, tiny_checkpoint: TinyCheckpoint, half_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="the tensorrt-rtx extra is not installed")
    flags = ("--target", "tensorrt", "--gpu", "portable", "--gpu-memory", "1")
    outcome = run("export", here, *tiny_checkpoint.flags, *flags)
    assert outcome.code == 0, outcome.stderr
    bundle = open_bundle(here.with_suffix(""))
    assert bundle.precisions == ["float32", "float16"]
    assert {(engine.precision, engine.gpu) for engine in bundle.engines} == {("float16", "portable")}


def test_a_gpu_that_is_not_known_is_named_with_those_that_are(build: Run, own_bundle: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="the tensorrt-rtx extra is not installed")
    line = last_error(build("--gpu", "sm89,sm90"))
    assert "does not build for sm90. It knows sm" in line
    assert open_bundle(own_bundle).engines == ()


@pytest.mark.parametrize("library", ["tensorrt", "tensorrt_rtx"])
def test_building_without_the_library_names_the_extra(
    build: Run, own_bundle: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    line = last_error(build("--library", library, "--gpu", "here" if library == "tensorrt" else "sm89"))
    assert f"needs {library}, which is not installed: pip install 'tfexport[{library.replace('_', '-')}]'" in line
    assert open_bundle(own_bundle).engines == ()


def test_engines_of_a_precision_that_was_not_exported_are_refused(build: Run) -> None:
    assert last_error(build("--precision", "fp32,fp16")).endswith("Export again with --precision fp16.")
    assert build("--precision", "fp32,fp16", "--dry-run").code == 0  # which may tell whether that is worth it
