"""Stdout, stderr and signals as a shell may give them: closed, full, unread, early; and paths of any bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from makers.processes import ENVIRONMENT, TFEXPORT
from tests.support.commands import TEXT, Outcome, Run, TinyCheckpoint, last_error, wanted_text

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no such shell")


def shell(command: str, **environment: str) -> Outcome:
    done = subprocess.run(
        ["bash", "-c", command],
        input=TEXT,
        capture_output=True,
        env={**ENVIRONMENT, **environment, "TFEXPORT": str(TFEXPORT)},
        timeout=120,
    )
    return Outcome(done.returncode, done.stdout, done.stderr.decode())


@pytest.mark.thorough
def test_with_stderr_closed_notes_go_nowhere(tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    done = shell(f"$TFEXPORT decode {tiny_bundle} --workers 1 2>&-")
    assert (done.code, done.stdout, done.stderr) == (0, wanted_text(tiny_checkpoint), "")


@pytest.mark.thorough
@pytest.mark.parametrize("stderr", ["2>/dev/full", "2> >(true)"])
def test_notes_that_cannot_be_written_end_no_command(
    tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint, stderr: str
) -> None:
    # The reader is gone before the first note: libraries are loaded until then.
    # It says that the bundle has no certificate, with whatever workers.
    done = shell(f"$TFEXPORT decode {tiny_bundle} --workers 1 --threads 1 {stderr}")
    assert (done.code, done.stdout) == (0, wanted_text(tiny_checkpoint))
    assert shell(f"$TFEXPORT decode {tiny_bundle}/none {stderr}").code == 2


@pytest.mark.parametrize(("command", "code"), [("--help | true", 141), ("--help >/dev/full", 2), ("--help >&-", 2)])
def test_help_that_cannot_be_printed(command: str, code: int) -> None:
    done = shell(f"$TFEXPORT {command}; exit ${{PIPESTATUS[0]}}")
    assert done.code == code
    assert done.stderr.count("\n") == (0 if code == 141 else 1)
    assert done.stderr.startswith("" if code == 141 else "error: ")


IGNORING = """
import signal
numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
for number in numbers:
    signal.signal(number, signal.SIG_IGN)
from tfexport.__main__ import main
try:
    main()
except SystemExit:
    assert all(signal.getsignal(number) is signal.SIG_IGN for number in numbers)
"""


def test_signals_that_are_ignored_stay_so() -> None:
    """As `nohup` asks for, and a shell for what it runs in the background."""
    subprocess.run([sys.executable, "-c", IGNORING, "--help"], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)


ENDING = """
import os, signal, threading, time
def end():
    threading.main_thread().join()  # Python waits for this thread now
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(9)
threading.Thread(target=end).start()
from tfexport.__main__ import main
main()
"""


def test_a_signal_after_the_end_of_a_command_prints_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING, "--help"], env=ENVIRONMENT, capture_output=True)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, b"")


def test_no_file_takes_the_place_of_a_closed_stream() -> None:
    """What a library prints would be written into it."""
    code = "import os; from tfexport.commands import standard_streams as s; s.prepare(); exit(os.dup(os.open('/', 0)))"
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        done = subprocess.run(["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code])
        assert done.returncode > 3


def test_with_stdout_closed_nothing_is_begun(tiny_bundle: Path, tmp_path: Path) -> None:
    done = shell(f"$TFEXPORT decode {tiny_bundle} >&-")
    assert last_error(done) == "error: stdout is closed. Redirect it to a file, or to /dev/null."


@pytest.mark.thorough
def test_what_is_written_to_a_file_needs_no_stdout(
    tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    done = shell(f"$TFEXPORT decode {tiny_bundle} --workers 1 -o {tmp_path / 'out'} >&- 2>&-")
    assert done.code == 0
    assert (tmp_path / "out").read_text(encoding="utf-8") == wanted_text(tiny_checkpoint)


@pytest.mark.thorough
def test_the_exit_code_of_a_comparison_is_its_verdict_though_nobody_reads_it(tiny_bundle: Path) -> None:
    done = shell(f"$TFEXPORT parity {tiny_bundle} --bisect | true; exit ${{PIPESTATUS[0]}}")
    assert done.code == 0
    assert "error" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("library", ["typer", "numpy", "onnxruntime"])
def test_ctrl_c_while_libraries_are_imported_prints_no_traceback(
    tiny_bundle: Path, tmp_path: Path, library: str
) -> None:
    (tmp_path / f"{library}.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, "-m", "tfexport", "decode", tiny_bundle],
        input=TEXT,
        capture_output=True,
        env={**ENVIRONMENT, "PYTHONPATH": path},
        timeout=120,
    )
    assert done.returncode in (-signal.SIGINT, 130)
    assert b"Traceback" not in done.stderr


def test_ctrl_c_while_the_parsers_are_made_prints_no_traceback() -> None:
    """Typer makes them of all commands, which takes a while, before it looks out for Ctrl-C."""
    code = """
        import os, signal, typer.main
        make = typer.main.get_command
        def interrupted(app):
            os.kill(os.getpid(), signal.SIGINT)
            return make(app)
        typer.main.get_command = interrupted
        from tfexport.__main__ import main
        main()
    """
    command = [sys.executable, "-c", textwrap.dedent(code), "version"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode there")
def test_paths_that_are_not_utf8_are_used_or_refused(
    run: Run, tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    shutil.copy(tiny_checkpoint.path, folder)
    (folder / "in").write_bytes(TEXT)
    found = run("inspect", folder / "tiny.pt")
    assert found.code == 0
    assert os.fsencode(folder) in found.raw
    decoded = run("decode", tiny_bundle, folder / "in", "--workers", "1", "-o", folder / "out")
    assert decoded.code == 0
    assert (folder / "out").read_text(encoding="utf-8") == wanted_text(tiny_checkpoint)
    exported = run("export", folder / "tiny.pt", *tiny_checkpoint.flags)
    assert "is not UTF-8, which ONNX Runtime requires. Rename it" in last_error(exported)
    shutil.copytree(tiny_bundle, folder / "bundle")
    for command in ("decode", "parity"):
        assert "is not UTF-8, which ONNX Runtime requires. Rename it" in last_error(run(command, folder / "bundle"))


def test_memory_that_runs_out_is_not_a_missing_library(
    run: Run, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ImportError("libonnxruntime.so: failed to map segment from shared object", name="onnxruntime")

    monkeypatch.setattr("tfexport.runtimes._load", fail)
    message = last_error(run("decode", tiny_bundle))
    assert message.startswith("error: not enough memory: onnxruntime cannot be loaded. ")


def test_memory_that_runs_out_without_a_word(run: Run, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tfexport.runtimes._load", fail)
    assert last_error(run("decode", tiny_bundle)).startswith("error: not enough memory. Use a smaller --beam")
