"""What became of each stage, in a file of the results folder that is complete at any moment."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfexport.system.atomic_files import whole_file
from tfexport.system.json_text import json_text

FILE = "state.json"
RAN, REHEARSED, FAILED, TIMED_OUT, INTERRUPTED, NOT_RUN, RUNNING = (
    *("ran", "rehearsed", "failed", "timed out", "interrupted", "not run", "running"),
)
DONE = frozenset({RAN, REHEARSED, FAILED, TIMED_OUT})
"""What a later run does not do again unless it is asked to. `interrupted` is the end of the whole day within a stage."""


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def write_json(value: Any, path: Path) -> None:
    """Replace `path` as a whole: a reader, or the end of the process, never meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(json_text(value, indent=1).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """An object; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def commit() -> str | None:
    """The commit of this repository, with `-dirty` where files differ from it; None for a copy without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class State:
    """The state of a day in `folder`.

    A stage that was running when the file was last written has been interrupted: who reads it holds the lock of the folder.
    """

    def __init__(self, folder: Path, *, rehearsal: bool):
        self._path = folder / FILE
        found = read_json(self._path)
        self.stages: dict[str, dict[str, Any]] = {
            name: dict(entry) for name, entry in found.get("stages", {}).items() if isinstance(entry, Mapping)
        }
        for entry in self.stages.values():
            if entry.get("status") == RUNNING:
                entry |= {"status": INTERRUPTED, "reason": "the day ended while it ran"}
        self.rehearsal = rehearsal

    def status(self, name: str) -> str:
        return str(self.stages.get(name, {}).get("status", NOT_RUN))

    def note(self, name: str, status: str, **facts: Any) -> None:
        """Keep what is known of a stage, on the disk before this returns."""
        self.stages[name] = {"status": status, **facts}
        self.save()

    def save(self) -> None:
        write_json({"rehearsal": self.rehearsal, "saved": now(), "stages": self.stages}, self._path)
