"""`ReplicaOptions`: the options of replicas under Ray Serve, each declared once."""

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

    replicas: int = option(1, minimum=1, maximum=4096, help="Smallest number of replicas.", panel=_REPLICAS)
    max_replicas: int | None = option(
        None,
        minimum=1,
        maximum=4096,
        help="Largest number of replicas; their number then follows the number of requests.",
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
        help="Concurrent requests of a replica at which another one is started, with max_replicas.",
        panel=_REPLICAS,
    )
    max_ongoing_requests: int = option(
        128,
        minimum=1,
        help="Largest number of concurrent requests of a replica; others wait in Ray's proxies.",
        panel=_REPLICAS,
    )
    max_queued_requests: int = option(
        1024, minimum=0, help="Largest number of requests that wait in a proxy; more get 503.", panel=_REPLICAS
    )
    shutdown_timeout: float = option(
        60.0,
        minimum=0,
        help="Seconds in which a replica that Ray Serve stops may answer its requests.",
        panel=_REPLICAS,
    )

    def conflicts(self) -> list[str]:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            return [f"max_replicas is {self.max_replicas}, below replicas, which is {self.replicas}"]
        return []
