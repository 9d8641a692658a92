"""The package as it is imported and used on Windows, which lacks some modules and functions of Linux and macOS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from tfexport.commands.output import writing
from tfexport.errors import TfexportError
from tfexport.system import file_locks
from tfexport.system.atomic_files import partial_folder

AS_ON_WINDOWS = """
import builtins, ctypes, importlib, json, os, pkgutil, signal, sys, types

GONE = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "readline", "curses"}
FUNCTIONS = {
    "os": ["fork", "forkpty", "sched_getaffinity", "sched_setaffinity", "sysconf", "getuid", "geteuid", "getgid", "getegid",
           "uname", "setsid", "killpg", "getpgid", "nice", "mkfifo", "wait3", "wait4", "register_at_fork", "getloadavg",
           "pread", "pwrite", "posix_spawn", "posix_fallocate", "fdatasync", "chown", "fchmod", "O_DIRECTORY", "O_CLOEXEC",
           "O_NOFOLLOW", "O_NONBLOCK", "WNOHANG"],
    "signal": ["SIGHUP", "SIGKILL", "SIGPIPE", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGQUIT", "SIGCONT", "SIGSTOP",
               "alarm", "setitimer", "pthread_sigmask", "sigwait", "pause"],
    "sys": [],
    "ctypes": [],
}
locked = []

def library(name, *arguments, **options):
    if name is None:
        raise TypeError("argument of type 'NoneType' is not iterable")
    return ctypes.CDLL(name, *arguments, **options)

def locking(descriptor, mode, count):
    locked.append(os.lseek(descriptor, 0, os.SEEK_CUR))

copies = {"msvcrt": types.ModuleType("msvcrt")}
copies["msvcrt"].LK_NBLCK, copies["msvcrt"].locking = 2, locking
for name, functions in FUNCTIONS.items():
    copies[name] = types.ModuleType(name)
    copies[name].__dict__.update({key: value for key, value in vars(sys.modules[name]).items() if key not in functions})
copies["sys"].platform, copies["ctypes"].CDLL = "win32", library
real = builtins.__import__

def without(name, caller=None, locals=None, fromlist=(), level=0):
    if caller is not None and str(caller.get("__name__")).startswith("tfexport") and not level:
        if name in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in copies:
            return copies[name]
    return real(name, caller, locals, fromlist, level)

builtins.__import__ = without
"""
"""Run before the package is imported: for its modules alone, as others would not work here without what is hidden."""

IMPORT_ALL = """
import tfexport
count = 0
for module in pkgutil.walk_packages(tfexport.__path__, "tfexport."):
    # Ray Serve comes with an extra of its own, which the tests do without.
    if module.name not in ("tfexport.__main__", "tfexport.serving.ray") and "_library" not in module.name:
        importlib.import_module(module.name)
        count += 1
print(count)
"""

DECODE = """
import tfexport.__main__
try:
    tfexport.__main__.main()
finally:
    with open(os.environ["LOCKED"], "w") as file:
        json.dump(locked, file)
"""


def run(code: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AS_ON_WINDOWS + code, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.thorough
def test_every_module_is_imported() -> None:
    done = run(IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [[], ["--beam", "2", "--workers", "2"]])
def test_a_file_is_decoded(tiny_bundle: Path, tmp_path: Path, flags: list[str]) -> None:
    lines, output = tmp_path / "in", tmp_path / "out"
    lines.write_text("".join(f"{4 + line % 20} 9 5\n" for line in range(200)), encoding="utf-8")
    command = ["decode", tiny_bundle, lines, "--input-format", "ids", "--threads", "1", *flags]
    done = run(DECODE, *command, "-o", output, LOCKED=str(tmp_path / "locked"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "locked").read_text()) == [file_locks.LOCKED_BYTE]
    wanted = subprocess.run(
        [sys.executable, "-m", "tfexport", *map(str, command)], capture_output=True, timeout=300, check=True
    ).stdout
    assert output.read_bytes() == wanted
    assert wanted.count(b"\n") == 200


class Locks:
    """`msvcrt` in a process where another one has locked the byte."""

    LK_NBLCK = 2

    def __init__(self, taken: bool):
        self.taken = taken

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        if self.taken:
            raise PermissionError(13, "Permission denied")


def test_a_file_that_another_process_has_locked_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks, "fcntl", None)
    monkeypatch.setattr(file_locks, "msvcrt", Locks(taken=True))
    with pytest.raises(TfexportError, match="another process writes"), writing(tmp_path / "out", {}):
        pass


def test_an_output_is_renamed_after_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks, "fcntl", None)
    monkeypatch.setattr(file_locks, "msvcrt", Locks(taken=False))
    monkeypatch.setattr("tfexport.commands.output.OPEN_FILES_CAN_MOVE", False)
    real, opened = Path.replace, list[BinaryIO]()

    def replaced(path: Path, target: Path) -> Path:
        if path.name == "out.partial":
            assert opened[0].closed
        return real(path, target)

    def locked(file: BinaryIO) -> None:
        file_locks.lock_file(file)
        opened.append(file)

    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr("tfexport.commands.output.lock_file", locked)
    (tmp_path / "out.partial").touch()  # left by another run
    with writing(tmp_path / "out", {}) as out:
        print("one", file=out.file)
    assert (tmp_path / "out").read_bytes() == b"one\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folders_are_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks, "fcntl", None)
    with pytest.raises(OSError, match="not supported") as caught:
        file_locks.lock_folder(tmp_path)
    assert not isinstance(caught.value, BlockingIOError | FileNotFoundError)
    with partial_folder(tmp_path / "b") as folder:
        assert folder.is_dir()
    assert not folder.exists()
