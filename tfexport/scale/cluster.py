"""The Ray cluster of a run: an existing one, or one on this machine for this run alone.

Ray's own processes collect metrics and events for a dashboard. A cluster of this run alone has none, so they do not collect
any here.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
