"""One command, again and again, ended at random moments: when it is ended, and what is counted."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from makers import processes
from makers.paths import ROOT

SIGNALS = (signal.SIGKILL,) * 6 + (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT)
AIMED = 0.5
"""Share of the kills that wait for the command to write."""
SOON = 0.001
"""Seconds, on the average, that such a kill comes after it."""
CHANGES = 12
"""Of files, at most, that it waits for: several are written one after the other."""
SECONDS = 120
"""For a command that is not killed: more is a hang."""
BEFORE, WRITING, AFTER = "before it writes", "while it writes", "when all is written"
ENVIRONMENT = {**processes.ENVIRONMENT, "PYTHONPATH": str(ROOT)}


# --- one command


def tfexport(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tfexport", *map(str, arguments)]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def completed(*arguments: object) -> float:
    """Run a command to its end; returns its seconds.

    Raises:
        RuntimeError: it failed.
    """
    began = time.monotonic()
    process = tfexport(*arguments)
    try:
        _, said = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
        said += f" (more than {SECONDS} s)"
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(map(str, arguments[:1]))} failed with {process.returncode}: {said.strip()[-500:]}"
        )
    return time.monotonic() - began


@dataclass
class Figures:
    """What happened to one command."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By the signal's name and the stage."""
    aimed: int = 0
    found: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __iadd__(self, other: Figures) -> Figures:
        self.kills += other.kills
        self.aimed += other.aimed
        self.found += other.found
        self.problems += other.problems
        self.seconds += other.seconds
        return self


class KilledCommand(ABC):
    """One command that is killed again and again in a folder of its own."""

    name: str

    def __init__(self, folder: Path, life: float, chosen: random.Random):
        """`life` is how long the command takes when nothing ends it."""
        self.folder, self.life, self.chosen = folder, life, chosen
        self.figures = Figures()
        folder.mkdir()

    @abstractmethod
    def arguments(self) -> list[object]:
        """Of the next command, for which everything is prepared."""

    @abstractmethod
    def written(self) -> list[Path]:
        """The files that the command writes first of all and later on, as far as they are there now."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether the result has taken its place since `arguments` was called."""

    @abstractmethod
    def check(self, number: signal.Signals | None) -> list[str]:
        """What is wrong with what lies in the folder after a command was ended by `number`, or by itself."""

    def run(self, kills: int) -> Figures:
        """Kill so many commands."""
        began = time.monotonic()
        while sum(self.figures.kills.values()) < kills:
            self._note(*self._kill())
        self._note(None, "")
        self.figures.seconds = time.monotonic() - began
        print(f"{self.folder.name}: {kills} kills in {self.figures.seconds:.0f} s", flush=True)
        return self.figures

    def _note(self, number: signal.Signals | None, about: str) -> None:
        for problem in self.check(number):
            self._tell(f"{about}: {problem}")

    def _tell(self, problem: str) -> None:
        self.figures.problems.append(f"{self.folder.name} {problem}")
        print(self.figures.problems[-1], flush=True)

    def _kill(self) -> tuple[signal.Signals | None, str]:
        """Start a command and end it; returns the signal, None where it came too late, and what a person needs to know."""
        number = self.chosen.choice(SIGNALS)
        at, aims = self.life * self.chosen.random(), self.chosen.random() < AIMED
        changes, delay = self.chosen.randint(1, CHANGES), self.chosen.expovariate(1 / SOON)
        process, began = tfexport(*self.arguments()), time.monotonic()
        before = self._state()
        try:
            while process.poll() is None and time.monotonic() - began < at:
                time.sleep(min(0.02, max(0.0, at - (time.monotonic() - began))))
            now = self._state()
            while aims and changes and process.poll() is None:
                seen, now = now, self._state()
                changes -= seen != now
                time.sleep(0.0002)
            time.sleep(delay if aims else 0)
            stage = AFTER if self.is_done() else WRITING if self._state() != before else BEFORE
            in_time = process.poll() is None
            process.send_signal(number)
            _, said = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
        about = f"after {number.name} at {time.monotonic() - began:.2f} s, {stage}"
        code = process.returncode
        if not in_time:
            if code:
                self._tell(f"failed by itself with {code}: {said[-500:]}")
            return None, "at its end"
        self.figures.kills[number.name, stage] += 1
        self.figures.aimed += aims
        # Python itself ends so where the signal comes before tfexport has begun; 0 where it came too late to matter.
        of_python = code == 1 and stage == BEFORE and said.rstrip().endswith("\nKeyboardInterrupt")
        if code not in (-number, 128 + number, 0) and not of_python:
            self._tell(f"{about}: ended with {code}: {said[-500:]}")
        return number, about

    def _state(self) -> list[tuple[str, int, int, int]]:
        state = []
        for path in self.written():
            try:
                seen = path.stat()
            except FileNotFoundError:
                continue
            state.append((path.name, seen.st_ino, seen.st_size, seen.st_mtime_ns))
        return state
