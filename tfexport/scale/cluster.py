"""The Ray cluster of a run: one that is there, or one on this machine for this run alone, and what it may cost.

Actors should have the CPUs for themselves. What Ray does beside them is little, but it does it all the time, and on machines
with few CPUs actors wait.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from contextlib import suppress
from typing import Any

from tfexport.errors import TfexportError

UNWATCHED = {
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",  # never
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
}
"""The environment of a cluster for this run alone: it has no dashboard, which would show metrics and events. Its processes
would collect them nonetheless. The environment of the user goes before these."""
MOST_REST = 0.9
"""Seconds between two rounds of Ray's scheduling loop, beside the tenth that it waits for results."""
LAST_SHARDS = 8
"""Shards from which the time between two is known."""


def connect(address: str | None) -> None:
    """Connect to a cluster, or start one on this machine.

    Raises:
        TfexportError: the cluster cannot be used.
    """
    import ray
    from ray.exceptions import RayError

    own: dict[str, Any] = {}
    if address is None:
        # A cluster has a dashboard or not. On this machine it would take memory, and a hundredth of a core.
        own = {"include_dashboard": False}
        for name, value in UNWATCHED.items():
            os.environ.setdefault(name, value)
    try:
        ray.init(address=address, **own, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, ConnectionError, ValueError) as error:
        if address is None:
            raise
        about = " ".join(str(error).split())[:300].rstrip(".")
        raise TfexportError(
            f"cannot use the Ray cluster {address}: {about}. Check --address, and the token of the cluster (RAY_AUTH_TOKEN)."
        ) from error
    if address is None:
        _end_monitors()


def _end_monitors() -> None:
    """End two processes of a cluster that this process has started: one reads logs of workers, for a driver that shows them,
    and one starts machines. Together they take a hundredth of a core, and at the end Ray waits a second for one of them.

    `ray.init` has no option for it. Where Ray has no such methods, or has not started the processes, nothing happens.
    """
    import ray

    with suppress(AttributeError, RuntimeError, OSError):
        node = ray._private.worker._global_node
        node.kill_log_monitor(check_alive=False)
        node.kill_monitor(check_alive=False)


class Rest:
    """Lets the scheduling loop of Ray Data rest between its rounds: a callback of `DataContext`.

    The loop makes ten rounds a second, whether anything has changed or not. An actor has a shard in reserve, so it does not
    wait for the next round as long as a round is shorter than a shard.
    """

    seconds = 0.0
    """Of this process, which has one run."""

    def before_execution_starts(self, executor: object) -> None:
        """Nothing to do."""

    def on_execution_step(self, executor: object) -> None:
        """After a round."""
        time.sleep(self.seconds)

    def after_execution_succeeds(self, executor: object) -> None:
        """Nothing to do."""

    def after_execution_fails(self, executor: object, error: Exception) -> None:
        """Nothing to do."""


class Rhythm:
    """The time between two shards, of all actors together: from it follows how long Ray's loop may rest."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=LAST_SHARDS + 1)

    def rest(self, now: float) -> float:
        """Seconds for which the loop may rest after a shard was written at the time `now`: half of those between two."""
        self._times.append(now)
        if len(self._times) <= LAST_SHARDS:
            return 0.0
        return min(MOST_REST, (now - self._times[0]) / LAST_SHARDS / 2)
