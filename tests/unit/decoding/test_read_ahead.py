"""A source that gives lines when it has them: no result waits for the next one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.fakes import ScriptedRuntime, echo_model, tiny_config
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.read_ahead import ReadAhead
from tfexport.decoding.translate import Result, translate
from tfexport.search.search import SearchOptions

SECONDS = 20
"""After which what waits is said to hang."""
CONFIG = tiny_config()


def results_of(lines: Iterator[bytes], workers: int = 1) -> Iterator[Result]:
    runtime = ScriptedRuntime(echo_model(CONFIG.tgt_vocab_size), CONFIG)
    reader = Reader(CONFIG, None, "ids")
    return translate(runtime, reader, lines, SearchOptions(max_length=5), workers=workers, live=True)


def ended(thread: threading.Thread) -> bool:
    thread.join(SECONDS)
    return not thread.is_alive()


def test_a_window_has_what_is_there() -> None:
    more = threading.Event()

    def source() -> Iterator[int]:
        yield from range(3)
        assert more.wait(SECONDS)
        yield 3

    with ReadAhead(source(), most=10) as ahead:
        first = list(ahead.window(10))
        while len(first) < 3:  # on a machine that is busy
            first += ahead.window(10)
        assert first == [0, 1, 2]
        assert not ahead.has_news()
        more.set()
        assert list(ahead.window(10)) == [3]
        assert list(ahead.window(10)) == []
        assert ahead.has_news()


def test_a_window_has_no_more_than_asked_for() -> None:
    with ReadAhead(iter(range(100)), most=4) as ahead:
        found: list[int] = []
        while window := list(ahead.window(7)):
            assert len(window) <= 7
            found += window
    assert found == list(range(100))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_result_comes_before_the_next_line(workers: int) -> None:
    gate = threading.Semaphore(0)

    def source() -> Iterator[bytes]:
        yield b"7 8"
        for token in (9, 10, 11):
            assert gate.acquire(timeout=SECONDS), "a result waits for the next line"
            yield b"%d" % token

    found = []
    for result in results_of(source(), workers):
        found.append(result.hypotheses[0].ids[:-1])
        gate.release()
    assert found == [(7, 8), (9,), (10,), (11,)]


def test_an_error_of_the_source_comes_after_the_results_before_it() -> None:
    def source() -> Iterator[bytes]:
        yield b"7"
        yield b"8"
        raise ZeroDivisionError

    results = results_of(source())
    assert [next(results).line, next(results).line] == [1, 2]
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.parametrize("workers", [1, 2])
def test_closing_does_not_wait_for_a_silent_source(workers: int) -> None:
    silent, began = threading.Event(), threading.Event()

    def source() -> Iterator[bytes]:
        yield b"7"
        began.set()
        silent.wait()
        yield b"8"

    results = results_of(source(), workers)
    next(results)
    assert began.wait(SECONDS)
    (reading,) = [thread for thread in threading.enumerate() if thread.name == "tfexport reads ahead"]
    closing = threading.Thread(target=results.close, daemon=True)  # type: ignore[attr-defined]
    closing.start()
    assert ended(closing)
    assert reading.is_alive()
    silent.set()
    assert ended(reading)


def test_closing_ends_a_thread_that_is_ahead() -> None:
    with ReadAhead(iter(range(100)), most=1) as ahead:
        (reading,) = [thread for thread in threading.enumerate() if thread.name == "tfexport reads ahead"]
        next(ahead.window(1))
    assert ended(reading)
