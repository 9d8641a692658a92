"""When requests begin, wait, are rejected, expire and leave, over a clock that stands still."""

from __future__ import annotations

from typing import Any

import pytest

from makers.scheduling import Answer, Driver, problems
from tests.support.fakes import EOS, JoiningRuntime, random_model, tiny_config
from tfexport.errors import DeadlineError, QueueFullError, TfexportError
from tfexport.scheduling.options import ServingOptions
from tfexport.search.search import SearchOptions

VOCAB = 12
ENDLESS = SearchOptions(suppress=(), min_length=19, max_length=20)
"""Twenty steps each."""


def driver(**options: Any) -> Driver:
    return Driver(JoiningRuntime(random_model(0, VOCAB), tiny_config(tgt_vocab_size=VOCAB)), **options)


def ask(to: Driver, first: int = 4, *, size: int = 2, **more: Any) -> Answer:
    return to.submit([[first] * (size - 1) + [EOS]], more.pop("options", ENDLESS), **more)


def began(of: Driver) -> list[int]:
    """The requests whose sentences workers were given, in this order."""
    return [sentence.key[0] for orders in of.orders for sentence in orders.add]  # type: ignore[index]


def test_slots_are_never_exceeded_and_freed_ones_are_used() -> None:
    it = driver(slots=4)
    answers = [ask(it) for _ in range(10)]
    for _ in range(200):
        it.turn()
        assert it.scheduler.counters.live_rows <= 4
    assert all(answer.outputs for answer in answers)
    assert began(it) == list(range(10))


def test_a_sentence_wider_than_all_slots_is_decoded_alone() -> None:
    it = driver(slots=4)
    wide, narrow = ask(it, options=SearchOptions(beam=6, max_length=5)), ask(it)
    it.turn()
    assert began(it) == [wide.number]
    it.run()
    assert problems(it.runtime, wide) == problems(it.runtime, narrow) == []


def test_the_cache_has_a_budget() -> None:
    it = driver(slots=50, cache_tokens=3 * 22)  # a row: 2 source ids and 20 tokens
    answers = [ask(it) for _ in range(5)]
    it.turn()
    assert it.scheduler.counters.live_rows == 3
    it.run()
    assert all(answer.outputs for answer in answers)


def test_long_sources_are_encoded_between_several_steps() -> None:
    it = driver(step_tokens=25, slots=8)
    for _ in range(6):
        ask(it, size=10)
    ask(it, size=40)
    while len(began(it)) < 7:
        it.turn()
    # The last is longer than the budget, and alone; so it waits first whether others come.
    assert [len(orders.add) for orders in it.orders] == [2, 2, 2, 0, 0, 0, 1]


def test_a_sentence_waits_some_steps_for_others_that_begin_with_it() -> None:
    it = driver(slots=16)
    ask(it)
    it.turn()
    ask(it)
    it.turn()
    ask(it)
    while len(began(it)) < 3:
        it.turn()
    assert [len(orders.add) for orders in it.orders] == [1, 0, 0, 0, 2]


def test_sentences_that_fill_a_part_of_the_slots_begin_at_once() -> None:
    it = driver(slots=16)
    ask(it)
    it.turn()
    for _ in range(4):
        ask(it)
    it.turn()
    assert [len(orders.add) for orders in it.orders] == [1, 4]


def test_sentences_begin_together_where_most_slots_are_taken() -> None:
    it = driver(slots=16)
    short, long = SearchOptions(min_length=3, max_length=4), ENDLESS
    for _ in range(14):
        ask(it, options=long)
    ask(it, options=short)
    it.turn()
    for _ in range(5):
        ask(it, options=long)
    while len(began(it)) == 15:
        it.turn()
    sizes = [len(orders.add) for orders in it.orders if orders.add]
    assert sizes == [15, 2]  # the slot that was free waited for others, but not for long
    gap = [bool(orders.add) for orders in it.orders]
    assert gap == [True, False, False, False, True]


def test_interactive_requests_go_first_and_bulk_requests_have_their_share() -> None:
    it = driver(slots=1, bulk_share=0.25)
    bulk = [ask(it, bulk=True) for _ in range(10)]
    interactive = [ask(it) for _ in range(30)]
    it.run()
    numbers = {answer.number for answer in bulk}
    order = [number in numbers for number in began(it)]
    assert order[:4] == [False] * 4
    assert [sum(order[start : start + 4]) for start in range(4, 36, 4)] == [1] * 8
    assert all(answer.outputs for answer in (*bulk, *interactive))


def test_a_full_queue_rejects_at_once_and_says_when_to_come_again() -> None:
    it = driver(slots=1, max_queue=3)
    for _ in range(3):
        ask(it)
    with pytest.raises(QueueFullError, match=r"3 requests wait already. Send this one again in 1\.0 seconds") as found:
        ask(it)
    assert found.value.retry_after == 1.0  # nothing is known of the speed yet
    assert it.scheduler.counters.rejected == 1


def test_a_queue_is_bounded_by_source_ids_too_but_takes_any_one_request() -> None:
    it = driver(slots=1, max_queue_tokens=20)
    large = it.submit([[4, EOS]] * 30, ENDLESS)
    with pytest.raises(QueueFullError):
        ask(it)
    it.run()
    assert large.outputs is not None
    assert len(large.outputs) == 30
    ask(it)


def test_who_waits_too_long_expires_and_leaves() -> None:
    it = driver(slots=1, timeout=5.0)
    running, waiting, patient = ask(it), ask(it), ask(it, timeout=100.0)
    it.turn()
    it.now = 5.0
    it.turn()
    for late in (running, waiting):
        assert isinstance(late.error, DeadlineError)
        assert "within 5.0 seconds" in str(late.error)
    it.run()
    assert problems(it.runtime, patient) == []
    assert it.scheduler.counters.expired == 2
    assert began(it) == [running.number, patient.number]


def test_a_cancelled_request_leaves_at_the_next_step_and_its_place_is_used() -> None:
    it = driver(slots=2)
    gone, stays, next_one = ask(it, 4), ask(it, 5), ask(it, 6)
    it.turn()
    it.turn()
    it.cancel(gone)
    it.cancel(gone)  # twice is once
    it.turn()
    assert [len(orders.drop) for orders in it.orders] == [0, 0, 1]
    assert began(it) == [gone.number, stays.number, next_one.number]
    it.run()
    assert problems(it.runtime, stays) == problems(it.runtime, next_one) == []
    assert it.scheduler.counters.cancelled == 1
    assert it.scheduler.counters.finished == 2


def test_requests_of_a_worker_that_ends_are_answered_by_another() -> None:
    it = driver(workers=2, slots=4)
    answers = [ask(it, 4 + number, streams=True) for number in range(6)]
    for _ in range(6):
        it.turn(0)
        it.turn(1)
    it.lose(0)
    it.run()
    for answer in answers:
        assert problems(it.runtime, answer) == []
        told = [len(ids) for _, ids, _ in answer.prefixes]
        assert told == sorted(set(told))  # what was told is not told again
    assert it.scheduler.counters.restarts == 1


def test_a_request_that_ends_two_workers_is_given_up() -> None:
    it = driver()
    fatal = ask(it)
    for _ in range(2):
        it.turn()
        it.lose(0)
    assert "workers that decoded this request ended" in str(fatal.error)
    it.run()
    assert it.scheduler.counters.failed == 1


def test_several_workers_share_what_waits() -> None:
    it = driver(workers=2, slots=64)
    for _ in range(10):
        ask(it)
    it.turn(0)
    it.turn(1)
    assert [len(orders.add) for orders in it.orders] == [5, 5]


def test_batches_of_other_kinds_take_turns() -> None:
    it = driver()
    for options in ({}, {"beam": 2}, {"samples": 2}, {"beam": 3}):
        ask(it, options=SearchOptions(**{"min_length": 19, "max_length": 20, **options}))
    for _ in range(9):
        it.turn()
    rows = it.runtime.rows  # type: ignore[attr-defined]
    assert sum(len(steps) for steps in rows) == 9
    # beam 2 and two samples are two rows each, and share a batch
    assert it.scheduler.counters.step_rows.total == 3 * (1 + 4 + 3)


def test_when_all_ends_nobody_waits_for_ever() -> None:
    it = driver(slots=1)
    answers = [ask(it) for _ in range(3)]
    it.turn()
    it.scheduler.close(TfexportError("closed"))
    assert [str(answer.error) for answer in answers] == ["closed"] * 3
    it.run()


def test_counters_tell_what_happened() -> None:
    it = driver(slots=2)
    ask(it, size=3)
    it.now = 2.0
    it.turn()
    it.now = 3.0
    it.run()
    found = it.scheduler.counters.to_dict()
    assert (found["accepted"], found["finished"], found["sentences"], found["source_tokens"]) == (1, 1, 1, 3)
    assert found["tokens"] == 20
    assert found["queued"] == found["live_rows"] == found["queued_tokens"] == 0
    counters = it.scheduler.counters
    assert (counters.waiting_seconds.total, counters.request_seconds.total) == (2.0, 3.0)
    assert counters.step_rows.total == counters.step_rows.count == 20


def test_options_are_checked() -> None:
    with pytest.raises(TfexportError, match="slots is 0"):
        ServingOptions(slots=0)
