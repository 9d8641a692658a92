"""The graphs that choose tokens: when launches of them are recorded, and what is said where they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfexport.runtimes.device import Call, HostDevice
from tfexport.runtimes.device_search import DeviceSearch
from tfexport.runtimes.launches import Recording

WARNING = "warning: a launch of several steps is not recorded as a CUDA graph: not while recording"


class RefusingDevice(HostDevice):
    """Refuses a number of recordings; counts those that it made."""

    def __init__(self, refusals: int):
        super().__init__()
        self.refusals, self.recorded = refusals, 0

    def capture(self, enqueue: Call) -> Call:
        if self.refusals:
            self.refusals -= 1
            raise ValueError("not while recording\nmore")
        self.recorded += 1
        return enqueue


def search_on(device: HostDevice, *steps: Any) -> DeviceSearch:
    """Search graphs that run on `device`, between these steps."""
    graph: Any = SimpleNamespace(records=True)
    return DeviceSearch(device, lambda role: graph, lambda: steps)


def runs_of(search: DeviceSearch, count: int) -> int:
    """Run a new launch so often; how often its work was done."""
    done: list[int] = []
    unused: Any = None
    recording = Recording(search, lambda: done.append(1), unused, unused)
    for _ in range(count):
        recording()
    return len(done)


@pytest.mark.parametrize(("refusals", "recorded"), [(0, 1), (1, 1), (2, 0)])
def test_a_launch_is_recorded_in_its_second_run_or_in_its_third(refusals: int, recorded: int) -> None:
    device = RefusingDevice(refusals)
    assert runs_of(search_on(device), 5) == 5
    assert device.recorded == recorded


def test_only_a_launch_that_is_never_recorded_is_told_of_and_once(caplog: pytest.LogCaptureFixture) -> None:
    device = RefusingDevice(0)
    search = search_on(device)
    for _ in range(2):  # each is recorded at its second attempt
        device.refusals = 1
        runs_of(search, 4)
    assert device.recorded == 2
    assert caplog.messages == []
    for _ in range(2):
        device.refusals = 2
        runs_of(search, 4)
    assert caplog.messages == [WARNING]


def test_a_launch_with_nodes_of_the_host_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """A replay would not run them. That they are there was told when the graph was loaded."""
    device = RefusingDevice(0)
    assert runs_of(search_on(device, SimpleNamespace(records=False)), 4) == 4
    assert device.recorded == 0
    assert caplog.messages == []
