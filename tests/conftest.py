"""What all tests share."""

from __future__ import annotations

import gc
import signal
from collections import Counter
from collections.abc import Generator, Iterator

import pytest
import torch


def pytest_configure() -> None:
    """Signals do what they do in a terminal, also under `nohup` or in a shell's background, which ignore some of them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay until the end: looking for garbage among them takes a quarter of the collection."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second thread, and threads that wait for a busy core cost minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not ask for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(every=N)`, every Nth case is quick, from the first one, and the others are thorough."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None:
            continue
        name = item.nodeid.partition("[")[0]
        if seen[name] % mark.kwargs["every"]:
            item.add_marker(pytest.mark.thorough)
        seen[name] += 1
