"""Output files are whole or not there, and what an interrupted run has left can be gone on with."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from makers.tiny import SRC_VOCAB
from tfexport.commands.output import writing
from tfexport.errors import TfexportError
from tfexport.system.file_locks import lock_file

ABOUT = {"bundle": "x", "search": {"beam": 1}}


def begun(path: Path, content: bytes, about: object = ABOUT) -> None:
    """What a killed run leaves."""
    path.with_name(f"{path.name}.partial").write_bytes(content)
    path.with_name(f"{path.name}.partial.json").write_text(json.dumps(about), encoding="utf-8")


@pytest.mark.parametrize("moment", ["open", "fsync", "replace"])
def test_lines_never_lie_beside_notes_of_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A decode that is killed as it begins, beside the notes of another one, leaves nothing that can be continued."""
    path = tmp_path / "out"
    begun(path, b"", {**ABOUT, "bundle": "y"})

    def begin() -> None:
        with pytest.MonkeyPatch.context() as patches:
            if moment == "open":
                patches.setattr("tfexport.commands.output.whole_file", lambda _: os._exit(9))
            else:
                patches.setattr(*((os, "fsync") if moment == "fsync" else (Path, "replace")), lambda *_: os._exit(9))
            with writing(path, ABOUT):
                os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=begin)
    process.start()
    process.join(60)
    assert process.exitcode == 9
    with writing(path, ABOUT, resume=True) as out:
        assert out.done == 0
        print("one", file=out.file)
    assert path.read_bytes() == b"one\n"


def test_lines_of_an_interrupted_run_are_not_discarded(tmp_path: Path) -> None:
    path = tmp_path / "out"
    begun(path, b"first\n")
    with pytest.raises(TfexportError, match=r"out\.partial has the lines .* --resume, or remove"), writing(path, ABOUT):
        pass
    with writing(path, ABOUT, resume=True) as out:
        assert out.done == 1
    assert path.read_bytes() == b"first\n"


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
@pytest.mark.parametrize("name", ["out.partial", "out.partial.json", "out.partial.json.partial"])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / "out", tmp_path / "other"
    other.write_text("of somebody else")
    (tmp_path / name).symlink_to(other)
    if name == "out.partial":
        with pytest.raises(TfexportError, match="is a link"), writing(path, ABOUT):
            pass
    else:
        with writing(path, ABOUT) as out:
            print("one", file=out.file)
        assert path.read_bytes() == b"one\n"
    assert other.read_text() == "of somebody else"


@pytest.mark.skipif(os.name == "nt", reason="no such files")
@pytest.mark.parametrize("make", [lambda path: os.mkfifo(path), lambda path: os.link(path.with_name("other"), path)])
def test_lines_are_written_to_a_file_of_their_own(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "other").write_text("of somebody else")
    make(tmp_path / "out.partial")
    with pytest.raises(TfexportError, match="is not a file of its own"), writing(tmp_path / "out", ABOUT):
        pass
    assert (tmp_path / "other").read_text() == "of somebody else"


def test_zeros_that_a_loss_of_power_left_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    begun(path, b"one\n\0\0\0\0\nthree\n")
    with writing(path, ABOUT, resume=True) as out:
        assert out.done == 1
        print("two", file=out.file)
    assert path.read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("resume", [False, True])
def test_two_processes_do_not_write_one_file(tmp_path: Path, resume: bool) -> None:
    path = tmp_path / "out"
    holding = (
        "import sys, pathlib; from tfexport.commands.output import writing\n"
        "with writing(pathlib.Path(sys.argv[1]), {'bundle': 'x', 'search': {'beam': 1}}) as out:\n"
        "    print('one', file=out.file, flush=True); print('begun', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holding, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "begun\n"
        with (
            pytest.raises(TfexportError, match=r"another process writes .*partial"),
            writing(path, ABOUT, resume=resume),
        ):
            pass
        assert path.with_name("out.partial").read_text(encoding="utf-8") == "one\n"
        process.stdin.close()
    assert path.read_text(encoding="utf-8") == "one\n"
    with writing(path, ABOUT):  # nobody holds it now
        pass


def test_a_file_that_is_completed_before_it_is_locked_is_not_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    begun(path, b"of another\n")

    def complete_and_lock(file: BinaryIO) -> None:
        if not path.exists():
            path.with_name("out.partial").rename(path)
        lock_file(file)

    monkeypatch.setattr("tfexport.commands.output.lock_file", complete_and_lock)
    with writing(path, ABOUT) as out:
        assert path.read_bytes() == b"of another\n"
        print("one", file=out.file)
    assert path.read_bytes() == b"one\n"


KILLS = 12
"""Of one decode, each at a random moment."""


@pytest.mark.thorough
def test_a_decode_that_is_killed_again_and_again_loses_and_doubles_no_line(tiny_bundle: Path, tmp_path: Path) -> None:
    chosen = random.Random(0)
    lines = [" ".join(str(chosen.randrange(4, SRC_VOCAB)) for _ in range(chosen.randint(1, 18))) for _ in range(6000)]
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "tfexport",
        "decode",
        str(tiny_bundle),
        str(tmp_path / "in"),
        "--input-format",
        "ids",
    ]
    command += ["--output-format", "jsonl", "--threads", "1", "--batch-size", "2", "--max-length", "16"]
    whole = subprocess.run([*command, "-o", str(tmp_path / "whole")], capture_output=True, timeout=120, check=False)
    assert whole.returncode == 0, whole.stderr
    kills, out = 0, tmp_path / "out"
    while not out.exists():
        process = subprocess.Popen([*command, "-o", str(out), "--resume"], stderr=subprocess.PIPE)
        if kills < KILLS:
            time.sleep(0.35 + 0.4 * chosen.random())
            process.send_signal(chosen.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)))
            kills += 1
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0 or kills, said
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()
    assert len(out.read_text(encoding="utf-8").splitlines()) == 6000
