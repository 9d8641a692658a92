"""The application under uvicorn: one process, its signals, and its end.

    SIGTERM ──> /ready says 503 ──drain_delay──> no new connections ──drain_timeout──> the end

All accepted requests are answered, including streams. A second signal ends the server at once.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import uvicorn

from tfexport.errors import TfexportError
from tfexport.serving.access.limits import Refusals
from tfexport.serving.access.origins import hosts_of
from tfexport.serving.app import create_app
from tfexport.serving.catalog import Catalog
from tfexport.serving.http.connections import KEEP_ALIVE, Connection, check_always
from tfexport.serving.options import ServerOptions
from tfexport.serving.reload import Reloader
from tfexport.serving.state import State
from tfexport.serving.telemetry.logs import NOTES, log, log_config
from tfexport.serving.telemetry.metrics import Metrics
from tfexport.system.processes import leave_out_of_collections

OTHER_FILES = 256
"""The number of open files besides connections: of models, workers and the system."""
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """A server that drains at the first signal, and stores it.

    Args:
        reloader: checks for changes at SIGHUP.
    """

    def __init__(self, config: uvicorn.Config, state: State, delay: float, reloader: Reloader | None):
        super().__init__(config)
        self._state, self._reloader = state, reloader
        self._delay = delay
        self._exit_at: float | None = None
        self._checks: asyncio.Task[None] | None = None
        self.signal: int | None = None
        """The first signal that requested the end."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._checks = asyncio.create_task(check_always(self.server_state.connections))

    async def on_tick(self, counter: int) -> bool:
        over = self._exit_at is not None and time.monotonic() >= self._exit_at
        return await super().on_tick(counter) or over

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.signal is not None:
            self.should_exit = self.force_exit = True
            return
        self.signal, self._state.is_draining = sig, True
        self._exit_at = time.monotonic() + self._delay

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals. Unlike uvicorn's own method, this does not raise them again: the exit code shows whether all
        requests were answered."""
        handlers = {number: signal.signal(number, self.handle_exit) for number in END_SIGNALS}
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hang_up)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _hang_up(self, number: int, frame: object) -> None:
        if self._reloader is not None:
            self._reloader.look()
        else:
            self.handle_exit(number, frame)


def run(catalog: Catalog, options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM, then answer all accepted requests.

    Raises:
        TfexportError: the server cannot listen on the address, or the file of keys cannot be read.
        SystemExit: with 128 plus the number of the signal, if a request was not answered.
    """
    state = State()
    options = replace(options, allowed_hosts=hosts_of(options))
    app = create_app(catalog, options, state)
    metrics: Metrics = app.state.metrics
    refusals: Refusals = app.state.refusals
    options = replace(options, max_connections=allow_connections(options.max_connections))
    reloader = Reloader(catalog, metrics, options.reload_every) if options.reload else None
    proxies = options.trusted_proxies
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        timeout_keep_alive=KEEP_ALIVE,
        # A callable is enough. Behind proxies, connections do not show clients; `Limits` does.
        http=partial(Connection, options, metrics, Counter(), None if proxies else refusals.of_connection),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=log_config(options.log_format),
        access_log=False,
        proxy_headers=proxies is not None,
        forwarded_allow_ips=proxies,
        timeout_graceful_shutdown=options.drain_timeout,
        server_header=False,
    )
    server = Server(config, state, options.drain_delay, reloader)
    leave_out_of_collections()
    with reloader or nullcontext():
        try:
            server.run()
        except SystemExit:
            if server.started:
                raise
            raise TfexportError(
                f"cannot listen on {options.host}, port {options.port}, as said above. Give another --port or --host."
            ) from None
    if server.signal is not None and (server.force_exit or state.unanswered):
        log(NOTES, "ended before all requests were answered", {"unanswered": state.unanswered})
        sys.exit(128 + server.signal)


def allow_connections(count: int) -> int:
    """Raise this process's limit of open files for `count` connections, as far as the system allows. It is usually 1,024.

    Returns:
        The number of connections that the limit allows. The system would drop further connections without a response or a
        log line.
    """
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count + OTHER_FILES
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        if wanted < count + OTHER_FILES:
            fitting = max(1, wanted - OTHER_FILES)
            log(
                NOTES, "fewer connections, because of the limit of open files (ulimit -n)", {"max_connections": fitting}
            )
            return fitting
    return count
