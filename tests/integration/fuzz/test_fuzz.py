"""The fuzzers find what they are there for."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fuzz.crashes import killed_command, kills
from fuzz.files import mutations, readers
from fuzz.models import parity, random_models
from makers.paths import ROOT
from tfexport.errors import TfexportError

pytestmark = pytest.mark.thorough


def ours(path: Path) -> None:
    raise TfexportError("Give another one.")


def silent(path: Path) -> None:
    raise TfexportError(" ")


def foreign(path: Path) -> None:
    raise KeyError("x")


def leaving(path: Path) -> None:
    raise SystemExit(0)


def hanging(path: Path) -> None:
    time.sleep(60)


def hiding(path: Path) -> None:
    """A hang that a reader of broken files takes for an error of the file."""
    try:
        while True:
            pass
    except Exception as error:
        raise TfexportError("Give another one.") from error


def growing(path: Path) -> None:
    bytearray(100 * 2**20)


def unallocated(path: Path) -> None:
    """As ONNX Runtime's error is passed on."""
    raise TfexportError("ONNX Runtime cannot load it: Failed to allocate memory. Export again.")


def caused(path: Path) -> None:
    try:
        bytearray(2**60)
    except MemoryError as error:
        raise TfexportError("Give another one.") from error


def writing(path: Path) -> None:
    (path.parents[1] / "escaped").write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (Path.read_bytes, None),
        (ours, readers.REFUSED),
        (silent, "an error without a message"),
        (foreign, "KeyError"),
        (leaving, "SystemExit"),
        (hanging, "TooLong"),
        (hiding, "TooLong"),
        (growing, "it took 1"),
        (unallocated, "memory could not be had: TfexportError: ONNX Runtime"),
        (caused, "memory could not be had: MemoryError"),
        (writing, "it wrote ['escaped'] outside"),
    ],
)
def test_what_escapes_is_told(read: Any, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "SECONDS", 0.2)
    escaped = readers.run_one(readers.Target("x", (b"",), read), b"content", tmp_path)
    assert (escaped is None) if found is None else (escaped is not None and found in escaped)


def test_mutations_of_yaml_are_settings_and_what_yaml_can_say() -> None:
    seed = b"type: transformer\ndim-emb: 4\nvocabs:\n  - a.yml\n"
    found = [mutations.mutated(random.Random(number), (seed,)) for number in range(200)]
    read = 0
    for data in found:
        with contextlib.suppress(Exception):
            read += isinstance(yaml.safe_load(data), dict)
    assert 60 < read < 190
    for said in (b"!!python/object", b"&b1 [*b0", b"[[[[", b"99999999"):
        assert any(said in data for data in found)


def test_what_is_run_or_opened_elsewhere_is_told(tmp_path: Path) -> None:
    """In a process of its own, which is audited until it ends."""
    (tmp_path / "own").mkdir()
    (tmp_path / "other").write_bytes(b"x")
    code = """
        import os, pickle, subprocess, sys
        from pathlib import Path
        from fuzz.files import readers
        place = Path(sys.argv[1])
        def running(path): os.system("touch ran")
        def quiet(path):
            try:
                subprocess.run(["touch", "ran"])
            except PermissionError:
                pass
        def finding(path): pickle.loads(pickle.dumps(Path))
        def opening(path): (path.parent / "../../other").read_bytes()
        def reading(path): return path.read_bytes()
        watch = readers.Watch([place / "own"])
        for read in (running, quiet, finding, opening, reading):
            found = readers.run_one(readers.Target("x", (b"",), read), b"content", place / "own", watch)
            print(str(found).strip().splitlines()[-1])
    """
    lines = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    told = ("os.system", "subprocess.Popen", "pickle.find_class", "open ", "None")
    assert len(lines) == len(told)
    for line, what in zip(lines, told, strict=True):
        assert what in line
    assert not (tmp_path / "ran").exists()


def test_a_model_that_decodes_otherwise_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = random_models.random_config(random.Random(1))
    assert parity.check(config, 1, tmp_path / "clean")["failed"] == 0
    real = parity.TorchRuntime.from_bundle

    def other(bundle: Any) -> Any:
        runtime = real(bundle)
        runtime.model.decoder.layers[0].self_attention.output.weight.data += 0.5
        return runtime

    monkeypatch.setattr(parity.TorchRuntime, "from_bundle", other)
    assert parity.check(config, 1, tmp_path / "other")["failed"] > 0


# --- kills: what was lost is found


@pytest.fixture
def chosen() -> random.Random:
    return random.Random(0)  # whose first decode does not begin where another one was interrupted


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands that are run to their end; here they do nothing."""
    commands: list[Any] = []
    monkeypatch.setattr(kills, "completed", lambda *arguments: commands.append(arguments))
    return commands


@pytest.mark.parametrize(
    ("lines", "file", "found"),
    [
        (b"one\ntwo\nth", None, []),
        (b"one\none\n", None, ["the lines so far are not those of an uninterrupted decode"]),
        (b"two\n", None, ["the lines so far are not those of an uninterrupted decode"]),
        (None, b"one\ntwo\nthree\n", []),
        (None, b"one\ntwo\n", ["the file is not that of an uninterrupted decode"]),
    ],
)
def test_lost_and_doubled_lines_are_found(
    tmp_path: Path, chosen: random.Random, lines: bytes | None, file: bytes | None, found: list[str]
) -> None:
    command = kills.Decode(tmp_path / "d", 1.0, chosen, [], b"one\ntwo\nthree\n")
    for path, content in ((command.partial, lines), (command.output, file)):
        if content is not None:
            path.write_bytes(content)
    assert command.check(signal.SIGKILL) == found


def test_a_damaged_bundle_and_what_is_left_beside_it_are_found(
    tmp_path: Path, chosen: random.Random, tiny_bundle: Path, completed: list[Any]
) -> None:
    manifest = (tiny_bundle / "manifest.json").read_bytes()
    command = kills.Export(tmp_path / "e", 1.0, chosen, [(tmp_path / "a", manifest), (tmp_path / "b", b"")])
    shutil.copytree(tiny_bundle, command.place)
    assert command.check(signal.SIGKILL) == []
    assert len(completed) == 1
    (command.folder / ".bundle.abcdefgh.partial").mkdir()
    assert "the next export left" in command.check(signal.SIGKILL)[0]
    assert "though it could clean up" in command.check(signal.SIGTERM)[0]
    command.sources.reverse()
    assert "something else is at the place" in command.check(signal.SIGKILL)[0]
    (command.place / "encoder.onnx").write_bytes(b"cut")
    assert "is not what was exported" in command.check(signal.SIGKILL)[0]


MEASURED = "epoch,steps,train_loss\n0,5,1.5\n1,10,1.25\n"


@pytest.mark.parametrize(
    ("steps", "measured", "found"),
    [
        (10, MEASURED, None),
        (5, MEASURED, None),  # killed between the two
        (10, MEASURED[: MEASURED.index("1,10")], "measurements of an epoch are lost"),
        (10, MEASURED + "1,10,1.25\n", "the measurements are not those"),
        (0, MEASURED, "the checkpoint is of 0 steps, it was of 5"),
        (None, MEASURED, "last.ckpt cannot be read"),
    ],
)
def test_what_a_training_has_lost_is_found(
    tmp_path: Path, chosen: random.Random, steps: int | None, measured: str, found: str | None
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "metrics.csv").write_text(MEASURED)
    command = kills.Train(tmp_path / "t", 1.0, chosen, [], tmp_path / "whole")
    command.run_folder.mkdir()
    torch.save({"global_step": 5}, command.run_folder / "last.ckpt")
    (command.run_folder / "metrics.csv").write_text(MEASURED)
    assert command.check(signal.SIGKILL) == []
    if steps is None:
        (command.run_folder / "last.ckpt").write_bytes((command.run_folder / "last.ckpt").read_bytes()[:300])
    else:
        torch.save({"global_step": steps}, command.run_folder / "last.ckpt")
    (command.run_folder / "metrics.csv").write_text(measured)
    problems = command.check(signal.SIGKILL)
    assert (problems == []) if found is None else any(found in problem for problem in problems)


def test_a_command_is_ended_in_time_and_the_moment_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one that writes a file and then waits."""
    writing_one = "import sys, time; open(sys.argv[1], 'w').write('x'); time.sleep(60)"

    def start(*arguments: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", writing_one, str(tmp_path / "d" / "out.partial")], stderr=-1, text=True
        )

    monkeypatch.setattr(killed_command, "tfexport", start)
    monkeypatch.setattr(killed_command, "AIMED", 1.0)
    monkeypatch.setattr(killed_command, "CHANGES", 1)
    command = kills.Decode(tmp_path / "d", 0.001, random.Random(3), [], b"x")
    number, about = command._kill()
    assert number is not None
    assert command.figures.kills == {(number.name, kills.WRITING): 1}
    assert about.endswith(kills.WRITING)
    assert command.figures.problems == []
