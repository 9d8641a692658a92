"""Memory of a device that is used again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from tfexport.runtimes.device import HostDevice
from tfexport.runtimes.device_pool import BatchNumber, MemoryPool, size_class


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


class Downwards(HostDevice):
    """Its memory comes at falling addresses."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 1 << 20

    def allocate(self, nbytes: int) -> Any:
        self._next -= nbytes
        return SimpleNamespace(address=self._next, nbytes=nbytes)


def test_memory_for_a_use_comes_in_the_order_in_which_it_was_allocated() -> None:
    """So the next batch gets what the first one got, wherever that lies."""
    pool = MemoryPool(Downwards(), kept=8, by_use=True)
    pieces = [pool.take(1000, "cache") for _ in range(3)]
    for index in (2, 0, 1):
        pool.give_back(pieces[index], "cache")
    assert [pool.take(1000, "cache") for _ in range(3)] == pieces


def test_a_batch_number_is_the_lowest_that_no_other_batch_has() -> None:
    taken: set[int] = set()
    first, second, third = (BatchNumber(taken) for _ in range(3))
    assert [number.value for number in (first, second, third)] == [0, 1, 2]
    del second
    assert (BatchNumber(taken).value, first.value) == (1, 0)
