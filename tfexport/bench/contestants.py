"""The contestants of `tfexport bench`, their configurations, and the processes that run them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, Self

from tfexport.bench.machine import ONE_THREAD
from tfexport.errors import TfexportError

OWN = "ort-cpu"
"""The contestant that the others are compared with."""
PROFILED = (OWN, "torch")
"""Runtimes of tfexport, whose time is measured part by part."""
FOLDERS = ("ctranslate2", "hugging-face", "optimum")
"""Contestants with a folder in their own format, as in --beside ctranslate2=FOLDER."""
PATIENCE = 1800.0
"""Seconds after which a process without an answer is ended."""


class Failed(TfexportError):
    """A contestant that cannot run, or stopped. The message has the reason."""


@dataclass(frozen=True)
class Contestant:
    """One contestant of the table."""

    name: str
    path: Path
    """A bundle, or a folder in the contestant's own format."""
    python: Path = Path(sys.executable)
    """The interpreter that runs it."""


def contestants_of(bundle: Path, beside: Sequence[str], pythons: Sequence[str]) -> list[Contestant]:
    """tfexport's runtime and the contestants given as NAME or NAME=FOLDER, with interpreters given as NAME=PATH.

    Raises:
        TfexportError: a contestant is unknown, or its folder is missing.
    """
    interpreters = dict(_pair(argument, "--python") for argument in pythons)
    folders = {OWN: bundle}
    for argument in beside:
        name, _, folder = argument.partition("=")
        if name in FOLDERS:
            name, folder = _pair(argument, "--beside")
            folders[name] = Path(folder)
            if not folders[name].is_dir():
                raise TfexportError(f"{folder} is not a folder. Write one with benchmarks/peers/converters.py.")
        elif name in PROFILED and not folder:
            folders[name] = bundle
        else:
            names = ", ".join([*PROFILED[1:], *(f"{name}=FOLDER" for name in FOLDERS)])
            raise TfexportError(f"there is no contestant called {argument!r}. Give one of {names}.")
    unknown = sorted(set(interpreters) - set(folders))
    if unknown:
        raise TfexportError(f"--python is given for {unknown[0]}, which does not take part. Add it with --beside.")
    return [Contestant(name, path, Path(interpreters.get(name, sys.executable))) for name, path in folders.items()]


def _pair(argument: str, flag: str) -> tuple[str, str]:
    name, _, value = argument.partition("=")
    if not (name and value):
        raise TfexportError(f"{flag} is {argument!r}. Give a name and a path, as in ctranslate2=FOLDER.")
    return name, value


@dataclass(frozen=True)
class ProcessLayout:
    """A contestant as one process: a number of workers with a number of threads each, in a precision of the contract."""

    contestant: Contestant
    precision: str
    workers: int
    threads: int
    mkl: bool | None = None
    """Whether CTranslate2 multiplies with MKL; None for other contestants."""

    @property
    def about(self) -> str:
        """A short name such as `2 x 1 MKL`: workers x threads of each."""
        library = {None: "", True: " MKL", False: " oneDNN"}[self.mkl]
        return f"{self.workers} x {self.threads}{library}"

    def environment(self) -> dict[str, str]:
        """The environment variables for this setup."""
        # The libraries start these threads for each worker. ONNX Runtime and CTranslate2 also get their number directly.
        variables = {name: str(self.threads) for name in ONE_THREAD}
        return variables if self.mkl is None else {**variables, "CT2_USE_MKL": str(int(self.mkl))}

    def load_request(self, source: list[int]) -> dict[str, Any]:
        """Args: `source` is the first sentence to be decoded."""
        return {
            "command": "load",
            "contestant": self.contestant.name,
            "path": str(self.contestant.path),
            "precision": self.precision,
            "workers": self.workers,
            "threads": self.threads,
            "sources": [source],
        }


def setups(contestant: Contestant, precision: str, threads: int) -> list[ProcessLayout]:
    """The configurations of a contestant to try: every way to divide `threads` among workers, if it has workers."""
    splits = [(threads // each, each) for each in range(1, threads + 1) if threads % each == 0]
    if contestant.name == OWN:
        return [ProcessLayout(contestant, precision, workers, each) for workers, each in splits]
    if contestant.name == "ctranslate2":
        return [
            ProcessLayout(contestant, precision, workers, each, mkl)
            for mkl in (False, True)
            for workers, each in splits
        ]
    return [ProcessLayout(contestant, precision, 1, threads)]


class Handle(Protocol):
    """Something that answers requests (see `worker.py`)."""

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Raises Failed with the reason."""
        ...

    def close(self) -> None: ...


class Process:
    """A process `python -m tfexport.bench_worker`, which is stopped while it has no request.

    Threads of some libraries keep polling for work. In a stopped process they take no time from the running contestant.
    """

    def __init__(self, environment: Mapping[str, str], python: Path = Path(sys.executable)):
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        # A folder with only this package: another interpreter must not find the packages next to it.
        self._folder = tempfile.TemporaryDirectory()
        (Path(self._folder.name) / "tfexport").symlink_to(Path(__file__).parents[1])
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
        try:
            self._process = subprocess.Popen(
                [str(python), "-m", "tfexport.bench.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                encoding="utf-8",
                env={**clean, **environment, "PYTHONPATH": self._folder.name, "PYTHONSAFEPATH": "1"},
            )
        except OSError as error:
            self._clean_up()
            raise Failed(f"{python} cannot be run: {error.strerror}. Give another one with --python.") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        timer = threading.Timer(PATIENCE, self._process.kill)
        timer.start()
        try:
            self._signal("SIGCONT")
            self._pipe(self._process.stdin).write(json.dumps(request) + "\n")
            self._pipe(self._process.stdin).flush()
            line = self._pipe(self._process.stdout).readline()
            if not line:
                raise Failed(self._end(timer))
            self._signal("SIGSTOP")
        except BrokenPipeError:
            raise Failed(self._end(timer)) from None
        finally:
            timer.cancel()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def close(self) -> None:
        """End the process at once."""
        if self._process.poll() is None:
            self._process.kill()  # also ends a stopped process
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # a request that was never read
                self._pipe(pipe).close()
        self._clean_up()

    def _end(self, timer: threading.Timer) -> str:
        """The message about a process that has ended."""
        code = self._process.wait()
        if not timer.is_alive():
            return f"it gave no answer for {PATIENCE:.0f} seconds."
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with exit code {code}: {lines[-1].strip() if lines else 'it said nothing'}"

    def _signal(self, name: str) -> None:
        if hasattr(signal, name):  # not on Windows
            self._process.send_signal(getattr(signal, name))

    def _clean_up(self) -> None:
        self._said.close()
        self._folder.cleanup()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def hire(setup: ProcessLayout) -> Process:
    """Start the process of a setup, without loading the model.

    Raises:
        Failed: its interpreter cannot be run.
    """
    return Process(setup.environment(), setup.contestant.python)
