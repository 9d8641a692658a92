"""A Ray cluster of two nodes on this machine, each in a network namespace of its own.

The nodes have one CPU each. They share the file system, and reach each other through a pair of virtual network devices.
Where namespaces cannot be made (they need root and `ip`), both nodes are on the address of the machine. Needs
`tfexport[ray]`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from makers.processes import descendants, is_actor, kill
from tfexport.scale.cluster import WITHOUT_METRICS

PORT = 6399
STARTED = 120.0
"""Seconds within which a node has to be there."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"} | WITHOUT_METRICS
_DEAD_AFTER = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
"""A node that was killed is known to be so within seconds."""


class Nodes:
    """The cluster, as a context.

    Args:
        environment: of the nodes, and so of actors.

    Attributes:
        environment: what drivers need as well.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]):
        # A token of this cluster alone, which its nodes and drivers share.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._folder, self.environment = folder, {**environment, **ENVIRONMENT, **_DEAD_AFTER, **token}
        self._names = [f"tfx-{os.getpid()}-{number}" for number in range(2)]
        self.has_namespaces = shutil.which("ip") is not None and os.geteuid() == 0
        self._ips = ["10.77.0.1", "10.77.0.2"] if self.has_namespaces else ["127.0.0.1", "127.0.0.1"]
        self._nodes: list[subprocess.Popen[bytes] | None] = [None, None]

    @property
    def address(self) -> str:
        return f"{self._ips[0]}:{PORT}"

    def command(self, node: int, command: list[str]) -> list[str]:
        """A command in the network of a node."""
        return ["ip", "netns", "exec", self._names[node], *command] if self.has_namespaces else command

    def __enter__(self) -> Nodes:
        if self.has_namespaces:
            try:
                self._make_network()
            except subprocess.CalledProcessError:  # a container may not
                self._remove_network()
                self.has_namespaces, self._ips = False, ["127.0.0.1", "127.0.0.1"]
        try:
            for number in range(2):
                self.start(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in (1, 0):
            self.kill(number)
        if self.has_namespaces:
            self._remove_network()

    def start(self, number: int) -> None:
        """Start a node that is not there; the first is the head.

        Raises:
            RuntimeError: it does not start.
        """
        own = (
            ["--head", f"--port={PORT}", "--include-dashboard=false"] if number == 0 else [f"--address={self.address}"]
        )
        own += [f"--node-ip-address={self._ips[number]}", "--num-cpus=1", "--object-store-memory=100000000"]
        own.append("--include-log-monitor=false")
        if number == 0:
            own.append(f"--temp-dir={self._folder}")  # the other nodes take it
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *own]
        with (self._folder.parent / f"{self._folder.name}-{number}.log").open("ab") as log:
            node = subprocess.Popen(self.command(number, ray), env=self.environment, stdout=log, stderr=log)
        self._nodes[number] = node
        until = time.monotonic() + STARTED
        while self._alive() < sum(one is not None for one in self._nodes):
            if node.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"node {number} does not start: see {log.name}")
            time.sleep(0.5)

    def _alive(self) -> int:
        """The number of nodes that the head knows to live."""
        code = f"import ray; ray.init({self.address!r}, log_to_driver=False, logging_level=50); print('alive', "
        code += "sum(node['Alive'] for node in ray.nodes()))"
        command = self.command(0, [sys.executable, "-c", code])
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        found = re.search(r"^alive (\d+)$", done.stdout, re.MULTILINE)  # Ray prints messages of nodes there, too
        return int(found[1]) if done.returncode == 0 and found else 0

    def kill(self, number: int) -> None:
        """End all processes of a node at once."""
        node, self._nodes[number] = self._nodes[number], None
        if node is None:
            return
        for pid in (*descendants(node.pid), node.pid):
            kill(pid)
        node.wait()

    def actors(self, number: int) -> list[int]:
        """The processes of actors on a node."""
        node = self._nodes[number]
        return [pid for pid in descendants(node.pid) if is_actor(pid)] if node is not None else []

    def processes(self) -> list[int]:
        """All processes of the nodes."""
        return [pid for node in self._nodes if node is not None for pid in (node.pid, *descendants(node.pid))]

    def _make_network(self) -> None:
        for name in self._names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        first, second = self._names
        _ip("-n", first, "link", "add", "node", "type", "veth", "peer", "name", "node", "netns", second)
        for name, address in zip(self._names, self._ips, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "node")
            _ip("-n", name, "link", "set", "node", "up")

    def _remove_network(self) -> None:
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
