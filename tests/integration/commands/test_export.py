"""`tfexport export`: where it reads and writes, and that a signal leaves nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from makers.processes import ENVIRONMENT, TFEXPORT
from makers.tiny import (
    IDS,
    TinyCheckpoint,
)
from tests.support.commands import Run, naive_ids, one_error
from tfexport.bundle.reader import open_bundle
from tfexport.errors import TfexportError
from tfexport.exporter import pipeline
from tfexport.models.transformer import Transformer
from tfexport.verification.gate import DecodingGate


def interrupted(path: Path, flags: list[str], number: int) -> subprocess.CompletedProcess[bytes]:
    """Export in a process of its own and send it a signal when it has begun to write."""
    process = subprocess.Popen(
        [TFEXPORT, "export", path, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    try:
        for _ in range(6_000):
            if any(name.endswith(".partial") for name in os.listdir(path.parent)):
                break
            time.sleep(0.005)
        process.send_signal(number)  # what follows takes some tenths of a second
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def said_by_an_export(stdout: str) -> None:
    exported, checked, reading, with_code, with_outputs, following = stdout.splitlines()
    assert exported == "exported tiny: family tutorial"
    assert re.match(r"  fp32 graphs equal our reading: errors reach \d+% of the allowed rounding error \(", checked)
    assert reading.startswith("  our reading of tiny.pt is unconfirmed: n_heads 3, norm_first false, activation relu, ")
    again = r"tfexport export tiny.pt --module my_code.py:build --src-vocab \S+ --tgt-vocab \S+ -o tiny --force"
    assert re.fullmatch(f"  confirm it with your own code: {again}", with_code)
    assert with_outputs.endswith("add --expect FILE to this command")
    assert following == "next: tfexport parity tiny INPUT; tfexport decode tiny INPUT"


def test_export_command(run: Run, here: Path, tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here.parent)
    outcome = run("export", "tiny.pt", *tiny_checkpoint.flags)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert {path.name for path in here.parent.iterdir()} == {"tiny.pt", "tiny"}  # the bundle is named after the file
    said_by_an_export(outcome.stdout)


def test_a_bundle_that_decodes_otherwise_is_not_exported(
    run: Run, here: Path, tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(gate: DecodingGate, folder: Path, model: Transformer) -> None:
        assert gate.tolerance == 0.5
        assert open_bundle(folder).config == model.config
        raise TfexportError("it decodes otherwise")

    monkeypatch.setattr(DecodingGate, "check_bundle", refuse)
    outcome = run("export", here, *tiny_checkpoint.flags, "--tolerance", "0.5")
    assert (outcome.code, outcome.stderr) == (2, "error: it decodes otherwise\n")
    assert [path.name for path in here.parent.iterdir()] == ["tiny.pt"]


@pytest.mark.thorough
def test_export_command_in_a_process(command_export: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = command_export
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in folder.iterdir()} == {"tiny.pt", "tiny"}
    said_by_an_export(done.stdout)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("name", "bundle"), [("m.pt", "m"), ("m.best.ckpt", "m.best"), ("m", "m.bundle"), (".pt", ".pt.bundle")]
)
def test_bundle_is_named_after_the_checkpoint(
    run: Run, here: Path, tiny_checkpoint: TinyCheckpoint, name: str, bundle: str
) -> None:
    outcome = run("export", here.rename(here.with_name(name)), *tiny_checkpoint.flags, "--no-parity")
    assert outcome.code == 0, outcome.stderr
    assert {path.name for path in here.parent.iterdir()} == {name, bundle}


@pytest.mark.thorough
def test_export_replaces_a_bundle_only_with_force(run: Run, here: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    arguments = ("export", here, *tiny_checkpoint.flags, "-o", here.parent / "out")
    assert run(*arguments).code == 0
    assert one_error(run(*arguments)).endswith("out exists. Replace it with --force, or give another folder with -o.")
    assert run(*arguments, "--force").code == 0


def test_flags_win_over_the_json_file_and_that_over_the_vocabularies(
    run: Run, here: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    fields = {"n_heads": 2, "pad_id": 9, "eos_id": 8}
    here.with_suffix(".json").write_text(json.dumps(fields))
    outcome = run("export", here, *tiny_checkpoint.flags, "--eos", "7", "--no-parity")
    assert outcome.code == 0, outcome.stderr
    notes = outcome.stderr.splitlines()
    assert notes[0] == f"note: using the configuration {here.with_suffix('.json')}"
    assert "note: eos_id is 7, the source vocabulary's own is 3" in notes  # told, because it may be a mistake
    config = json.loads((here.with_suffix("") / "manifest.json").read_text())["config"]
    assert {name: config[name] for name in ("n_heads", *IDS)} == {**IDS, "n_heads": 3, "pad_id": 9, "eos_id": 7}


def test_named_json_file_wins_over_the_one_beside(run: Run, here: Path) -> None:
    here.with_suffix(".json").write_text('{"n_heads": 2}')
    (here.parent / "other.json").write_text('{"n_heads": 4}')
    outcome = run("inspect", here, "--config", here.parent / "other.json", "--json")
    assert json.loads(outcome.stdout)["fields"]["n_heads"] == 4
    assert outcome.stderr == ""


def test_a_json_file_beside_that_is_no_configuration_is_left_alone_and_named(run: Run, here: Path) -> None:
    here.with_suffix(".json").write_text('["a", "vocabulary"]')
    outcome = run("inspect", here, "--json")
    assert outcome.code == 0
    assert outcome.stderr.startswith(f"note: not using the file next to the checkpoint: {here.with_suffix('.json')}")
    assert "n_heads" in json.loads(outcome.stdout)["missing"]


@pytest.mark.thorough
def test_without_vocabularies_the_bundle_holds_ids_and_says_so(
    run: Run, here: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    ids = [f"--{name.removesuffix('_id')}={value}" for name, value in IDS.items()]
    outcome = run("export", here, "--heads", "3", *ids)
    assert outcome.code == 0
    assert "no vocabulary and is decoded as ids only; --src-vocab and --tgt-vocab add them" in outcome.stderr

    outcome = run("decode", here.with_suffix(""), "--threads", "1", stdin=b"2 5 6 3\n2 9 3\nde5\n2 31 3\n")
    assert outcome.lines == [
        *(" ".join(map(str, naive_ids(tiny_checkpoint.model, ids))) for ids in ([5, 6], [9])), *["", ""]
    ]  # fmt: skip
    notes = outcome.stderr.splitlines()
    assert "no source vocabulary: the input is read as ids" in notes[0]
    assert "no target vocabulary: the output is written as ids" in notes[1]
    assert "warning: line 3: invalid_ids: 'de5' is not an id from 0 to 30" in notes
    # What is asked for needs no note.
    asked = ("--threads", "1", "--input-format", "ids", "--output-format", "ids")
    assert run("decode", here.with_suffix(""), *asked, stdin=b"2 9 3\n").stderr.count("vocabulary") == 0

    assert "no source vocabulary" in one_error(run("decode", here.with_suffix(""), "--input-format", "text"))
    wrong = run("decode", here.with_suffix(""), "--input-format", "ids", "--output-format", "tokens")
    assert "no target vocabulary" in one_error(wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("given", ["fp16", "fp32,fp16", " fp16 , bf16"])
def test_export_in_half_precision(
    run: Run,
    here: Path,
    tiny_checkpoint: TinyCheckpoint,
    half_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
) -> None:
    outcome = run("export", here, *tiny_checkpoint.flags, "--precision", given)
    assert outcome.code == 0, outcome.stderr
    names = ["fp32", "fp16", *["bf16"] * ("bf16" in given)]
    assert outcome.lines[0].endswith(": family tutorial")
    for name in names:
        (line,) = (line for line in outcome.lines if line.startswith(f"  {name} graphs"))
        assert re.match(rf"  {name} graphs equal our reading: errors reach \d+% of the allowed rounding error ", line)
    for name in names[1:]:
        (line,) = (line for line in outcome.lines if line.startswith(f"  {name} chooses"))
        assert re.match(rf"  {name} chooses the token of float32 at \d+ of \d+ steps of random sentences", line)
    bundle = open_bundle(here.with_suffix(""))
    assert bundle.precisions == ["float32", "float16", *["bfloat16"] * ("bf16" in given)]


def test_engines_that_cannot_be_built_are_refused_before_the_export(export_engines: Run, here: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="the tensorrt-rtx extra is not installed")
    assert "this plan needs about" in one_error(export_engines("--max-batch", "100000"))
    assert "--cache is '7-9'" in one_error(export_engines("--cache", "7-9"))
    assert "does not build for sm90. It knows sm" in one_error(export_engines("--gpu", "sm89,sm90"))
    assert [path.name for path in here.parent.iterdir()] == ["tiny.pt"]


@pytest.mark.parametrize("library", ["tensorrt", "tensorrt_rtx"])
def test_a_missing_library_is_told_before_the_export(
    export_engines: Run, here: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    gpu = "here" if library == "tensorrt" else "sm89"
    assert f"needs {library}, which is not installed" in one_error(export_engines("--library", library, "--gpu", gpu))
    assert [path.name for path in here.parent.iterdir()] == ["tiny.pt"]


@pytest.mark.thorough
def test_export_tells_of_the_engines_that_a_replaced_bundle_had(
    run: Run, here: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    arguments = ("export", here, *tiny_checkpoint.flags, "--force")
    assert run(*arguments).stderr == ""
    assert run(*arguments).stderr == ""
    path = here.with_suffix("") / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "engines": [{"file": "a.engine"}, {"file": "b.engine"}]}))
    lost = "note: the bundle's 2 TensorRT engines are gone with it: build them again with tfexport build\n"
    assert run(*arguments).stderr == lost
    for engines in (3, [3], [{}], None):
        path.write_text(json.dumps({**manifest, "engines": engines}))
        outcome = run(*arguments)
        assert (outcome.code, outcome.stderr) == (0, "")


@pytest.mark.thorough
def test_export_writes_a_model_repository_beside_the_bundle(
    run: Run, here: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    arguments = ("export", here, *tiny_checkpoint.flags, "--target", "triton", "--beam", "3")
    outcome = run(*arguments)
    assert outcome.code == 0, outcome.stderr
    repository = here.with_name("tiny.triton")
    assert f"wrote {repository} in fp32: encoder, decoder_step, translate" in outcome.lines
    assert {path.name for path in here.parent.iterdir()} == {"tiny.pt", "tiny", "tiny.triton"}
    shutil.rmtree(here.with_suffix(""))
    assert one_error(run(*arguments)).startswith(f"error: {repository} exists. Replace it with --force")
    assert not here.with_suffix("").exists()  # told before the export
    assert run(*arguments, "--force").code == 0


def test_a_new_bundle_cannot_be_served_with_tensorrt(run: Run, here: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    arguments = ("export", here, *tiny_checkpoint.flags, "--target", "triton", "--runtime", "tensorrt")
    bundle = here.with_suffix("")
    assert one_error(run(*arguments)).endswith(
        f"Export it with --precision fp16 alone, then `tfexport build {bundle}`, then `tfexport triton {bundle} "
        "--runtime tensorrt`."
    )
    assert [path.name for path in here.parent.iterdir()] == ["tiny.pt"]


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_export_leaves_nothing(
    here: Path, tiny_checkpoint: TinyCheckpoint, number: int, code: int
) -> None:
    done = interrupted(here, tiny_checkpoint.flags, number)
    assert done.returncode == code
    assert done.stdout == b""
    assert b"Traceback" not in done.stderr
    assert [path.name for path in here.parent.iterdir()] == ["tiny.pt"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_a_library_takes_for_its_own_failure_ends_the_command(
    run: Run, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As extension modules do that are interrupted while they are imported."""

    def interrupted_import(*_: object) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(1)
        except BaseException as error:
            raise ImportError("numpy is not installed") from error

    monkeypatch.setattr("tfexport.bundle.reader.open_bundle", interrupted_import)
    outcome = run("decode", tiny_bundle)
    assert (outcome.code, outcome.stderr) == (128 + number, "")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("step", ["write_variant", "write_manifest"])
def test_a_signal_whose_exception_is_lost_ends_the_export_before_its_result_is_there(
    run: Run, here: Path, tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    """As in finalisers and callbacks of weak references, which drop all exceptions."""
    whole = getattr(pipeline, step)

    class Last:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)
            time.sleep(1)

    def losing(*arguments: object, **options: object) -> object:
        Last()
        return whole(*arguments, **options)

    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    monkeypatch.setattr(pipeline, step, losing)
    outcome = run("export", here, *tiny_checkpoint.flags, "--no-parity")
    assert (outcome.code, outcome.raw) == (128 + number, b"")
    assert [path.name for path in here.parent.iterdir()] == ["tiny.pt"]


@pytest.mark.thorough
def test_of_two_exports_at_once_one_is_told(here: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    command = [TFEXPORT, "export", here, *tiny_checkpoint.flags, "--no-parity"]
    both = [subprocess.Popen(command, stdout=-1, stderr=-1, env=ENVIRONMENT, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in both]
    said = {process.returncode: error for process, error in zip(both, errors, strict=True)}
    assert sorted(said) == [0, 2]
    assert "exists. Replace it with --force" in said[2]
    open_bundle(here.with_suffix(""))
    assert sorted(path.name for path in here.parent.iterdir()) == ["tiny", "tiny.pt"]


def test_export_within_a_budget(run: Run, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "in.de").write_bytes(b"de4 de5\nde6 de7 de8\n\n")
    (tmp_path / "out.en").write_bytes(b"en4 en5\nen6\n\n")
    arguments = ["export", tiny_checkpoint.path, "-o", tmp_path / "auto", *tiny_checkpoint.flags, "--no-parity"]
    text = ["--budget-input", tmp_path / "in.de", "--budget-targets", tmp_path / "out.en"]
    outcome = run(*arguments, "--precision", "fp32,auto-int8", "--budget", "bleu=100", *text)
    assert outcome.code == 0, outcome.stderr
    assert outcome.lines[0].startswith("int8 within bleu=100 on 2 sentences: 0 of ")
    assert "note: 1 lines cannot be decoded" in outcome.stderr
    assert json.loads((tmp_path / "auto" / "manifest.json").read_text())["budgets"]["int8"]["float32"] == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precision", "auto-int8"], "Give both, as in --budget top1=0.999 --budget-input FILE"),
        (["--precision", "auto-int8", "--budget", "top1=1"], "Give both"),
        (["--precision", "auto-int8", "--budget", "x", "--budget-input", "{text}"], "Give bleu=POINTS"),
        (["--precision", "auto-int8", "--budget", "bleu=1", "--budget-input", "{text}"], "--budget-targets FILE"),
        (["--precision", "auto-bf16", "--budget", "top1=1", "--budget-input", "{text}"], "there is no auto-bf16"),
        (["--precision", "int8,auto-int8", "--budget", "top1=1", "--budget-input", "{text}"], "one int8"),
        (["--precision", "int8", "--budget", "top1=1", "--budget-input", "{text}"], "--budget needs an auto-"),
        (["--precision", "auto-int8", "--budget", "top1=1", "--budget-input", "missing"], "cannot read missing"),
    ],
)
def test_budget_without_what_it_needs_is_one_line(
    run: Run, tiny_checkpoint: TinyCheckpoint, tmp_path: Path, flags: list[str], message: str
) -> None:
    (tmp_path / "in.de").write_bytes(b"de4 de5\n")
    given = [flag.replace("{text}", str(tmp_path / "in.de")) for flag in flags]
    outcome = run("export", tiny_checkpoint.path, "-o", tmp_path / "auto", *tiny_checkpoint.flags, *given)
    assert message in one_error(outcome)
    assert not (tmp_path / "auto").exists()
