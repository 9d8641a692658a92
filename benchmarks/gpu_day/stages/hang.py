"""A stage that never ends and does not listen: a rehearsal stops it at its limit."""

from __future__ import annotations

import signal
import sys
import time

from benchmarks.gpu_day.stage import Task, main


def run(task: Task) -> bool:
    """Write a result, then wait for ever."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    task.found["written"] = "before it was stopped"
    task.save()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    sys.exit(main(run))
