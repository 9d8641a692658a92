"""`ServerOptions`: the options of the HTTP server, each declared once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfexport.option import Options, option

_ADDRESS, _MODELS = "Address", "Models"
_LIMITS, _ACCESS = "Limits", "Access"
_RUNNING = "Operation"

LogFormat = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """The options of the HTTP server.

    Raises:
        TfexportError: an option is out of range.
    """

    host: str = option(
        "127.0.0.1",
        metavar="ADDRESS",
        help="Address to listen on; 0.0.0.0 for all addresses of the machine.",
        panel=_ADDRESS,
    )
    port: int = option(8080, minimum=0, maximum=65535, help="Port; 0 for any free one.", panel=_ADDRESS)
    page: bool = option(
        True,
        flag="--page/--no-page",
        help="Serve a web page at / to try the bundles.",
        panel=_ADDRESS,
    )
    certified: bool = option(
        False,
        help="Serve only bundles with a certificate of `tfexport parity` that is valid on this machine.",
        panel=_MODELS,
    )
    reload: bool = option(
        False, help="Reload bundles when their files change, and at SIGHUP, without losing requests.", panel=_MODELS
    )
    reload_every: float = option(5.0, above=0, help="Seconds between two checks of the files.", panel=_MODELS)

    keys: Path | None = option(
        None,
        metavar="FILE",
        help="File with a name and a key on each line; without it requests need no key.",
        panel=_ACCESS,
    )
    cors: tuple[str, ...] = option(
        (),
        repeated=True,
        metavar="ORIGIN",
        help="Origin of web pages that may call the server, such as https://example.org; * for all.",
        panel=_ACCESS,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        flag="--allowed-host",
        repeated=True,
        metavar="NAME",
        help="Host name by which clients call the server; * for all.",
        default_text="this machine's own names if the server listens on it alone, otherwise all",
        panel=_ACCESS,
    )
    trusted_proxies: str | None = option(
        None,
        metavar="ADDRESSES",
        help="Proxies whose X-Forwarded-For is trusted, separated by commas; * for all.",
        panel=_ACCESS,
    )

    rate: str | None = option(
        None,
        metavar="N/UNIT",
        help="Largest rate for each key, or for each address if there are no keys: 10/second, 500 per 10 minutes.",
        panel=_LIMITS,
    )
    max_requests: int = option(
        2048,
        minimum=1,
        help="Largest number of concurrent requests, half of them from one client; more are rejected.",
        panel=_LIMITS,
    )
    max_connections: int = option(
        4096,
        minimum=1,
        help="Largest number of open connections, half of them from one address; more are closed at once.",
        panel=_LIMITS,
    )
    max_body: int = option(4 * 2**20, minimum=1, help="Largest body of a request, in bytes.", panel=_LIMITS)
    receive_timeout: float = option(
        30.0, above=0, help="Seconds in which a client must send its headers, and again its body.", panel=_LIMITS
    )
    send_timeout: float = option(
        30.0,
        above=0,
        help="Seconds after which a connection is closed if the client reads nothing.",
        panel=_LIMITS,
    )

    log_format: LogFormat = option("text", help="Format of the log on stderr.", panel=_RUNNING)
    drain_delay: float = option(
        0.0,
        minimum=0,
        help="Seconds after SIGTERM in which the server still accepts connections, while /ready returns 503.",
        panel=_RUNNING,
    )
    drain_timeout: int = option(
        30, minimum=1, help="Seconds after --drain-delay in which accepted requests are still answered.", panel=_RUNNING
    )

    def conflicts(self) -> list[str]:
        """Options that exclude each other, in words."""
        conflicts = super().conflicts()
        if self.rate is not None:
            from limits import parse  # imported only if needed: other commands need no server packages

            try:
                parse(self.rate)
            except ValueError:
                conflicts.append(f"rate is {self.rate!r}, not such as 10/second")
        return conflicts
