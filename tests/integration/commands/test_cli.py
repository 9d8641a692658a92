"""The command line: what it reads and writes, how it fails, and that it stays light."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from tests.support.references.decode import greedy
from tests.support.references.tutorial import TutorialTransformer
from tests.support.tiny import (
    BOS,
    ENCODER,
    EOS,
    IDS,
    SRC_VOCAB,
    TGT_VOCAB,
    TinyCheckpoint,
    randomised,
    tiny_transformer,
)
from tfexport import __version__
from tfexport.__main__ import main
from tfexport.bundle.reader import Engine, open_bundle
from tfexport.cli import app
from tfexport.errors import BundleError, EngineError, RuntimeUnavailable
from tfexport.exporter.engines import Builder
from tfexport.system.gpu import Gpu
from tfexport.verification.invariance import Arrangement, invariance

COMMANDS = (
    "inspect",
    "export",
    "build",
    "triton",
    "decode",
    "score",
    "attend",
    "classify",
    "parity",
    "bench",
    "train",
    "demo",
    "version",
)
TFEXPORT = Path(sys.executable).with_name("tfexport")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Outcome:
    code: int
    raw: bytes
    stderr: str

    @property
    def stdout(self) -> str:
        return self.raw.decode("utf-8")

    @property
    def lines(self) -> list[str]:
        return self.stdout.split("\n")[:-1]


Run = Callable[..., Outcome]


@pytest.fixture
def run() -> Run:
    """`tfexport ARGUMENTS` in this process, which has PyTorch loaded already."""

    def run_main(*arguments: object, stdin: bytes | None = b"") -> Outcome:
        # As in a poor locale: what is written must not depend on it.
        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        err = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(sys, "argv", ["tfexport", *map(str, arguments)])
            patches.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin)))
            patches.setattr(sys, "stdout", out)
            patches.setattr(sys, "stderr", err)
            with pytest.raises(SystemExit) as caught:
                main()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for stream in (out, err):
            stream.flush()
        return Outcome(int(caught.value.code or 0), out.buffer.getvalue(), err.buffer.getvalue().decode("ascii"))

    return run_main


@pytest.fixture
def decode(run: Run, tiny_bundle: Path) -> Run:
    """`tfexport decode` of the tiny bundle."""

    def run_decode(*arguments: object, stdin: bytes | None = b"") -> Outcome:
        return run("decode", tiny_bundle, *arguments, "--threads", "1", stdin=stdin)

    return run_decode


def one_error(outcome: Outcome) -> str:
    """The only line on stderr, where nothing but an error may be."""
    assert outcome.code == 2, outcome.stderr
    assert outcome.raw == b""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def naive_ids(model: TutorialTransformer, ids: list[int], *, max_length: int = 20) -> list[int]:
    return greedy(model, [BOS, *ids, EOS], bos=BOS, eos=EOS, max_length=max_length)


def naive_text(model: TutorialTransformer, ids: list[int]) -> str:
    return " ".join(f"wört{index}" for index in naive_ids(model, ids) if index != EOS)


SENTENCES = {"de5 de6": [5, 6], "de9": [9], "de10 nothing de12": [10, 0, 12], "de30 de4 de4 de7": [30, 4, 4, 7]}
TEXT = "".join(f"{sentence}\n" for sentence in SENTENCES).encode()


def wanted_text(checkpoint: TinyCheckpoint) -> str:
    return "".join(f"{naive_text(checkpoint.model, ids)}\n" for ids in SENTENCES.values())


# --- help, and what it costs


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_works(command: str | None) -> None:
    result = CliRunner().invoke(app, [command, "--help"] if command else ["--help"])
    assert result.exit_code == 0
    assert "--help" in result.output
    for name in COMMANDS if command is None else [command]:
        assert name in result.output


def test_help_says_the_exit_codes() -> None:
    output = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output.split())
    assert "0 done, 1 parity failed, 2 wrong use or input, 3 a fault of tfexport itself, 130 interrupted" in output


IMPORTED = """
import json, sys
from tfexport.__main__ import main
for arguments in {arguments}:
    sys.argv = ["tfexport", *arguments]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
print(json.dumps([name for name in sys.modules if "." not in name]), file=sys.stderr)
"""


def modules_after(*commands: list[str], stdin: bytes = b"") -> tuple[set[str], bytes]:
    """The modules that a fresh process has imported after `commands`, and its output."""
    script = IMPORTED.format(arguments=[[str(argument) for argument in command] for command in commands])
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=stdin, capture_output=True, env=ENVIRONMENT, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return set(json.loads(done.stderr.splitlines()[-1])), done.stdout


NOT_FOR_DECODING = {"torch", "onnx", "onnx_ir", "lightning", "safetensors"}
NOT_FOR_DECODING |= {"cuda", "tensorrt", "tensorrt_rtx"}
HEAVY = NOT_FOR_DECODING | {"numpy", "onnxruntime", "tokenizers", "spacy", "sacrebleu"}


def test_help_imports_nothing_heavy() -> None:
    modules, _ = modules_after(["--help"], *([command, "--help"] for command in COMMANDS), ["version"])
    assert "typer" in modules
    assert not modules & HEAVY


def test_help_is_quick() -> None:
    """A generous bound, the best of three: PyTorch alone would take most of it."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([TFEXPORT, "--help"], check=True, capture_output=True, env=ENVIRONMENT)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2


def test_decoding_with_onnxruntime_needs_no_torch(tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    commands = [["decode", tiny_bundle, "--threads", "1", *beam] for beam in ([], ["--beam", "2"])]
    modules, output = modules_after(*commands, stdin=TEXT)
    assert "onnxruntime" in modules
    assert not modules & NOT_FOR_DECODING
    assert output.decode() == wanted_text(tiny_checkpoint)  # the second command finds stdin at its end


def test_version(run: Run) -> None:
    found = run("version")
    assert (found.code, found.stderr) == (0, "")
    first, *more = found.lines
    assert first == f"tfexport {__version__}"
    assert [line.split(" ")[0] for line in more if not line.startswith(" ")] == [
        "python",
        "cpu:",
        "runtimes:",
        "kernels:",
    ]


# --- inspect


def test_inspect_tells_what_is_there_and_what_is_not(run: Run, tiny_checkpoint: TinyCheckpoint) -> None:
    outcome = run("inspect", tiny_checkpoint.path)
    assert outcome.code == 0
    assert outcome.stderr == ""
    assert "family tutorial" in outcome.lines[0]
    assert f"parameters: {sum(p.numel() for p in tiny_checkpoint.model.parameters()):,}" in outcome.lines
    assert "  src_vocab_size: 31" in outcome.lines
    assert "not in the file: n_heads (give --heads N)" in outcome.lines


def test_inspect_json(run: Run, tiny_checkpoint: TinyCheckpoint) -> None:
    outcome = run("inspect", tiny_checkpoint.path, "--heads", "3", "--json")
    found = json.loads(outcome.stdout)
    assert found["path"] == str(tiny_checkpoint.path)
    assert found["family"] == "tutorial"
    assert found["fields"]["n_heads"] == 3
    assert found["missing"] == {"pad_id": "--pad N", "bos_id": "--bos N", "eos_id": "--eos N"}
    assert (found["problems"], found["notes"], found["vocabulary"]) == ([], [], False)


def test_inspect_tells_problems(run: Run, tmp_path: Path) -> None:
    weights = tiny_transformer().state_dict()
    del weights["decoder.fc_out.bias"]
    torch.save(weights, tmp_path / "part.pt")
    outcome = run("inspect", tmp_path / "part.pt")
    assert outcome.code == 0
    assert "problem: missing: decoder.fc_out.bias" in outcome.lines


# --- export


def test_export_command(
    command_export: tuple[Path, subprocess.CompletedProcess[str]], tiny_checkpoint: TinyCheckpoint
) -> None:
    folder, done = command_export
    assert done.returncode == 0
    assert {path.name for path in folder.iterdir()} == {"tiny.pt", "tiny"}  # the bundle is named after the file
    assert done.stdout.splitlines()[0] == "exported tiny: family tutorial"
    assert re.match(
        r"  fp32 is as PyTorch computes it: errors reach \d+% of what rounding explains \(", done.stdout.splitlines()[1]
    )
    assert done.stdout.splitlines()[2] == "next: tfexport parity tiny INPUT; tfexport decode tiny INPUT"
    assert done.stderr == ""


@pytest.fixture
def here(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    """A copy of the checkpoint that other files may lie beside."""
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "tiny.pt"
    path.write_bytes(tiny_checkpoint.path.read_bytes())
    return path


@pytest.mark.parametrize(
    ("name", "bundle"), [("m.pt", "m"), ("m.best.ckpt", "m.best"), ("m", "m.bundle"), (".pt", ".pt.bundle")]
)
def test_bundle_is_named_after_the_checkpoint(
    run: Run, here: Path, tiny_checkpoint: TinyCheckpoint, name: str, bundle: str
) -> None:
    outcome = run("export", here.rename(here.with_name(name)), *tiny_checkpoint.flags)
    assert outcome.code == 0, outcome.stderr
    assert {path.name for path in here.parent.iterdir()} == {name, bundle}


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
    outcome = run("export", here, *tiny_checkpoint.flags, "--eos", "7")
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
    assert outcome.stderr.startswith(f"note: not using the file beside the checkpoint: {here.with_suffix('.json')}")
    assert "n_heads" in json.loads(outcome.stdout)["missing"]


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
    for name, line in zip(names, outcome.lines[1 : 1 + len(names)], strict=True):
        assert re.match(rf"  {name} is as PyTorch computes it: errors reach \d+% of what rounding explains ", line)
    bundle = open_bundle(here.with_suffix(""))
    assert bundle.precisions == ["float32", "float16", *["bfloat16"] * ("bf16" in given)]


@pytest.fixture
def export_engines(run: Run, here: Path, tiny_checkpoint: TinyCheckpoint) -> Run:
    """`tfexport export --target tensorrt` for a GPU that is not here."""

    def run_export(*arguments: object) -> Outcome:
        flags = ("--target", "tensorrt", "--gpu", "sm89", "--gpu-memory", "0.1")
        return run("export", here, *tiny_checkpoint.flags, *flags, *arguments)

    return run_export


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


def test_export_writes_a_model_repository_beside_the_bundle(
    run: Run, here: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    arguments = ("export", here, *tiny_checkpoint.flags, "--target", "triton", "--beam", "3")
    outcome = run(*arguments)
    assert outcome.code == 0, outcome.stderr
    repository = here.with_name("tiny.triton")
    assert outcome.lines[2] == f"wrote {repository} in fp32: encoder, decoder_step, translate"
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


def interrupted(path: Path, flags: list[str], number: int) -> subprocess.CompletedProcess[bytes]:
    """Export in a process of its own and send it a signal when it has begun to write."""
    process = subprocess.Popen(
        [TFEXPORT, "export", path, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        # A shell lets what it runs in the background ignore Ctrl-C, and these tests may be run so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        for _ in range(30_000):
            if any(path.suffix == ".partial" for path in path.parent.iterdir()):
                break
            time.sleep(0.001)
        process.send_signal(number)  # what follows takes some tenths of a second
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


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

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("tfexport.bundle.reader.open_bundle", interrupted_import)
    outcome = run("decode", tiny_bundle)
    signal.signal(signal.SIGINT, before)
    assert (outcome.code, outcome.stderr) == (128 + number, "")


def test_of_two_exports_at_once_one_is_told(here: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    command = [TFEXPORT, "export", here, *tiny_checkpoint.flags, "--no-parity"]
    both = [subprocess.Popen(command, stdout=-1, stderr=-1, env=ENVIRONMENT, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in both]
    said = {process.returncode: error for process, error in zip(both, errors, strict=True)}
    assert sorted(said) == [0, 2]
    assert "exists. Replace it with --force" in said[2]
    open_bundle(here.with_suffix(""))
    assert sorted(path.name for path in here.parent.iterdir()) == ["tiny", "tiny.pt"]


# --- build


@pytest.fixture
def build(run: Run, own_bundle: Path) -> Run:
    """`tfexport build` of a bundle for a GPU that is not here, where the arguments name no other."""

    def run_build(*arguments: object, stdin: bytes | None = b"") -> Outcome:
        defaults = ("--precision", "fp32", "--gpu", "sm89", "--gpu-memory", "1")
        return run("build", own_bundle, *defaults, *arguments, stdin=stdin)  # of two equal flags the last one counts

    return run_build


def test_a_dry_run_tells_the_cost_and_builds_nothing(build: Run, own_bundle: Path) -> None:
    before = {path.name: path.read_bytes() for path in own_bundle.iterdir()}
    outcome = build("--dry-run", "--gpu", "sm89,sm120", "--max-batch", "8", "--max-beam", "5")
    assert outcome.code == 0
    assert outcome.stderr == ""
    # The model has 20 positions: sources end aligned, and one cache holds them all.
    assert outcome.lines[0] == "plan for fp32: batches to 8, beams to 5, sources to 16 ids, caches of 32 slots"
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


def test_building_without_onnx_names_the_extra_that_brings_it(tiny_bundle: Path) -> None:
    command = "import sys; sys.modules['onnx'] = None; from tfexport.__main__ import main; main()"
    for arguments, extra in ((["build", tiny_bundle], "tensorrt-rtx"), (["export", "missing.pt"], "export")):
        done = subprocess.run(
            [sys.executable, "-c", command, *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=60
        )
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.endswith(f"needs onnx, which is not installed: pip install 'tfexport[{extra}]'.")


def test_lengths_are_planned_from_a_text(build: Run, own_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"de5 de6\n\nde9 de4\n\xff\n")
    for arguments, stdin in (((tmp_path / "in.txt",), b""), (("-",), (tmp_path / "in.txt").read_bytes())):
        outcome = build("--dry-run", "--max-batch", "2", "--plan-for", *arguments, stdin=stdin)
        assert outcome.code == 0, outcome.stderr
        assert outcome.lines[0] == "plan for fp32: batches to 2, beams to 4, sources to 16 ids, caches of 32 slots"
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


def last_error(outcome: Outcome) -> str:
    """The only line on stderr, of a command that had something to say before."""
    assert outcome.code == 2, outcome.stderr
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(".")
    return line


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


# --- triton


def test_a_model_repository_of_a_bundle(run: Run, own_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = own_bundle.with_name("own.triton")
    outcome = run("triton", own_bundle, "--beam", "3", "--max-length", "17", "--batch-size", "5")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.lines == [
        f"wrote {repository} in fp32: encoder, decoder_step, translate",
        f"next: tritonserver --model-repository={repository}",
    ]
    config = (repository / "translate" / "config.pbtxt").read_text()
    assert "max_batch_size: 5" in config
    parameters = dict(re.findall(r'key: "(\w+)"\n\s*value \{\n\s*string_value: "(.*?)"', config))
    assert (parameters["beam"], parameters["max_length"], parameters["runtime"]) == ("3", "17", "ort-cpu")
    assert one_error(run("triton", own_bundle)).endswith(
        "own.triton exists. Replace it with --force, or give another folder with -o."
    )
    assert run("triton", own_bundle, "--force").code == 0
    assert run("triton", own_bundle, "-o", own_bundle.with_name("other")).code == 0
    monkeypatch.chdir(own_bundle)
    assert run("triton", ".", "--force").code == 0  # beside the bundle, also when it has no name
    assert {path.name for path in own_bundle.parent.iterdir()} == {"own", "own.triton", "other"}


def test_a_bundle_with_engines_is_served_with_them(
    run: Run, half_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default in the precision that the engines have."""
    bundle = open_bundle(half_bundle)
    engine = Engine(
        file="encoder.engine",
        role="encoder",
        precision="float16",
        library="tensorrt_rtx",
        version="1",
        gpu="sm89",
        cache=0,
        profile={},
        seconds=1.0,
    )
    monkeypatch.setattr("tfexport.bundle.reader.open_bundle", lambda _: replace(bundle, engines=(engine,)))
    outcome = run("triton", half_bundle, "-o", tmp_path / "models", "--runtime", "tensorrt")
    assert outcome.code == 0, outcome.stderr
    assert outcome.lines[0] == f"wrote {tmp_path / 'models'} in fp16: encoder, decoder_step, translate"
    assert (
        run("triton", half_bundle, "-o", tmp_path / "on cpu")
        .lines[0]
        .endswith("in fp32: encoder, decoder_step, translate")
    )
    wrong = run("triton", half_bundle, "-o", tmp_path / "other", "--runtime", "tensorrt", "--precision", "fp32")
    assert "no TensorRT fp32 engines" in one_error(wrong)


def test_a_model_repository_is_written_without_pytorch(tiny_bundle: Path, tmp_path: Path) -> None:
    modules, _ = modules_after(["triton", tiny_bundle, "-o", tmp_path / "models"])
    assert not modules & {"torch", "onnx", "onnxruntime"}


# --- decode


def test_decode_reads_stdin_or_a_file_and_writes_stdout_or_a_file(
    decode: Run, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    wanted = wanted_text(tiny_checkpoint)
    assert len(set(wanted.splitlines())) > 2  # the sentences can be told apart
    (tmp_path / "in.txt").write_bytes(TEXT)
    for arguments, stdin in (((), TEXT), (("-",), TEXT), ((tmp_path / "in.txt",), b"")):
        outcome = decode(*arguments, stdin=stdin)
        assert outcome.code == 0
        assert outcome.stdout == wanted
        outcome = decode(*arguments, "-o", tmp_path / "out.txt", stdin=stdin)
        assert outcome.raw == b""
        assert (tmp_path / "out.txt").read_text(encoding="utf-8") == wanted
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "out.txt"}


def test_both_runtimes_write_the_same(decode: Run) -> None:
    for beam in (1, 3):
        one, other = (decode("--runtime", name, "--beam", beam, stdin=TEXT) for name in ("ort-cpu", "torch"))
        assert one.raw == other.raw != b""


def test_nbest_is_separated_by_tabs(decode: Run) -> None:
    outcome = decode("--beam", "3", "--nbest", "2", "--output-format", "ids", stdin=TEXT)
    assert [len(line.split("\t")) for line in outcome.lines] == [2] * len(SENTENCES)


@pytest.mark.parametrize(
    ("raw", "lines"),
    [
        (b"", 0),
        (b"\n", 1),
        (b"de5", 1),
        (b"de5\n\n", 2),
        (b"de5\r\nde6\r\n", 2),
        (b"\n\n \t\nde5\n\n", 5),
        (b"\xff\xfe\n\xc3\n", 2),
        (b"de5 \x00 de6\nde7\n", 2),
        ("de5\u2028de6\x0cde7\x85\nde8\n".encode(), 2),
        (b"de5 " * 30 + b"\nde6\n", 2),
        (b"\xef\xbb\xbfde5\n", 1),
    ],
)
def test_as_many_lines_come_out_as_go_in(decode: Run, raw: bytes, lines: int) -> None:
    for output_format in ("text", "ids", "tokens", "jsonl"):
        outcome = decode("--output-format", output_format, stdin=raw)
        assert outcome.code == 0
        assert outcome.raw.count(b"\n") == lines


def test_line_ends_do_not_change_a_line(decode: Run, tiny_checkpoint: TinyCheckpoint) -> None:
    windows = TEXT.replace(b"\n", b"\r\n").removesuffix(b"\r\n")
    assert decode(stdin=windows).stdout == wanted_text(tiny_checkpoint)


def test_what_is_wrong_with_a_line_is_told_in_its_place(decode: Run, tiny_checkpoint: TinyCheckpoint) -> None:
    raw = b"de5 de6\n\nde9 \xff\n" + b"de4 " * 19 + b"\nde5 nothing\n"
    outcome = decode("--output-format", "jsonl", stdin=raw)
    records = [json.loads(line) for line in outcome.lines]
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5]
    ends = {index: naive_ids(tiny_checkpoint.model, ids)[-1] == EOS for index, ids in ((0, [5, 6]), (4, [5, 0]))}
    decoded = {index: "ok" if done else "length_limit" for index, done in ends.items()}
    assert [record["status"] for record in records] == [decoded[0], "empty", "invalid_utf8", "too_long", decoded[4]]
    assert records[0]["hypotheses"][0]["ids"] == naive_ids(tiny_checkpoint.model, [5, 6])
    assert records[0]["hypotheses"][0]["text"] == naive_text(tiny_checkpoint.model, [5, 6])
    assert [record["hypotheses"] for record in records[1:4]] == [[], [], []]
    assert records[2]["message"] == "byte 5 is not UTF-8"
    assert records[3]["message"] == "21 ids, the model reads at most 20: split the line"
    warnings = outcome.stderr.splitlines()
    assert "warning: line 3: invalid_utf8: byte 5 is not UTF-8" in warnings
    assert "warning: line 4: too_long: 21 ids, the model reads at most 20: split the line" in warnings
    assert warnings[-1].startswith("warning: of 5 lines: ")
    assert not any("line 2" in warning for warning in warnings)  # an empty line is nothing to warn of


def test_the_length_limit_is_a_status(decode: Run, tiny_checkpoint: TinyCheckpoint) -> None:
    outcome = decode("--max-length", "3", "--output-format", "jsonl", stdin=TEXT)
    for line, ids in zip(outcome.lines, SENTENCES.values(), strict=True):
        record = json.loads(line)
        wanted = naive_ids(tiny_checkpoint.model, ids, max_length=3)
        assert record["hypotheses"][0]["ids"] == wanted
        assert record["status"] == ("ok" if wanted[-1] == EOS else "length_limit")
        assert record["hypotheses"][0]["finished"] == (wanted[-1] == EOS)


def test_only_the_first_warnings_are_printed_and_all_are_counted(decode: Run) -> None:
    outcome = decode(stdin=b"\xff\n" * 40)
    assert outcome.stderr.count("warning: line ") == 10
    last = "warning: of 40 lines: 40 invalid_utf8; --output-format jsonl marks them"
    assert outcome.stderr.splitlines()[-1] == last


def test_no_ratio_of_lengths_is_no_limit(decode: Run) -> None:
    """An infinite ratio either means no limit or is refused; it must not mean one token."""
    free, outcome = decode(stdin=TEXT), decode("--max-length-ratio", "inf", stdin=TEXT)
    assert outcome.code == 2 or outcome.raw == free.raw


def test_decode_in_half_precision(run: Run, half_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    """Rounded, a sum of log-probabilities is another one, but on this model and input the tokens are the same."""
    records = {}
    for precision in ("fp32", "fp16"):
        arguments = ("--precision", precision, "--threads", "1", "--output-format", "jsonl", "--beam", "2")
        outcome = run("decode", half_bundle, *arguments, stdin=TEXT)
        assert outcome.code == 0
        records[precision] = [json.loads(line)["hypotheses"][0] for line in outcome.lines]
    for exact, rounded in zip(records["fp32"], records["fp16"], strict=True):
        assert rounded["ids"] == exact["ids"]
        assert rounded["log_prob"] != exact["log_prob"]
        assert rounded["log_prob"] == pytest.approx(exact["log_prob"], abs=0.1)
    outcome = run("decode", half_bundle, "--precision", "fp16", "--threads", "1", stdin=TEXT)
    assert outcome.stdout == wanted_text(tiny_checkpoint)


def test_a_precision_that_cannot_be_decoded_is_one_line(run: Run, tiny_bundle: Path, half_bundle: Path) -> None:
    missing = one_error(run("decode", tiny_bundle, "--precision", "fp16", stdin=TEXT))
    assert missing.endswith("Export again with --precision fp16.")
    on_gpu = one_error(run("decode", half_bundle, "--precision", "int8", "--runtime", "torch", stdin=TEXT))
    assert on_gpu.endswith("Use --runtime ort-cpu, or --precision fp32.")


@pytest.mark.parametrize("command", ["decode", "parity"])
def test_runtimes_of_a_gpu_name_what_brings_them(
    run: Run, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    for library in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, library, None)
    for runtime, extra in (("ort-cuda", "cuda"), ("tensorrt", "tensorrt-rtx")):
        line = one_error(run(command, tiny_bundle, "-", "--runtime", runtime, stdin=TEXT))
        assert f"the runtime {runtime} needs " in line
        assert f"pip install 'tfexport[{extra}]'" in line


# --- budgets


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
        (["--precision", "int8", "--budget", "top1=1", "--budget-input", "{text}"], "--budget is for auto-"),
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


# --- parity


def test_parity_passes(run: Run, tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(TEXT)
    arguments = (
        tmp_path / "in.txt",
        "--checkpoint",
        tiny_checkpoint.path,
        "--beam",
        "2",
        "--no-certify",
        "--threads",
        "1",
    )
    outcome = run("parity", tiny_bundle, *arguments)
    assert outcome.code == 0
    assert outcome.lines[0] == "ort-cpu in fp32 against PyTorch in fp32:"
    assert "  PASSED" in outcome.lines
    assert outcome.lines[-2:] == ["  9 graphs compute what they are defined as, value by value", "PASSED"]
    (told, note, other) = outcome.stderr.splitlines()
    assert "does not tell" in told
    assert told.endswith("compared with nothing, unless --config FILE.json has it")
    assert note.startswith("note: the source tokenizer is compared with nothing, as ")
    assert other.endswith("give it with --tgt-vocab")
    outcome = run("parity", tiny_bundle, *arguments, "--json", "--runtime", "torch", "--runtime", "ort-cpu")
    told = json.loads(outcome.stdout)
    assert told.keys() == {"passed", "reports", "mismatches", "graphs", "invariance"}
    assert told["passed"] is True
    assert told["mismatches"] == told["invariance"] == []
    assert all(graph["first"] is None and "values" not in graph for graph in told["graphs"])
    reports = told["reports"]
    assert [report["runtime"] for report in reports] == ["torch", "ort-cpu"]
    for report in reports:
        assert report["passed"]
        assert report["sentences"] == report["identical"] == len(SENTENCES)
        assert report["beam"] == 2


def change_consistently(bundle: Path) -> None:
    """Another weight, as a fault of the export would leave it: graphs, weights and manifest agree with each other."""
    path = bundle / "weights.safetensors"
    weights = load_file(path)
    weights["decoder.layers.0.feed_forward.hidden.weight"] *= 1.05
    save_file(weights, path, {"format": "pt"})
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"][path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def test_parity_with_the_checkpoint_finds_what_the_bundle_cannot_tell(
    run: Run, own_bundle: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    change_consistently(own_bundle)
    assert run("parity", own_bundle, "-", "--threads", "1", stdin=TEXT).code == 0
    arguments = ("parity", own_bundle, "-", "--checkpoint", tiny_checkpoint.path, "--beam", "1", "--threads", "1")
    outcome = run(*arguments, stdin=TEXT)
    assert outcome.code == 1
    index = outcome.lines.index("  FAILED")
    assert re.match(
        r"    logits of step 1 are off by .*, .* is allowed \(PyTorch's own rounding is ", outcome.lines[index + 1]
    )
    weight = "decoder.layers.0.feed_forward.hidden.weight"
    assert (
        f"weights.safetensors: {weight} differs from the model's in 960 of 960 numbers, first in row 0" in outcome.lines
    )
    assert any(
        line.startswith("decoder_step.onnx: departs from PyTorch at decoder.layers.0.feed_forward.hidden/")
        for line in outcome.lines
    )
    outcome = run(*arguments, "--json", stdin=TEXT)
    assert outcome.code == 1
    told = json.loads(outcome.stdout)
    assert told["passed"] is False
    assert [found["file"] for found in told["mismatches"]] == ["weights.safetensors"]
    (report,) = told["reports"]
    assert not report["passed"]
    assert report["failures"]
    assert report["logits"]["max"] > 1e-3
    assert max(errors["max"] for errors in report["cross"].values()) < 1e-5  # the encoder was left alone


def test_parity_compares_settings_with_those_of_a_configuration(
    run: Run, own_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """A setting that the checkpoint does not tell, changed in the manifest in both of its places."""
    manifest = json.loads((own_bundle / "manifest.json").read_text())
    right = dict(manifest["source"]["given"])
    manifest["source"]["given"]["eos_id"] = manifest["config"]["eos_id"] = 9
    (own_bundle / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "config.json").write_text(json.dumps(right))
    arguments = ("parity", own_bundle, "-", "--checkpoint", tiny_checkpoint.path, "--beam", "1")
    outcome = run(*arguments, "--config", tmp_path / "config.json", stdin=TEXT)
    assert outcome.code == 1
    assert f"manifest.json: eos_id is 9, the checkpoint's is {right['eos_id']}" in outcome.lines
    outcome = run("parity", own_bundle, "-", "--config", tmp_path / "config.json", stdin=TEXT)
    assert outcome.code == 2
    assert "Give --checkpoint CKPT too" in outcome.stderr


def test_parity_fails_for_a_file_alone(run: Run, own_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    """A row of a table that nothing decodes: outputs say nothing of it."""
    path = own_bundle / "weights.safetensors"
    weights = load_file(path)
    weights["encoder.positions.table"][19] += 1
    save_file(weights, path, {"format": "pt"})
    manifest = json.loads((own_bundle / "manifest.json").read_text())
    manifest["files"][path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (own_bundle / "manifest.json").write_text(json.dumps(manifest))
    arguments = ("parity", own_bundle, "-", "--checkpoint", tiny_checkpoint.path, "--beam", "1")
    outcome = run(*arguments, stdin=b"de4 de5 de6 de7 de8 de9 de10\n" * 3)
    assert outcome.code == 1
    assert "  PASSED" in outcome.lines
    assert outcome.lines[-1] == "FAILED: 3 of 9 graphs, 1 difference in the files"  # those that read a whole source
    assert "certified in" not in outcome.stderr


def test_parity_with_targets_and_in_all_arrangements(run: Run, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.de").write_bytes(b"de4 de5\nde6 de7 de8\n")
    (tmp_path / "out.en").write_bytes(b"en4 en5\nen6\n")
    arguments = [
        "parity",
        tiny_bundle,
        tmp_path / "in.de",
        "--targets",
        tmp_path / "out.en",
        "--beam",
        "2",
        "--float64",
    ]
    outcome = run(*arguments, "--invariance", "--no-certify")
    assert outcome.code == 0
    assert "  BLEU " in outcome.stdout
    assert "ort-cpu in fp32, beam 2: 2 sentences beside each alone" in outcome.stdout
    assert "  2 threads       2 with the same tokens" in outcome.stdout
    found = json.loads(run(*arguments, "--invariance", "--no-certify", "--json").stdout)
    assert found["reports"][0]["quality"][0].keys() == {"bleu", "chrf"}
    assert [way["identical"] for way in found["invariance"][0]["arrangements"]] == [2] * 5
    assert found["invariance"][0]["passed"] is True
    one_error(run(*arguments[:3], "--targets", tmp_path / "missing"))


def test_parity_without_input_compares_random_ids_and_says_so(run: Run, tiny_bundle: Path) -> None:
    outcome = run("parity", tiny_bundle, "--threads", "1")
    assert outcome.code == 0
    assert "random ids" in outcome.stderr


def test_parity_on_real_input_certifies_and_decode_asks_for_it(run: Run, own_bundle: Path) -> None:
    said = run("decode", own_bundle, stdin=TEXT).stderr
    assert f"note: fp32 on ort-cpu was not compared with PyTorch: tfexport parity {own_bundle} INPUT" in said
    assert "certified" not in run("parity", own_bundle).stderr  # random ids certify nothing
    assert "certified" not in run("parity", own_bundle, "-", "--no-certify", stdin=TEXT).stderr
    assert not (own_bundle / "certificates.json").exists()
    assert "fp32 on ort-cpu" in run("parity", own_bundle, "-", stdin=TEXT).stderr
    (entry,) = json.loads((own_bundle / "certificates.json").read_text(encoding="utf-8"))
    assert [report["beam"] for report in entry["reports"]] == [1, 4]
    assert not entry["inputs"]["random"]
    assert "PyTorch" not in run("decode", own_bundle, stdin=TEXT).stderr


def test_parity_certifies_nothing_that_failed_in_any_way(
    run: Run, own_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "certified in" in run("parity", own_bundle, "-", stdin=TEXT).stderr
    assert "note: not certified: --tolerance" in run("parity", own_bundle, "-", "--tolerance", "1", stdin=TEXT).stderr
    short = run("parity", own_bundle, "-", "--beam", "1", "--max-length", "1", stdin=TEXT)
    assert "note: not certified: fewer than 10 steps" in short.stderr

    def leaky(*given: object, **options: object) -> object:
        return replace(invariance(*given, **options), arrangements=(Arrangement("padded", 1, 1, 0),))

    monkeypatch.setattr("tfexport.verification.invariance.invariance", leaky)
    outcome = run("parity", own_bundle, "-", "--invariance", stdin=TEXT)
    assert outcome.code == 1
    assert "certified" not in outcome.stderr
    assert "was not compared with PyTorch" in run("decode", own_bundle, stdin=TEXT).stderr  # the earlier one is gone


def test_parity_says_at_once_that_a_page_has_no_place(run: Run, tiny_bundle: Path, tmp_path: Path) -> None:
    error = one_error(run("parity", tiny_bundle, "--report", tmp_path / "missing" / "x.html"))
    assert "there is no folder" in error


def test_parity_names_where_graphs_depart(run: Run, own_bundle: Path) -> None:
    clean = run("parity", own_bundle, "--bisect", "--beam", "1", "--json")
    found = json.loads(clean.stdout)["graphs"]
    files = {path.name for path in own_bundle.glob("*.onnx")}
    assert {graph["file"] for graph in found} == files
    assert {graph["file"] for graph in found if graph["with_kernels"]} <= {file for file in files if ".ort." in file}
    assert all(graph["first"] is None and len(graph["values"]) for graph in found)
    assert clean.code == 0
    told = run("parity", own_bundle, "--bisect", "--beam", "1")
    assert [line.split(": all ")[0] for line in told.lines if ": all " in line] == [
        f"{graph['file']}{' with kernels' if graph['with_kernels'] else ''}" for graph in found
    ]

    path = own_bundle / "beam_step.ort.onnx"
    model = onnx.load(path, load_external_data=False)
    norm = next(node for node in model.graph.node if node.name.startswith("decoder.layers.0.norms.1/"))
    for attribute in norm.attribute:
        attribute.f = 1e-2 if attribute.name == "epsilon" else attribute.f
    onnx.save(model, path)
    manifest = json.loads((own_bundle / "manifest.json").read_text())
    manifest["files"][path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (own_bundle / "manifest.json").write_text(json.dumps(manifest))
    outcome = run("parity", own_bundle, "-", "--beam", "1", stdin=TEXT)  # which does not decode with this graph
    assert outcome.code == 1
    assert f"beam_step.ort.onnx: departs from PyTorch at {norm.name}" in outcome.lines
    assert outcome.lines[-1].startswith("FAILED: 1 of ")
    assert outcome.lines[-1].endswith(" graphs, 1 difference in the files")
    assert "certified" not in outcome.stderr


def test_parity_in_half_precision(run: Run, half_bundle: Path) -> None:
    arguments = ("parity", half_bundle, "-", "--threads", "1", "--precision", "fp16", "--beam", "1", "--no-certify")
    outcome = run(*arguments, stdin=TEXT)
    assert outcome.code == 0
    assert outcome.lines[0] == "ort-cpu in fp16 against PyTorch in fp32:"
    assert "  PASSED" in outcome.lines
    (report,) = json.loads(run(*arguments, "--json", stdin=TEXT).stdout)["reports"]
    assert (report["precision"], report["passed"]) == ("float16", True)
    assert report["limits"] == {"top1": 0.99, "loss": 0.02, "furthest": 1.0, "kl": 0.001, "error": None}
    outcome = run(*arguments, "--tolerance", "1e-6", stdin=TEXT)
    assert outcome.code == 1
    assert "  PASSED" in outcome.lines  # the limit is that of the graphs, below float32
    assert "1.0e-06 is allowed" in outcome.stdout
    assert outcome.lines[-1].startswith("FAILED: ")
    assert outcome.lines[-1].endswith("graphs")


def other_target_words() -> TutorialTransformer:
    return tiny_transformer(tgt_vocab=TGT_VOCAB + 4)


def another_layer() -> TutorialTransformer:
    model = TutorialTransformer(src_vocab=SRC_VOCAB, tgt_vocab=TGT_VOCAB, n_decoder_layers=2, **ENCODER)
    randomised(model)
    return model


@pytest.mark.parametrize("other", [other_target_words, another_layer])
def test_parity_with_a_checkpoint_of_other_sizes_is_an_error(
    run: Run, tiny_bundle: Path, tmp_path: Path, other: Callable[[], TutorialTransformer]
) -> None:
    torch.save(other().state_dict(), tmp_path / "other.pt")
    outcome = run("parity", tiny_bundle, "-", "--checkpoint", tmp_path / "other.pt", "--threads", "1", stdin=TEXT)
    assert outcome.code == 2, outcome.stderr
    assert "error: " in outcome.stderr


def test_parity_of_a_manifest_without_a_source_is_an_error(
    run: Run, own_bundle: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    manifest = json.loads((own_bundle / "manifest.json").read_text())
    del manifest["source"]
    (own_bundle / "manifest.json").write_text(json.dumps(manifest))
    one_error(run("parity", own_bundle, "-", "--checkpoint", tiny_checkpoint.path, stdin=TEXT))


# --- errors


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
        (["decode", "{bundle}", "--beam", "2", "--nbest", "3"], "nbest 3 is not between 1 and the beam's 2"),
        (["decode", "{bundle}", "--min-length", "9", "--max-length", "9"], "min_length 9 is not below max_length 9"),
        (["decode", "{bundle}", "--length-penalty", "nan"], "length_penalty is nan, not "),
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
            "--plan-for takes the place of --cache and --max-source. Give one of them",
        ),
        (["build", "{bundle}", "--plan-for", "-", "--max-source", "128"], "--plan-for takes the place of --cache"),
        (["build", "{bundle}", "--precision", "fp16,int8"], "engines have no int8"),
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
        ["train"],
    ],
)
def test_wrong_use_exits_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_debug_shows_the_traceback_and_keeps_the_exit_code(tmp_path: Path) -> None:
    command = [TFEXPORT, "decode", "missing", "--debug"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
    assert "Traceback" in done.stderr
    assert BundleError.__name__ in done.stderr
    assert done.returncode == 2


def test_a_fault_of_tfexport_is_one_line_and_exits_with_3(
    run: Run, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken\n  at two\n  lines")

    monkeypatch.setattr("tfexport.bundle.reader.open_bundle", fail)
    outcome = run("decode", tiny_bundle)
    assert outcome.code == 3
    assert "RuntimeError: broken" in outcome.stderr
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
