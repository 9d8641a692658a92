"""Workers of a scheduler: threads, or processes that share the weights of this one.

Processes are forks of a process that does nothing but fork (`ForkServer`), and that has no threads: so a worker that ends
can be replaced at any time.

The fork server itself is a fork of the process that loaded the model. In a server that loads a bundle again, and in one with
several bundles, that process has threads. Then the child has their locks as they were, and nobody gives them back. What is
used in it must not need one:

- The interpreter makes its own locks anew, and `logging` and glibc's `malloc` do too.
- The child and its workers use one runtime, which no other thread has used yet, and one connection each. Nothing in them
  reads text, logs or listens.
- Sockets of the parent are closed in the child. Otherwise a client would not see that its connection was closed.

That leaves locks that libraries have for all of the process. A server does not rely on chance there: it lets each new worker
answer before the bundle takes its name, and gives the bundle up if that takes too long (`Served.warm_up`). Later workers are
forks of a process that has one thread and whose locks were free in the first ones.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

from tfexport.decoding.workers import CAN_FORK
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Runtime
from tfexport.scheduling.decoder import Decoder
from tfexport.scheduling.options import ServingOptions
from tfexport.scheduling.sentences import NO_ORDERS, Orders, Report, merged
from tfexport.system.processes import close_sockets, end_with_parent, return_freed_memory

TOLD_AFTER = 2
"""Steps after which a worker process reports, though nothing was decided: a report takes as long as a part of a step."""

REPORT_EVERY = 0.005
"""Seconds between two reports of a busy worker process: each wakes the process that takes requests, and costs both as much
as a part of a step of a small model. What is held back goes with the next report, at most a step later."""

NICENESS = 5
"""How much more worker processes give way than the process that takes requests. Under more requests than can be answered it
must refuse the others at once. Workers that use all CPUs would let it wait: refusals took seconds instead of a tenth."""

FORK, END = b"f", b"e"
"""What a fork server is told."""

OnReport = Callable[["Worker", Report], None]
OnEnd = Callable[["Worker", BaseException | None], None]


class Worker(Protocol):
    """Decodes what it is told to."""

    def send(self, orders: Orders) -> None:
        """Orders for before the next step."""
        ...

    def close(self) -> None:
        """End it, without waiting for what it does."""
        ...


class ThreadWorker:
    """A thread over the runtime of this process."""

    def __init__(self, runtime: Runtime[Any], on_report: OnReport, on_end: OnEnd):
        self._decoder, self._on_report, self._on_end = Decoder(runtime), on_report, on_end
        self._inbox: SimpleQueue[Orders | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tfexport serves", daemon=True)
        self._thread.start()

    def send(self, orders: Orders) -> None:
        self._inbox.put(orders)

    def close(self) -> None:
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                several: list[Orders] = []
                while (self._decoder.is_idle and not several) or not self._inbox.empty():
                    orders = self._inbox.get()
                    if orders is None:
                        return
                    several.append(orders)
                self._on_report(self, self._decoder.turn(merged(several) if several else NO_ORDERS))
                return_freed_memory()
        except BaseException as error:  # whoever waits must be told
            self._on_end(self, error)


class ProcessWorker:
    """A process that the fork server made, and a thread that reads its reports."""

    def __init__(self, server: ForkServer, on_report: OnReport, on_end: OnEnd):
        self._connection, self._on_report, self._on_end = server.fork(), on_report, on_end
        self._outbox: SimpleQueue[Orders | None] = SimpleQueue()
        self._is_closed = False
        # Two threads: who reads may wait for who sends, as both meet in the scheduler, and neither may wait for the worker.
        self._threads = [
            threading.Thread(target=run, name=f"tfexport {name}", daemon=True)
            for run, name in ((self._read, "reads reports"), (self._write, "sends orders"))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, orders: Orders) -> None:
        self._outbox.put(orders)

    def close(self) -> None:
        self._is_closed = True
        self._outbox.put(None)
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()

    def _write(self) -> None:
        try:
            with suppress(OSError):  # it has ended, as the other thread finds out
                while True:
                    orders = self._outbox.get()
                    self._connection.send(orders)
                    if orders is None:
                        return
        finally:
            # The connection is closed when nobody uses it: the number of its descriptor goes to the next socket or file, and
            # what is still written to it would go there too.
            self._threads[0].join()
            self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                self._on_report(self, self._connection.recv())
        except (OSError, EOFError):
            if not self._is_closed:
                self._on_end(self, None)
        except BaseException as error:
            self._on_end(self, error)
        finally:
            with suppress(OSError), socket.fromfd(self._connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as own:
                own.shutdown(socket.SHUT_RDWR)  # the other thread waits no longer for a worker that reads nothing
            self._outbox.put(None)


class ForkServer:
    """A fork of this process that forks workers."""

    def __init__(self, runtime: Runtime[Any]):
        # A garbage collection writes to every object that it visits, and memory that is written to is not shared.
        gc.freeze()
        self._control, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            _exits(partial(_serve_forks, runtime, theirs, self._control))
        theirs.close()

    def fork(self) -> Connection:
        """A new worker; returns the connection to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [FORK], [theirs.fileno()])
            except OSError as error:
                raise TfexportError(
                    "the process that makes workers ended. Close the model, and load it again."
                ) from error
        return Connection(ours.detach())

    def close(self) -> None:
        """End it. It is told: another process that was forked later may have our end of the socket too."""
        with suppress(OSError):
            self._control.send(END)
        self._control.close()
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        gc.unfreeze()


def start_worker(runtime: Runtime[Any], server: ForkServer | None, on_report: OnReport, on_end: OnEnd) -> Worker:
    """A worker: a process where there is a fork server, else a thread."""
    if server is None:
        return ThreadWorker(runtime, on_report, on_end)
    return ProcessWorker(server, on_report, on_end)


def fork_server(runtime: Runtime[Any], options: ServingOptions) -> ForkServer | None:
    """What makes worker processes, where the options ask for them.

    Raises:
        TfexportError: processes are asked for where there cannot be any.
    """
    can_fork = CAN_FORK and runtime.capabilities.fork
    if options.worker_kind == "processes" and not can_fork:
        raise TfexportError(
            "worker processes need Linux, and a runtime with one thread. Load the model with threads=1, or use worker_kind "
            "threads."
        )
    several = options.worker_kind == "auto" and options.workers > 1 and can_fork
    return ForkServer(runtime) if several or options.worker_kind == "processes" else None


def _exits(run: Callable[[], None]) -> None:
    """Run what a forked process does, and end it without what the program does at its end."""
    try:
        run()
    except EOFError:  # the program has ended
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _serve_forks(runtime: Runtime[Any], control: socket.socket, theirs: socket.socket) -> None:
    theirs.close()
    close_sockets(keep=control.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us, by closing its end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets workers that end
    while True:
        message, found, _, _ = socket.recv_fds(control, 1, 1)
        if message != FORK:
            return
        connection = Connection(found[0])
        if os.fork() == 0:
            control.close()
            _exits(partial(_work, runtime, connection))
        connection.close()


def _work(runtime: Runtime[Any], connection: Connection) -> None:
    """A worker process: orders in, reports out."""
    end_with_parent()
    os.nice(NICENESS)
    decoder, kept, quiet, reported = Decoder(runtime), Report(), 0, 0.0
    while True:
        several: list[Orders] = []
        while (decoder.is_idle and not several) or connection.poll():
            orders = connection.recv()
            if orders is None:
                return
            several.append(orders)
        report, quiet = decoder.turn(merged(several) if several else NO_ORDERS), quiet + 1
        kept = Report(kept.events + report.events, kept.steps + report.steps)
        now = time.monotonic()
        is_due = now - reported >= REPORT_EVERY and (kept.events or quiet >= TOLD_AFTER)
        if is_due or decoder.is_idle:
            connection.send(kept)
            kept, quiet, reported = Report(), 0, now
            return_freed_memory()
