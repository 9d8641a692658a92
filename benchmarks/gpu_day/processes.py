"""Processes that end when their time is up, with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.gpu_day.plan import GRACE
from benchmarks.gpu_day.runner import Outcome, last_line
from tfexport.system.processes import end_with_parent


def launch(
    command: Sequence[str],
    seconds: float,
    log: Path,
    *,
    folder: Path,
    environment: Mapping[str, str],
    grace: float = GRACE,
) -> Outcome:
    """Run `command` in `folder` for at most `seconds`; what it prints is added to `log`.

    It gets a session of its own: the end of a terminal does not reach it, and whatever it left behind is killed with it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=end_with_parent,  # or a killed day would leave a process on the GPU
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process, grace)
    return Outcome(code, time.monotonic() - start, last_line(log))


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """End the process and its group. One that even a kill does not end, in a call of a driver, is left behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
