"""Whatever is wrong is one line on stderr that says what to do, with the exit code that goes with it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from makers.processes import ENVIRONMENT, TFEXPORT
from makers.tiny import (
    TinyCheckpoint,
)
from tests.support.commands import TEXT, Run, one_error, wanted_text
from tfexport.cli import app_of
from tfexport.errors import BundleError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "missing.pt"], "there is no file missing.pt."),
        (["inspect", "."], "there is no file"),
        (["inspect", "{checkpoint}", "--family", "nosuch"], "Give --family one of: tutorial, "),
        (["inspect", "{checkpoint}", "--config", "missing.json"], "cannot read the configuration missing.json"),
        (["export", "{checkpoint}"], "Give --heads N --pad N --bos N --eos N, "),
        (["export", "{checkpoint}", "--src-tokenizer", "nltk"], "no tokeniser 'nltk'"),
        (["export", "{checkpoint}", "--src-vocab", "missing.json"], "cannot read the vocabulary missing.json"),
        (["export", "{checkpoint}", "--heads", "5", "--pad=1", "--bos=2", "--eos=3"], "not a multiple of n_heads 5"),
        (["export", "{checkpoint}", "--heads", "3", "--pad=1", "--bos=2", "--eos=99"], "eos_id 99 is not in the"),
        (["decode", "missing"], "missing is not a bundle: it has no manifest.json."),
        (["decode", "{bundle}", "missing.txt"], "cannot read missing.txt: No such file"),
        (["decode", "{bundle}", "."], "cannot read .: Is a directory"),
        (["decode", "{bundle}", "--runtime", "nosuch"], "no runtime 'nosuch' in this version. Use one of: ort-cpu, "),
        (
            ["decode", "{bundle}", "--runtime", "torch", "--precision", "int8"],
            "torch does not compute in int8: it is for ort-cpu",
        ),
        (["decode", "{bundle}", "--runtime", "torch", "--workers", "2"], "torch works for one worker at a time"),
        (
            ["decode", "{bundle}", "--precision", "int8"],
            "has no int8 decoder_step graph for this runtime. Export again with",
        ),
        (["decode", "{bundle}", "--beam", "2", "--nbest", "3"], "nbest 3 needs a beam of at least 3, and beam is 2"),
        (["decode", "{bundle}", "--min-length", "9", "--max-length", "9"], "min_length 9 is not below max_length 9"),
        (["decode", "{bundle}", "--max-length-ratio", "0"], "max_length_ratio is 0.0, not above 0"),
        (["decode", "{bundle}", "-o", "missing/out.txt"], "cannot write missing/out.txt: No such file"),
        (
            ["export", "{checkpoint}", "--heads=3", "--pad=1", "--bos=2", "--eos=3", "--precision", "fp8"],
            "no precision",
        ),
        (["build", "missing"], "missing is not a bundle"),
        (["build", "{bundle}", "--precision", "fp8"], "no precision 'fp8'. Give one or more of fp32, fp16, bf16"),
        (["build", "{bundle}", "--precision", "fp16,"], "no precision ''"),
        (["build", "{bundle}", "--cache", "32,x"], "--cache is '32,x', not numbers of slots. Give them as in 32,64"),
        (["build", "{bundle}", "--cache", ""], "--cache is ''"),
        (["build", "{bundle}", "--cache=-32"], "--cache is '-32'"),
        (["build", "{bundle}", "--cache", "0,32"], "has a size below 1. Give sizes above 0"),
        (["build", "{bundle}", "--gpu", "sm89,"], "--gpu is 'sm89,', with an empty name. Give names as in sm89,sm120"),
        (["build", "{bundle}", "--gpu", ""], "--gpu is '', with an empty name"),
        (["build", "{bundle}", "--gpu", "L4"], "there is no GPU generation 'l4'. Give such as sm89, portable or here"),
        (
            ["build", "{bundle}", "--plan-for", "-", "--cache", "32"],
            "--plan-for replaces --cache and --max-source. Give one of them",
        ),
        (["build", "{bundle}", "--plan-for", "-", "--max-source", "128"], "--plan-for replaces --cache"),
        (["build", "{bundle}", "--precision", "fp16,int8"], "engines do not support int8"),
        (["triton", "missing", "-o", "models"], "missing is not a bundle"),
        (["triton", "{bundle}", "-o", "models", "--runtime", "nosuch"], "no runtime 'nosuch' in this version"),
        (["triton", "{bundle}", "-o", "models", "--runtime", "tensorrt"], "Build them with `tfexport build`"),
        (
            ["build", "{bundle}", "--precision=fp32", "--plan-for", "missing.txt"],
            "cannot read missing.txt: No such file",
        ),
        (
            ["build", "{bundle}", "--precision=fp32", "--plan-for", "-"],
            "no line that can be decoded. Give typical source text",
        ),
        (
            ["build", "{bundle}", "--precision=fp32", "--gpu=sm89", "--gpu-memory=0.1", "--max-batch=100000"],
            "Lower --max-batch, --max-beam, --max-source or --cache, or raise --gpu-memory",
        ),
        (["parity", "missing"], "missing is not a bundle"),
        (["parity", "{bundle}", "-"], "no line that can be decoded"),
        (["parity", "{bundle}", "--precision", "float16"], "there is no precision 'float16'"),
        (["parity", "{bundle}", "--beam", "0"], "--beam is '0', not numbers above 0"),
        (["parity", "{bundle}", "--runtime", "nosuch", "-"], "no runtime 'nosuch'"),
        (["parity", "{bundle}", "--checkpoint", "missing.pt", "-"], "there is no file missing.pt"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(
    run: Run,
    tiny_bundle: Path,
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"checkpoint": tiny_checkpoint.path, "bundle": tiny_bundle}
    stdin = b"de5\n" if "nosuch" in arguments or "missing.pt" in arguments else b""
    line = one_error(run(*(argument.format(**places) for argument in arguments), stdin=stdin))
    assert message in line
    assert line.endswith(".")
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_opened_has_no_lines_done(decode: Run, tmp_path: Path) -> None:
    for output in (tmp_path, tmp_path / "missing" / "out.txt"):
        message = one_error(decode("-o", output, stdin=TEXT))
        assert f"cannot write {output}" in message
        assert "lines done so far" not in message


def test_closed_stdin_is_an_error_of_the_user(decode: Run) -> None:
    assert "stdin" in one_error(decode(stdin=None))


@pytest.mark.parametrize("command", ["decode", "parity", "build"])
def test_a_classifier_bundle_is_refused(run: Run, classifier_bundle: Path, command: str) -> None:
    outcome = run(command, classifier_bundle)
    assert outcome.code == 2
    assert outcome.raw == b""
    message = "error: .* is an encoder classifier, which has nothing to decode"
    assert re.match(message, outcome.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    "arguments",
    [
        ["nosuch"],
        ["decode"],
        ["inspect", "a", "b"],
        ["export", "x.pt", "--heads", "0"],
        ["export", "x.pt", "--heads", "three"],
        ["export", "x.pt", "--target", "tflite"],
        ["build"],
        ["build", "x", "--max-batch", "0"],
        ["build", "x", "--gpu-memory", "0"],
        ["build", "x", "--gpu-memory", "nan"],
        ["build", "x", "--gpu-memory", "inf"],
        ["build", "x", "--gpu-memory", "1e308"],
        ["triton", "x", "--precision", "fp8"],
        ["triton", "x", "--batch-size", "0"],
        ["build", "x", "--library", "cudnn"],
        ["decode", "x", "--precision", "fp8"],
        ["decode", "x", "--input-format", "xml"],
        ["decode", "x", "--nosuch"],
        ["decode", "x", "--length-penalty", "nan"],
        ["train"],
    ],
)
def test_wrong_use_exits_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app_of(arguments[0]), arguments).exit_code == 2


def test_debug_shows_the_traceback_and_keeps_the_exit_code(tmp_path: Path) -> None:
    command = [TFEXPORT, "decode", "missing", "--debug"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
    assert "Traceback" in done.stderr
    assert BundleError.__name__ in done.stderr
    assert done.returncode == 2


class PanicException(BaseException):
    """As a library in Rust raises it: 1, Python's exit code for it, would say that parity failed."""

    __module__ = "pyo3_runtime"


@pytest.mark.parametrize("kind", [RuntimeError, PanicException])
def test_a_fault_of_tfexport_is_one_line_and_exits_with_3(
    run: Run, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise kind("broken\n  at two\n  lines")

    monkeypatch.setattr("tfexport.bundle.reader.open_bundle", fail)
    outcome = run("decode", tiny_bundle)
    assert outcome.code == 3
    assert f"{kind.__name__}: broken" in outcome.stderr
    assert "fault of tfexport" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_a_reader_that_goes_away_ends_decoding_quietly(tiny_bundle: Path, tmp_path: Path) -> None:
    """As in `tfexport decode BUNDLE big.txt | head -1`."""
    (tmp_path / "big.txt").write_bytes(TEXT * 1000)
    command = [TFEXPORT, "decode", tiny_bundle, tmp_path / "big.txt", "--max-length", "1", "--output-format", "jsonl"]
    process = subprocess.Popen(
        [*command, "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    assert process.stdout.readline().startswith(b'{"line": 1, ')
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 141  # not 1, which is a failed parity
    assert [line for line in errors.splitlines() if not line.startswith((b"warning: ", b"note: "))] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_behind_stdout_is_an_error(tiny_bundle: Path) -> None:
    command = [TFEXPORT, "decode", tiny_bundle, "--threads", "1"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, input=TEXT, stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT, timeout=60)
    assert done.returncode == 2
    errors = [line for line in done.stderr.decode().splitlines() if not line.startswith(("warning: ", "note: "))]
    assert len(errors) == 1
    assert errors[0].startswith("error: cannot write to stdout: No space left on device.")


def test_output_may_be_a_pipe(decode: Run, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """It is written to, not replaced by a file of its name."""
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as pool:
        read = pool.submit((tmp_path / "pipe").read_text, encoding="utf-8")
        assert decode("-o", tmp_path / "pipe", stdin=TEXT).code == 0
        assert read.result(timeout=10) == wanted_text(tiny_checkpoint)
    assert [path.name for path in tmp_path.iterdir() if path.is_fifo()] == ["pipe"]


@pytest.mark.parametrize("command", [["decode"], ["score", "OTHER"]], ids=["decode", "score"])
def test_an_output_that_is_the_input_is_refused(
    run: Run, tiny_bundle: Path, tmp_path: Path, command: list[str]
) -> None:
    source, other = tmp_path / "in.txt", tmp_path / "other.txt"
    for path in (source, other):
        path.write_bytes(TEXT)
    name, *more = command
    error = one_error(run(name, tiny_bundle, source, *([other] * len(more)), "-o", source))
    assert "would be replaced" in error
    assert source.read_bytes() == TEXT


def test_what_a_file_says_does_not_fill_the_terminal(tiny_bundle: Path, tmp_path: Path, run: Run) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps({**manifest, "format": "x" * 10**6}))
    message = one_error(run("decode", bundle))
    assert len(message) < 10_000
    assert " ... " in message
    assert message.endswith("use the version of tfexport that wrote it.")
