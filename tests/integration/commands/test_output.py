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
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.support.tiny import SRC_VOCAB
from tfexport.commands.output import refuse_to_replace, writing
from tfexport.errors import TfexportError
from tfexport.system.file_locks import lock_file

ABOUT = {"bundle": "x", "search": {"beam": 1}}


def begun(path: Path, content: bytes, about: object = ABOUT) -> None:
    """What a killed run leaves."""
    path.with_name(f"{path.name}.partial").write_bytes(content)
    path.with_name(f"{path.name}.partial.json").write_text(json.dumps(about), encoding="utf-8")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_takes_its_name_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before\n", encoding="utf-8")
    with writing(path, ABOUT) as out:
        print("one", file=out.file, flush=True)
        assert path.read_text(encoding="utf-8") == "before\n"
        assert names(tmp_path) == ["out", "out.partial", "out.partial.json"]
    assert path.read_text(encoding="utf-8") == "one\n"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("left", "done"),
    [(b"", 0), (b"one\n", 1), (b"one\ntwo\n", 2), (b"one\ntw", 1), (b"one", 0), (b"one\n\n\n", 3), (b"\xc3", 0)],
)
def test_what_was_left_is_gone_on_with_after_its_last_whole_line(tmp_path: Path, left: bytes, done: int) -> None:
    path = tmp_path / "out"
    begun(path, left)
    with writing(path, ABOUT, resume=True) as out:
        assert out.done == done
        print("next", file=out.file)
    assert path.read_bytes() == b"".join(left.splitlines(keepends=True)[:done]) + b"next\n"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(("left", "done"), [(2, 0), (3, 3), (5, 3), (6, 6), (8, 6)])
def test_windows_that_are_not_whole_are_decoded_again(tmp_path: Path, left: int, done: int) -> None:
    """Lines that met other lines in a batch than without the interruption would have other last digits."""
    path = tmp_path / "out"
    lines = [b"%d\n" % number for number in range(9)]
    begun(path, b"".join(lines[:left]) + b"cu")
    with writing(path, ABOUT, resume=True, window=3) as out:
        assert out.done == done
        print("next", file=out.file)
    assert path.read_bytes() == b"".join(lines[:done]) + b"next\n"
    begun(path, b"of another\n", {**ABOUT, "bundle": "y"})
    with pytest.raises(TfexportError, match="begun with another"), writing(path, ABOUT, resume=True, window=3):
        pass


def test_without_resume_it_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "out"
    begun(path, b"one\n")
    with writing(path, ABOUT) as out:
        assert out.done == 0
        print("next", file=out.file)
    assert path.read_bytes() == b"next\n"


def test_lines_of_something_else_are_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for about in ({**ABOUT, "bundle": "y"}, [], None, {"bundle": "x"}):
        begun(path, b"one\n", about)
        with pytest.raises(TfexportError, match="begun with another"), writing(path, ABOUT, resume=True):
            pass
        assert path.with_name("out.partial").read_bytes() == b"one\n"
    path.with_name("out.partial.json").unlink()
    with pytest.raises(TfexportError, match="begun with another"), writing(path, ABOUT, resume=True):
        pass


def test_nothing_to_go_on_with_is_told_and_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with writing(tmp_path / "out", ABOUT, resume=True) as out:
        assert out.done == 0
    assert "there is nothing in" in capsys.readouterr().err
    with pytest.raises(TfexportError, match="only a file can be gone on with"), writing(None, ABOUT, resume=True):
        pass


def test_a_failure_keeps_what_was_there_and_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before\n", encoding="utf-8")

    def fill_the_disk() -> None:
        with writing(path, ABOUT) as out:
            print("one", file=out.file)
            raise OSError(28, os.strerror(28))

    with pytest.raises(TfexportError, match=r"No space left.*lines done so far"):
        fill_the_disk()
    assert path.read_text(encoding="utf-8") == "before\n"
    assert path.with_name("out.partial").read_text(encoding="utf-8") == "one\n"


@pytest.mark.parametrize("ended", [KeyboardInterrupt(), SystemExit(143)])
def test_who_interrupts_is_told_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ended: BaseException
) -> None:
    def interrupt() -> None:
        with writing(tmp_path / "out", ABOUT) as out:
            print("one", file=out.file)
            raise ended

    with pytest.raises(type(ended)):
        interrupt()
    assert f"are in {tmp_path / 'out.partial'}; --resume goes on after them" in capsys.readouterr().err
    assert (tmp_path / "out.partial").read_text(encoding="utf-8") == "one\n"


@pytest.mark.parametrize("moment", ["open", "fsync", "replace"])
def test_lines_never_lie_beside_notes_of_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A decode that begins anew over the lines of another one, killed as it begins, leaves nothing to be gone on with."""
    path = tmp_path / "out"
    begun(path, b"of another\n", {**ABOUT, "bundle": "y"})

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


def test_what_is_read_is_not_replaced(tmp_path: Path) -> None:
    source, link, other = (tmp_path / name for name in ("in", "link", "other"))
    source.write_text("text\n", encoding="utf-8")
    other.write_text("text\n", encoding="utf-8")
    link.symlink_to(source)
    for output, inputs in ((source, (source,)), (link, (None, source)), (source, (other, link))):
        with pytest.raises(TfexportError, match=r"is read, and would be replaced .* Give another file with -o"):
            refuse_to_replace(output, *inputs)
    refuse_to_replace(other, source, None)
    refuse_to_replace(tmp_path / "new", source)
    refuse_to_replace(None, source)
