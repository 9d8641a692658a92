"""What no reader may do, whatever bytes it is given: run something, or open a file that is none of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from makers.paths import ROOT

RUNNING = {
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn", "subprocess.Popen"),
    *("socket.connect", "pickle.find_class"),
}
"""Audit events of Python (PEP 578) that a file must not lead to."""

_PYTHON = (
    *(sys.prefix, sys.base_prefix, ROOT, "/proc", "/sys", "/usr", "/dev/null", "/dev/urandom"),
    *(place for place in sys.path if place.endswith("site-packages")),  # also of another environment
)
"""Where libraries open files of their own while they are used."""


class Watch:
    """Audits this process; `of` tells what was done in a block that none may do. Calls that would run are stopped."""

    def __init__(self, own: Sequence[Path]):
        self._own = tuple({os.path.realpath(place) for place in (*own, *_PYTHON)})
        self._found: list[str] | None = None
        sys.addaudithook(self._heard)  # for good: Python does not take one back

    @contextmanager
    def of(self) -> Iterator[list[str]]:
        found: list[str] = []
        self._found = found
        try:
            yield found
        finally:
            self._found = None

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        found = self._found
        if found is None:
            return
        if event in RUNNING:
            found.append(f"{event} {arguments!r:.200}")
            raise PermissionError(found[-1])
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not any(path == place or path.startswith(f"{place}/") for place in self._own):
                found.append(f"open {path}")
