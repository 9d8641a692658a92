"""Running `tfexport decode` commands, and their memory. Reads /proc, so it is for Linux."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tfexport.errors import TfexportError

PATIENCE = 900.0
"""Seconds without an answer after which a command is taken for stuck."""


@dataclass(frozen=True)
class Memory:
    """Of one process or several, in MiB."""

    rss: float
    """All that is in memory, with what others share."""
    pss: float
    """The same, of shared pages only this process's part: over processes it adds up to what they take together."""
    uss: float
    """What nobody else has: what one more such process costs."""
    own: float
    """Of `pss` what is in no file. Pages of libraries and weights count by how many programs of the machine have them."""

    @classmethod
    def of(cls, process: int) -> Memory | None:
        """The memory of a process; None when it has ended."""
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            return None
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        if "Rss" not in kib:
            return None
        unique = kib["Private_Clean"] + kib["Private_Dirty"]
        return cls(kib["Rss"] / 1024, kib["Pss"] / 1024, unique / 1024, kib["Pss_Anon"] / 1024)

    @classmethod
    def most(cls, samples: Sequence[Memory]) -> Memory:
        return cls(*(max(getattr(sample, field.name) for sample in samples) for field in fields(cls)))

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 1) for name, value in asdict(self).items()}


class Command:
    """A running `tfexport decode`, to which lines are given and whose answers are counted."""

    def __init__(self, flags: Sequence[str]):
        command = [sys.executable, "-m", "tfexport", "decode", *flags]
        # Unbuffered: a line counts as done when it is written, not when a buffer is full.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )
        self.done, self._ended = 0, False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._count, daemon=True)
        self._reader.start()

    def _count(self) -> None:
        assert self.process.stdout is not None
        for _ in self.process.stdout:
            with self._changed:
                self.done += 1
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def give(self, lines: Iterable[bytes]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # who waits for the answers finds out why
            self.process.stdin.write(b"".join(lines))
            self.process.stdin.flush()

    def give_all(self, lines: Sequence[bytes]) -> None:
        """Give lines as the command reads them, without waiting for it, and end its input."""

        def write() -> None:
            assert self.process.stdin is not None
            self.give(lines)
            with suppress(BrokenPipeError):
                self.process.stdin.close()

        threading.Thread(target=write, daemon=True).start()

    def wait_for(self, lines: int) -> None:
        """Return when so many lines are answered.

        Raises:
            TfexportError: the command ended before, or nothing came for `PATIENCE`.
        """
        with self._changed:
            while self.done < lines and not self._ended:
                before = self.done
                if not self._changed.wait(PATIENCE) and self.done == before:
                    break
        if self.done < lines:
            raise TfexportError(f"a command answered {self.done} of {lines} lines: {self.said()}")

    def said(self) -> str:
        """The last line of its stderr."""
        self._errors.seek(0)
        return " ".join(self._errors.read().decode(errors="replace").splitlines()[-1:])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self._errors.close()


@contextmanager
def commands(count: int, flags: Sequence[str]) -> Iterator[list[Command]]:
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            started.append(Command(flags))
            stack.callback(started[-1].close)
        yield started


def family(process: int) -> list[int]:
    """A process and its children."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
    except OSError:
        children = ""
    return [process, *map(int, children.split())]
