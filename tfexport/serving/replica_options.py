"""`ReplicaOptions`: how many replicas Ray Serve runs, and what waits for them. Each option is declared once."""

from __future__ import annotations

from dataclasses import dataclass

from tfexport.option import Options, option

_REPLICAS = "Replicas"


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(Options):
    """Replicas of the HTTP server under Ray Serve, each a process with all bundles.

    Raises:
        TfexportError: an option is out of range, or two of them exclude each other.
    """

    replicas: int = option(1, minimum=1, maximum=4096, help="Replicas, at least.", panel=_REPLICAS)
    max_replicas: int | None = option(
        None,
        minimum=1,
        maximum=4096,
        help="Replicas, at most: their number then follows that of the requests.",
        panel=_REPLICAS,
    )
    num_cpus: float | None = option(
        None,
        above=0,
        finite=True,
        help="CPUs that Ray reserves for a replica.",
        default_text="workers times threads",
        panel=_REPLICAS,
    )
    target_ongoing_requests: float = option(
        32.0,
        above=0,
        help="Requests at once of a replica that another one is started for, with max_replicas.",
        panel=_REPLICAS,
    )
    max_ongoing_requests: int = option(
        128, minimum=1, help="Requests at once of a replica, at most; others wait in Ray's proxies.", panel=_REPLICAS
    )
    max_queued_requests: int = option(
        1024, minimum=0, help="Requests that wait in a proxy, at most; more are answered 503.", panel=_REPLICAS
    )
    shutdown_timeout: float = option(
        60.0,
        minimum=0,
        help="Seconds that a replica which Ray Serve ends has to answer what it took.",
        panel=_REPLICAS,
    )

    def conflicts(self) -> list[str]:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            return [f"max_replicas is {self.max_replicas}, below replicas, which is {self.replicas}"]
        return []
