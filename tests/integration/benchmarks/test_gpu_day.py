"""A day on a GPU as processes: what hangs is stopped with all that it started, and a day that was killed goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cuda_dry import build
from benchmarks.gpu_day import __main__ as command
from benchmarks.gpu_day import plan
from benchmarks.gpu_day.processes import launch
from benchmarks.gpu_day.state import State, read_json
from benchmarks.gpu_day.watch import watch
from makers.paths import ROOT

DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
LEAVES_A_CHILD = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def start(code: str, seconds: float, log: Path) -> Any:
    return launch([sys.executable, "-c", code], seconds, log, folder=ROOT, environment=os.environ, grace=0.3)


@pytest.mark.parametrize(("code", "seconds", "ends"), [(DEAF, 1.5, None), (LEAVES_A_CHILD, 30.0, 0)])
def test_a_stage_ends_with_all_that_it_started(tmp_path: Path, code: str, seconds: float, ends: int | None) -> None:
    outcome = start(code, seconds, tmp_path / "log")
    assert outcome.code == ends
    pid = int(outcome.last_line)
    until(lambda: not runs(pid))


def test_a_crash_is_told_by_its_signal_and_its_last_words(tmp_path: Path) -> None:
    outcome = start("import os; print('here', flush=True); os.abort()", 30.0, tmp_path / "logs" / "log")
    assert outcome.code == -signal.SIGABRT
    assert "here" in (tmp_path / "logs" / "log").read_text()


@pytest.fixture
def no_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: Any) -> None:
        raise build.Missing("there is no compiler.")

    monkeypatch.setattr(build, "prepare", missing)
    monkeypatch.setattr(plan, "HANG", replace(plan.HANG, limit=5))


@pytest.mark.thorough
@pytest.mark.usefixtures("no_stand_ins")
def test_a_stage_that_hangs_is_stopped_and_what_it_wrote_is_in_the_summary(tmp_path: Path) -> None:
    assert command.main(["--rehearse", "--only", "hang", "--results", str(tmp_path), "--pack", str(tmp_path)]) == 0
    entries = {entry["name"]: entry for entry in read_json(tmp_path / "summary.json")["stages"]}
    assert entries["hang"]["status"] == "timed out"
    assert entries["hang"]["found"] == {"written": "before it was stopped"}
    assert {entry["status"] for name, entry in entries.items() if name != "hang"} == {"not run"}
    assert "A rehearsal without a GPU" in (tmp_path / "summary.md").read_text()


@pytest.mark.thorough
def test_a_day_that_is_killed_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    """The first is killed, the second asked to end; while it runs, another one is refused."""
    words = [sys.executable, "-m", "benchmarks.gpu_day", "--rehearse", "--only", "hang"]
    words += ["--results", str(tmp_path), "--pack", str(tmp_path)]
    given = {**os.environ, "PYTHONPATH": str(ROOT), "CXX": "no-such-compiler"}
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM)):
        (tmp_path / "hang.json").unlink(missing_ok=True)
        day = subprocess.Popen(words, cwd=ROOT, env=given, stdout=subprocess.PIPE, text=True)
        until(lambda: "written" in read_json(tmp_path / "hang.json"))
        assert json.loads((tmp_path / "state.json").read_text())["stages"]["hang"]["status"] == "running"
        second = subprocess.run(words, cwd=ROOT, env=given, capture_output=True, text=True)
        assert second.returncode == 2
        assert "a day is running already" in second.stdout
        day.send_signal(number)
        day.communicate(timeout=30)
        assert day.returncode == code
        until(lambda: not any(str(tmp_path / "hang.json") in line for line in processes()))
        assert State(tmp_path, rehearsal=True).status("hang") == "interrupted"


def processes() -> list[str]:
    """The command lines of what runs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text(errors="replace").replace("\0", " "))
        except OSError:
            continue
    return found


def test_the_stages_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(plan.STAGES)
    for wrong in (["--only", "speeed"], ["--from", "smoke", "--only", "smoke"]):
        with pytest.raises(SystemExit):
            command.main(wrong)
    assert "there is no stage 'speeed'" in capsys.readouterr().err


def test_a_rehearsal_gives_its_stages_the_stand_ins_and_no_library_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "prepare", lambda **_: None)
    unpacked = {"paths": ["/site/onnx"], "libraries": ["/real"], "used": {"onnxruntime-gpu": "1"}}
    given = command.environment(unpacked, rehearsal=True)
    assert given["LD_LIBRARY_PATH"].split(":")[0] == str(build.LIBRARIES)
    assert "/real" not in given["LD_LIBRARY_PATH"]
    assert given["PYTHONPATH"].split(":")[:2] == ["/site/onnx", str(ROOT)]
    given = command.environment({}, rehearsal=True)
    assert given["PYTHONPATH"].split(":")[:2] == [str(build.SITE), str(ROOT)]
    given = command.environment(unpacked, rehearsal=False)
    assert given["LD_LIBRARY_PATH"].split(":")[0] == "/real"


@pytest.mark.usefixtures("no_stand_ins")
def test_a_pack_for_another_python_stops_a_day_and_no_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began: list[object] = []
    monkeypatch.setattr(command.runner, "run", lambda *_, **__: not began.append(None))
    (tmp_path / "pack.json").write_text(json.dumps({"python": "3.4", "parts": []}))
    words = ["--pack", str(tmp_path), "--results", str(tmp_path)]
    assert command.main(words) == 2
    assert not began
    assert command.main(["--rehearse", *words]) == 0
    assert len(began) == 1
    assert "note: the packages of this machine are rehearsed, and no pack: the pack in" in capsys.readouterr().out


def test_what_nobody_can_watch_is_done_and_said_to_be_unseen() -> None:
    done: list[int] = []
    seen = watch(lambda: done.append(1))
    assert done == [1]
    assert seen.spans or seen.by.startswith("nothing")
