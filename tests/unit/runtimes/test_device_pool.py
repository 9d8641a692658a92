"""Memory of a device that is used again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from tfexport.runtimes.device import HostDevice
from tfexport.runtimes.device_pool import MemoryPool, size_class


class SlowPiece:
    """A piece of memory that takes its time to say where it is."""

    nbytes = size_class(1)

    def __init__(self, address: int):
        self._address = address

    @property
    def address(self) -> int:
        time.sleep(0.01)
        return self._address


def test_no_two_threads_get_the_same_memory() -> None:
    memory = MemoryPool(HostDevice(), kept=8)
    for address in range(4):
        memory.give_back(SlowPiece(address))
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: memory.take(1), range(4)))
    assert sorted(piece._address for piece in taken) == [0, 1, 2, 3]  # type: ignore[attr-defined]


def test_memory_may_be_kept_for_its_use() -> None:
    """Then what came between two batches does not change their addresses."""
    for by_use in (True, False):
        pool = MemoryPool(HostDevice(), kept=8, by_use=by_use)
        first = pool.take(1000, "cache")
        pool.give_back(first, "cache")
        other = pool.take(1000, "cross")
        assert (other is first) is not by_use
        pool.give_back(other, "cross")
        assert pool.take(1000, "cache") is first
