"""The graphs that choose tokens on the device, loaded by a library."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from tfexport.contract import Role
from tfexport.runtimes.device import Call, Device, warn_unrecorded
from tfexport.runtimes.workspace import Executable


class Recordable(Executable, Protocol):
    """A graph that may become a part of a recording."""

    @property
    def records(self) -> bool:
        """Whether all of it runs on the device."""
        ...


class DeviceSearch:
    """The search graphs of a bundle.

    Args:
        load: loads the graph of a role.
        steps: returns the loaded step graphs, which run between search graphs.
    """

    def __init__(self, device: Device, load: Callable[[Role], Recordable], steps: Callable[[], Iterable[Recordable]]):
        self._device = device
        self._load = load
        self._steps = steps
        self._loaded: dict[Role, Recordable] = {}
        self._has_warned = False

    def _graph(self, role: Role) -> Recordable:
        if role not in self._loaded:  # at the first search that needs it
            self._loaded[role] = self._load(role)
        return self._loaded[role]

    @property
    def greedy_search(self) -> Executable:
        return self._graph("greedy_search")

    @property
    def beam_search(self) -> Executable:
        return self._graph("beam_search")

    @property
    def best_tokens(self) -> Executable:
        return self._graph("best_tokens")

    def record(self, work: Call, *, is_last: bool) -> Call | None:
        """A recording of `work`; None if a graph has nodes that do not run on the device, or if the device refuses it."""
        if not all(graph.records for graph in (*self._steps(), *self._loaded.values())):
            return None
        try:
            return self._device.capture(work)
        except Exception as error:  # the libraries' errors have no common base
            if is_last and not self._has_warned:
                warn_unrecorded("a launch of several steps", error)
                self._has_warned = True
            return None
