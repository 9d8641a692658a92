"""The Ray cluster of a run: an existing one, or one on this machine for this run alone.

Ray's own processes take about a twentieth of two CPUs. The actors lose this time on a machine with few CPUs, so most of this
work is switched off here.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tfexport.errors import TfexportError

WITHOUT_METRICS = {
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",  # never
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
}
"""Environment variables for a cluster of this run alone. It has no dashboard that shows metrics and events, but without
these settings its processes collect them. Variables that the user has set win."""
MOST_REST = 1.5
"""The longest rest of Ray's scheduling loop between two rounds, in seconds. A round itself waits a tenth for results. At the
end of an interrupted run, `StreamingExecutor.shutdown` of Ray waits two seconds for a round."""
LAST_TASKS = 8
"""The number of last tasks. The shortest of them determines the rest."""

SECONDS_TO_ANSWER = 5.0
"""The seconds after which the head of a cluster counts as missing. Ray itself tries for many minutes."""
_HOST_AND_PORT = re.compile(r"(?P<host>\[[^\]]+\]|[^/:\[\]]+):(?P<port>\d{1,5})")


def connect(address: str | None) -> None:
    """Connect to a cluster, or start one on this machine.

    Raises:
        TfexportError: the cluster cannot be used.
    """
    import ray
    from ray.exceptions import RayError

    if address is not None and address.startswith("ray://"):
        raise TfexportError(
            f"{address} is an address of Ray Client, over which Ray Data does not run. Start the command on a machine of "
            "the cluster, with --address auto."
        )
    own: dict[str, Any] = {}
    if address is None:
        # A cluster has a dashboard or not. On this machine it would take memory, and a hundredth of a core.
        own = {"include_dashboard": False}
        for name, value in WITHOUT_METRICS.items():
            os.environ.setdefault(name, value)
    try:
        if match := _HOST_AND_PORT.fullmatch(address or ""):
            _require_answer(match["host"].strip("[]"), int(match["port"]))
        # "local" is a new one, whatever RAY_ADDRESS says.
        with _own_signals():
            ray.init(address=address or "local", **own, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, OSError, OverflowError, RuntimeError, ValueError) as error:
        if address is None:
            raise
        about = " ".join(str(error).split())[:300].rstrip(".")
        raise TfexportError(
            f"cannot use the Ray cluster {address}: {about}. Check --address, and the token of the cluster (RAY_AUTH_TOKEN)."
        ) from error
    if address is None:
        _end_monitors()


def _require_answer(host: str, port: int) -> None:
    """Raises: OSError: no gRPC server answers at a port, as the head of a cluster does."""
    with socket.create_connection((host, port), SECONDS_TO_ANSWER) as connection:
        if os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true"):
            return
        # The start of HTTP/2 (RFC 9113, section 3.4) and empty settings. The server begins with its own settings, type 4.
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        with connection.makefile("rb") as answer:
            if answer.read(9)[3:4] != b"\x04":
                raise OSError("another program answers at this port")


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handler of this process for SIGTERM. Ray sets its own handler, with another exit status."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as end:  # of the handler of Ray, during its start
        raise SystemExit(128 + signal.SIGTERM if end.code == signal.SIGTERM else end.code) from end
    finally:
        signal.signal(signal.SIGTERM, before)


def disconnect() -> None:
    """Leave the cluster, and end it if `connect` has started it. Nothing happens without a cluster."""
    import ray

    ray.shutdown()


def _end_monitors() -> None:
    """End two processes of the cluster that this process started: the log monitor, which reads the logs of workers for the
    driver, and the monitor that adds machines. They take a hundredth of a core, and Ray waits a second for one of them at
    the end.

    `ray.init` has no option for this. If a version of Ray lacks the methods, the processes stay.
    """
    import ray

    with suppress(AttributeError, RuntimeError, OSError):
        node = ray._private.worker._global_node
        node.kill_log_monitor(check_alive=False)
        node.kill_monitor(check_alive=False)


def quiet_ray_data() -> None:
    """Let Ray Data print only warnings and errors. Its log file keeps all messages."""
    import ray.data  # noqa: F401 (it makes the handlers)
    from ray.util.debug import log_once

    # Its warning that progress bars are off counts as printed. The command has its own bar.
    log_once("ray_data_progress_manager_disabled")
    # A small corpus has fewer shards than the machine has room for actors.
    warnings.filterwarnings("ignore", "The minimum number of concurrent actors")
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.WARNING)


class Rest:
    """A callback of `DataContext` that lets the scheduling loop of Ray Data rest between its rounds.

    The loop makes ten rounds a second, even if nothing has changed.
    """

    seconds = 0.0
    """The rest, for the one run of this process."""

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
    """Determines the rest of Ray's loop from the seconds that actors needed for their last tasks.

    These seconds contain no waiting for the loop, so a rest that was too long does not lengthen the next one.

    Args:
        actors: the largest number of actors that compute shards.
    """

    def __init__(self, actors: int) -> None:
        # An actor has one task in reserve, so a round has to come in half of the time of a task. A task that reads a file
        # goes only two shards ahead of the loop, so a round has to come for each shard.
        self._rounds_in_a_task = max(actors, 2)
        self._seconds: deque[float] = deque(maxlen=LAST_TASKS)

    def rest(self, seconds: float) -> float:
        """The next rest, in seconds.

        Args:
            seconds: the time that an actor needed for the task that has just ended.
        """
        self._seconds.append(seconds)
        return min(MOST_REST, min(self._seconds) / self._rounds_in_a_task)
