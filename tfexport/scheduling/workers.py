"""Workers of a scheduler: threads, or processes that share the weights of this process.

Worker processes are forks of a fork server (`ForkServer`). This process only forks and has no threads, so it can replace a
worker at any time.

The fork server itself is a fork of the process that loaded the model. A server with several bundles, or one that reloads a
bundle, has threads in that process. Then the child inherits their locks in the locked state, and no thread releases them.
Code in the child must not need such a lock:

- The interpreter makes new locks of its own, and so do `logging` and glibc's `malloc`.
- The child and its workers use one runtime, which no other thread has used yet, and one connection each. They do not read
  text, log or listen.
- Sockets of the parent are closed in the child. Otherwise a client would not see that its connection was closed.

Process-wide locks of libraries remain. So a server lets each new worker answer a request before the bundle takes its name,
and gives the bundle up if that takes too long (`Served.warm_up`). Later workers are forks of a process with one thread,
whose locks were free in the first workers.
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
from typing import Protocol

from tfexport.decoding.workers import CAN_FORK
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Runtime
from tfexport.scheduling.decoder import Decoder
from tfexport.scheduling.options import ServingOptions
from tfexport.scheduling.sentences import NO_ORDERS, Orders, Report, merged
from tfexport.system.processes import close_sockets, end_with_parent, return_freed_memory

REPORT_AFTER = 2
"""Steps after which a worker process reports even if nothing was decided. A report takes a fraction of a step's time."""

REPORT_EVERY = 0.005
"""Seconds between two reports of a busy worker process. Each report wakes the process that takes requests, and costs both
processes a fraction of a step of a small model. Results that are held back go with the next report, at most a step later."""

NICENESS = 5
"""The niceness of worker processes relative to the process that takes requests. Under overload that process must reject
requests at once. If workers with the same priority use all CPUs, rejections take seconds instead of a tenth of a second."""

ENDS_WITHIN = 5.0
"""Seconds after which a fork server that does not end is killed."""

FORK, END = b"f", b"e"
"""Commands to a fork server."""

OnReport = Callable[["Worker", Report], None]
OnEnd = Callable[["Worker", BaseException | None], None]


class Worker(Protocol):
    """Executes orders."""

    @property
    def waits_since(self) -> float | None:
        """The time since which the worker should have started; None if it has."""
        ...

    def send(self, orders: Orders) -> None:
        """Send orders for the time before the next step."""
        ...

    def close(self) -> None:
        """End the worker without waiting for its current work."""
        ...

    def kill(self) -> None:
        """End a worker that hangs. `OnEnd` is called. A thread cannot be ended."""
        ...


class ThreadWorker:
    """A thread over the runtime of this process."""

    waits_since = None

    def __init__(self, runtime: Runtime, on_report: OnReport, on_end: OnEnd):
        self._decoder = Decoder(runtime)
        self._on_report = on_report
        self._on_end = on_end
        self._inbox: SimpleQueue[Orders | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tfexport serves", daemon=True)
        self._thread.start()

    def send(self, orders: Orders) -> None:
        self._inbox.put(orders)

    def close(self) -> None:
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def kill(self) -> None:
        pass

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
        except BaseException as error:  # waiting callers must get the error
            self._on_end(self, error)


class ProcessWorker:
    """A process that the fork server made, and a thread that reads its reports."""

    def __init__(self, server: ForkServer, on_report: OnReport, on_end: OnEnd):
        self._connection = server.fork()
        self._on_report = on_report
        self._on_end = on_end
        self._outbox: SimpleQueue[Orders | None] = SimpleQueue()
        self._is_closed = False
        self._pid: int | None = None
        self._made = time.monotonic()
        # Two threads, so that neither waits for the worker. (The reader may wait for the sender: both use the scheduler.)
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

    @property
    def waits_since(self) -> float | None:
        return self._made if self._pid is None else None

    def kill(self) -> None:
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._disconnect()  # also from a worker that has not said its number yet

    def _disconnect(self) -> None:
        """Wake both threads, whatever the worker does."""
        with suppress(OSError), socket.fromfd(self._connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as own:
            own.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        try:
            with suppress(OSError):  # the worker has ended; the other thread notices
                while True:
                    orders = self._outbox.get()
                    self._connection.send(orders)
                    if orders is None:
                        return
        finally:
            # Close the connection only when no thread uses it: the system reuses its descriptor for the next socket or file,
            # and a late write would go there.
            self._threads[0].join()
            self._connection.close()

    def _read(self) -> None:
        try:
            self._pid = self._connection.recv()
            while True:
                self._on_report(self, self._connection.recv())
        except (OSError, EOFError):
            if not self._is_closed:
                self._on_end(self, None)
        except BaseException as error:
            self._on_end(self, error)
        finally:
            self._disconnect()  # the other thread may wait for a worker that does not read
            self._outbox.put(None)


class ForkServer:
    """A fork of this process that forks workers."""

    def __init__(self, runtime: Runtime):
        # A garbage collection writes to every object that it visits, and written memory is no longer shared.
        gc.freeze()
        self._control, of_child = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            _exits(partial(_serve_forks, runtime, of_child, self._control))
        of_child.close()

    def fork(self) -> Connection:
        """Fork a new worker; returns the connection to it."""
        ours, of_worker = socket.socketpair()
        with of_worker:
            try:
                socket.send_fds(self._control, [FORK], [of_worker.fileno()])
            except OSError as error:
                raise TfexportError(
                    "the process that makes workers ended. Close the model, and load it again."
                ) from error
        return Connection(ours.detach())

    def close(self) -> None:
        """End the fork server by a command. Closing is not enough: a later fork may also have our end of the socket."""
        with suppress(OSError):
            self._control.send(END)
        self._control.close()
        ends = time.monotonic() + ENDS_WITHIN
        with suppress(ChildProcessError):
            while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > ends:  # it was stopped
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
                    break
                time.sleep(0.002)
        gc.unfreeze()


def start_worker(runtime: Runtime, server: ForkServer | None, on_report: OnReport, on_end: OnEnd) -> Worker:
    """Start a worker: a process if there is a fork server, otherwise a thread."""
    if server is None:
        return ThreadWorker(runtime, on_report, on_end)
    return ProcessWorker(server, on_report, on_end)


def fork_server(runtime: Runtime, options: ServingOptions) -> ForkServer | None:
    """The fork server, if the options request worker processes.

    Raises:
        TfexportError: the options request processes, and this platform or runtime does not support them.
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
    """Run the work of a forked process, and end the process without the program's exit handlers."""
    try:
        run()
    except EOFError:  # the parent program has ended
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _serve_forks(runtime: Runtime, control: socket.socket, of_parent: socket.socket) -> None:
    of_parent.close()
    close_sockets(keep=control.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process by closing its end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps workers that end
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if message != FORK:
            return
        connection = Connection(descriptors[0])
        if os.fork() == 0:
            control.close()
            _exits(partial(_work, runtime, connection))
        connection.close()


def _work(runtime: Runtime, connection: Connection) -> None:
    """A worker process: orders in, reports out."""
    end_with_parent()
    connection.send(os.getpid())
    os.nice(NICENESS)
    decoder = Decoder(runtime)
    kept = Report()
    quiet = 0
    reported = 0.0
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
        is_due = now - reported >= REPORT_EVERY and (kept.events or quiet >= REPORT_AFTER)
        if is_due or decoder.is_idle:
            connection.send(kept)
            kept = Report()
            quiet = 0
            reported = now
            return_freed_memory()
