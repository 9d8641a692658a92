"""The Ray cluster of a run: one that is there, or one on this machine for this run alone, and what it may cost.

Actors should have the CPUs for themselves. What Ray does beside them is little, but it does it all the time, and on machines
with few CPUs actors wait.
"""

from __future__ import annotations

import logging
import os
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
