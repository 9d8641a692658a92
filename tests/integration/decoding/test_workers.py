"""Workers that share the batches of a search, as threads and as processes of their own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tfexport.decoding.batches
import tfexport.decoding.workers
import tfexport.system.processes
from tests.support.fakes import EOS, ScriptedRuntime, echo_model, tiny_config
from tfexport.decoding.batches import decode_all, decode_windows
from tfexport.decoding.workers import WorkerPool
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Capabilities, Needs
from tfexport.runtimes.outputs import IntArray
from tfexport.search.search import SearchOptions

CONFIG = tiny_config(src_vocab_size=9, tgt_vocab_size=9, max_source_length=12, max_target_length=20)


class Forked(ScriptedRuntime):
    """A runtime whose workers are processes."""

    loaded_for: int | None = None
    capabilities = Capabilities(fork=True)

    def prepare(self, needs: Needs) -> None:
        self.loaded_for = needs.width


KINDS: list[type[ScriptedRuntime]] = [ScriptedRuntime, Forked]


def runtime(kind: type[ScriptedRuntime] = ScriptedRuntime) -> ScriptedRuntime:
    return kind(echo_model(9), CONFIG)


def sources(count: int) -> list[list[int]]:
    """All different, of lengths that go up and down."""
    return [[4 + (k // 5**place) % 5 for place in range(4 + k % 3)] for k in range(count)]


def wanted(given: list[list[int]]) -> list[tuple[int, ...]]:
    return [(*source, EOS) for source in given]


def test_outputs_of_processes_are_in_the_order_of_the_sources() -> None:
    for count in (0, 1, 2, 30):
        given, kind = sources(count), runtime(Forked)
        found = decode_all(kind, given, SearchOptions(beam=2), batch_size=4, workers=3)
        assert [hypotheses[0].ids for hypotheses in found] == wanted(given)
        assert kind.loaded_for == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 2])
def test_windows_are_answered_in_order_and_one_more_is_read_ahead(workers: int, kind: type[ScriptedRuntime]) -> None:
    given, read = sources(24), []

    def windows() -> Iterator[list[list[int]]]:
        for start in range(0, 24, 6):
            read.append(start)
            yield given[start : start + 6]

    answered: list[tuple[int, ...]] = []
    with WorkerPool(runtime(kind), workers, SearchOptions()) as pool:
        for count, window in enumerate(decode_windows(pool, windows(), SearchOptions(), batch_size=4)):
            answered += [hypotheses[0].ids for hypotheses in window]
            assert len(read) <= count + 1 + (workers > 1)
    assert answered == wanted(given)


class Meeting(ScriptedRuntime):
    """Its first two encodes wait for each other: they only end when two workers work at once."""

    barrier: Any = threading.Barrier(2, timeout=20)

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> Any:
        self.barrier.wait()
        return super().encode(src_ids, src_len, beam=beam, attention=attention)


class MeetingForked(Meeting, Forked):
    barrier = multiprocessing.get_context("fork").Barrier(2, timeout=20)


@pytest.mark.parametrize("kind", [Meeting, MeetingForked])
def test_two_workers_work_at_once(kind: type[ScriptedRuntime]) -> None:
    found = decode_all(runtime(kind), sources(4), SearchOptions(), batch_size=2, workers=2)
    assert [hypotheses[0].ids for hypotheses in found] == wanted(sources(4))


@pytest.mark.parametrize("kind", [Meeting, MeetingForked])
def test_few_sentences_are_shared_out(kind: type[ScriptedRuntime]) -> None:
    """One batch would do for them: a worker would wait for the other one for ever."""
    found = decode_all(runtime(kind), sources(3), SearchOptions(), batch_size=32, workers=2)
    assert [hypotheses[0].ids for hypotheses in found] == wanted(sources(3))


class Failing(ScriptedRuntime):
    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> Any:
        raise TfexportError("no")


class FailingForked(Failing, Forked):
    pass


@pytest.mark.parametrize("kind", [Failing, FailingForked])
@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_worker_raises_is_raised(workers: int, kind: type[ScriptedRuntime]) -> None:
    with pytest.raises(TfexportError, match="no"):
        decode_all(runtime(kind), sources(9), SearchOptions(), batch_size=2, workers=workers)


class Dying(Forked):
    """A worker that the system ends."""

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_told() -> None:
    with pytest.raises(TfexportError, match=r"a worker process ended.*fewer --workers"):
        decode_all(runtime(Dying), sources(9), SearchOptions(), batch_size=2, workers=2)


class Slow(Meeting):
    """Both workers have begun before one of them goes on, and each batch takes half a second."""

    met: Any = threading.Event()
    batches: Any = multiprocessing.get_context("fork").Value("i", 0)

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> Any:
        with self.batches.get_lock():
            self.batches.value += 1
        if not self.met.is_set():
            self.barrier.wait()
            self.met.set()
        time.sleep(0.5)
        return ScriptedRuntime.encode(self, src_ids, src_len, beam=beam, attention=attention)


class SlowForked(Slow, Forked):
    barrier = multiprocessing.get_context("fork").Barrier(2, timeout=20)
    met = multiprocessing.get_context("fork").Event()


class Left(BaseException):
    """What the signal raises here: a KeyboardInterrupt that came before the search or after it would end all tests."""


@contextmanager
def leaving(begun: Any) -> Iterator[None]:
    """This thread is sent a signal once `begun` is set, however long that takes on a busy machine."""

    def leave(*_: object) -> None:
        if not came.is_set():
            came.set()
            raise Left

    def send() -> None:
        if begun.wait(20):
            # A signal just before a thread begins to wait for a lock is handled after the wait.
            while not came.is_set():
                signal.pthread_kill(main, signal.SIGINT)
                came.wait(0.05)

    main, came = threading.get_ident(), threading.Event()
    before = signal.signal(signal.SIGINT, leave)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        try:
            yield
        finally:
            sender.join()  # or its signal could come in another test
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", [Slow, SlowForked])
def test_workers_end_at_once_when_the_search_is_left(kind: type[Slow]) -> None:
    """Not when all their batches are done: they are far from that."""
    kind.batches.value = 0
    with leaving(kind.met), pytest.raises(Left):
        decode_all(runtime(kind), sources(80), SearchOptions(), batch_size=1, workers=2)
    for _ in range(500):
        if not multiprocessing.active_children():
            break
        time.sleep(0.01)
    else:
        pytest.fail("a worker goes on")
    assert kind.batches.value < 20


def test_the_runtime_is_loaded_before_the_first_window_is_read() -> None:
    kind = runtime(Forked)
    with WorkerPool(kind, 1, SearchOptions(beam=3)):
        assert kind.loaded_for == 3  # type: ignore[attr-defined]


class Telling(Forked):
    """Tells the number of its process, and then works for ever."""

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> Any:
        os.write(1, f"{os.getpid()}\n".encode())
        time.sleep(30)


def test_workers_end_with_a_command_that_is_killed() -> None:
    def decode(pipe: int) -> None:
        os.dup2(pipe, 1)
        decode_all(runtime(Telling), sources(8), SearchOptions(), batch_size=2, workers=2)

    end, begin = os.pipe()
    parent = multiprocessing.get_context("fork").Process(target=decode, args=(begin,))
    parent.start()
    os.close(begin)  # so that reading ends when nobody is left to tell
    with os.fdopen(end) as told:
        workers = [int(told.readline()) for _ in range(2)]
        parent.kill()
        parent.join()
        for _ in range(500):
            if not any(Path(f"/proc/{worker}").exists() and is_running(worker) for worker in workers):
                return
            time.sleep(0.01)
    pytest.fail("a worker goes on")


class CountingFrozen(Forked):
    """Its workers look whether collections of garbage leave alone what came with the fork."""

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> Any:
        assert gc.get_freeze_count() > 1000, "a collection here writes to all that is shared"
        return super().encode(src_ids, src_len, beam=beam, attention=attention)


def test_collections_of_garbage_write_to_nothing_that_workers_share() -> None:
    before = gc.get_freeze_count()
    decode_all(runtime(CountingFrozen), sources(8), SearchOptions(), batch_size=2, workers=2)
    assert gc.get_freeze_count() == before == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 2])
def test_memory_is_given_back_after_each_window_and_task(
    kind: type[ScriptedRuntime], workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    for module in (tfexport.decoding.batches, tfexport.decoding.workers):
        monkeypatch.setattr(module, "return_freed_memory", lambda: print(os.getpid(), file=told.open("a")))
    windows = [sources(16)] * 3
    with WorkerPool(runtime(kind), workers, SearchOptions()) as pool:
        list(decode_windows(pool, windows, SearchOptions(), batch_size=2))
    by = [int(line) for line in told.read_text(encoding="ascii").split()]
    ahead = 1 if workers == 2 else 0
    assert by.count(os.getpid()) == 3 - ahead
    forked = kind is Forked and workers == 2
    assert len(by) - by.count(os.getpid()) == (3 * 4 if forked else 0)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_workers_are_threads_where_a_process_may_not_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them see what the first one writes."""

    class Counting(Forked):
        count = 0

        def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> Any:
            type(self).count += 1
            return super().encode(src_ids, src_len, beam=beam, attention=attention)

    decode_all(runtime(Counting), sources(8), SearchOptions(), batch_size=2, workers=2)
    assert Counting.count == 0
    monkeypatch.setattr(Counting, "capabilities", Capabilities())
    decode_all(runtime(Counting), sources(8), SearchOptions(), batch_size=2, workers=2)
    assert Counting.count == 4
    monkeypatch.undo()
    monkeypatch.setattr(tfexport.decoding.workers, "CAN_FORK", False)
    decode_all(runtime(Counting), sources(8), SearchOptions(), batch_size=2, workers=2)
    assert Counting.count == 8
