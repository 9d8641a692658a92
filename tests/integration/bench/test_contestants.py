"""Workers of the benchmark in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfexport.bench import contestants
from tfexport.bench.contestants import Contestant, Failed, Process, ProcessLayout


def names(*given: str) -> list[Contestant]:
    return [Contestant(name, Path("bundle")) for name in given]


def worker_of(folder: Path, code: str) -> Process:
    """A process that runs `code` in place of the worker's module."""
    (folder / "script.py").write_text(code, encoding="utf-8")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder / "script.py"}"\n', encoding="utf-8")
    python.chmod(0o755)
    return Process({}, python)


NOISY = """
import os
import sys

from tfexport.bench import worker


class Noisy:
    def decode(self, sources, options, batch_size):
        print("printed")
        os.write(1, b"written by C")
        sys.stderr.write("said")
        assert sys.stdin.read() == ""
        return [(7,) * options.max_length for _ in sources]


worker.load = lambda *arguments: print("loading") or Noisy()
worker.main()
"""


REQUEST = {"batch_size": 1, "beam": 1, "min_length": 0, "max_length": 3, "sources": [[1], [2]]}


def test_prints_do_not_break_the_conversation(tmp_path: Path) -> None:
    setup = ProcessLayout(names("optimum")[0], "float32", 1, 1)
    with worker_of(tmp_path, NOISY) as process:
        assert process.ask(setup.load_request([5]))["versions"]["numpy"]
        answer = process.ask({"command": "decode", "outputs": True, **REQUEST})
        assert answer["lengths"] == [3, 3]
        assert answer["outputs"] == [[7, 7, 7]] * 2
        assert answer["memory"] is None or answer["memory"] > 2**20
        with pytest.raises(Failed, match="only runtimes of tfexport"):
            process.ask({"command": "profile", **REQUEST})
        assert process.ask({"command": "decode", **REQUEST})["lengths"] == [3, 3]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_a_process_that_has_nothing_to_answer_is_stopped(tmp_path: Path) -> None:
    with worker_of(tmp_path, NOISY) as process:
        process.ask(ProcessLayout(names("optimum")[0], "float32", 1, 1).load_request([5]))
        stat = Path(f"/proc/{process.pid}/stat")
        deadline = time.monotonic() + 10
        while (state := stat.read_text().rpartition(") ")[2][0]) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state == "T"
        assert process.ask({"command": "decode", **REQUEST})["lengths"] == [3, 3]
    assert not stat.exists()


PARENT = """
import sys
import time
from pathlib import Path

from tfexport.bench.contestants import Contestant, Process, ProcessLayout

process = Process({}, Path(sys.argv[1]))
process.ask(ProcessLayout(Contestant("optimum", Path("x")), "float32", 1, 1).load_request([5]))
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_a_stopped_process_does_not_outlive_its_parent(tmp_path: Path) -> None:
    worker_of(tmp_path, NOISY).close()  # writes the files
    command = [sys.executable, "-c", PARENT, str(tmp_path / "python")]
    # What it leaves behind when it is killed goes with the test's folder.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = Path(f"/proc/{int(parent.stdout.readline())}/stat")
        assert child.exists()
        parent.kill()
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().rpartition(") ")[2][0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.exists() or child.read_text().rpartition(") ")[2][0] == "Z"


def test_a_process_that_dies_tells_its_last_line(tmp_path: Path) -> None:
    code = "import sys\nsys.stdin.readline()\nprint('oh\\nno memory', file=sys.stderr)\nsys.exit(9)"
    with worker_of(tmp_path, code) as process, pytest.raises(Failed, match="ended with exit code 9: no memory"):
        process.ask({"command": "load"})


def test_a_process_that_does_not_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "PATIENCE", 0.2)
    with (
        worker_of(tmp_path, "import time\ntime.sleep(600)") as process,
        pytest.raises(Failed, match="no answer for 0 seconds"),
    ):
        process.ask({"command": "load"})


def test_an_interpreter_that_is_not_there_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="--python"):
        Process({}, tmp_path / "none")
