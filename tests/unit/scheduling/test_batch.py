"""Batches that sentences join and leave: what comes out is what a search of each sentence alone finds."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from makers.scheduling import Driver, drive, problems
from tests.support.fakes import (
    EOS,
    Ids,
    JoiningRuntime,
    JoiningState,
    Model,
    ScriptedRuntime,
    random_model,
    tiny_config,
)
from tfexport.errors import TfexportError, UnavailableError
from tfexport.runtimes.outputs import FloatArray, IntArray
from tfexport.scheduling import batch
from tfexport.scheduling.decoder import Decoder
from tfexport.scheduling.groups import pieces
from tfexport.scheduling.sentences import Failed, Finished, Orders, Sentence
from tfexport.search.search import SearchOptions, Source, search, search_batch

VOCAB = 12


def likes_to_end(seed: int) -> Model:
    """A random model whose outputs end at many lengths."""
    inner = random_model(seed, VOCAB)

    def logits(source: Ids, tokens: Ids) -> FloatArray:
        row = inner(source, tokens)
        row[EOS] += 0.5 * len(tokens)
        return row

    return logits


def joining(seed: int, kind: type[JoiningState] = JoiningState) -> JoiningRuntime:
    return JoiningRuntime(likes_to_end(seed), tiny_config(tgt_vocab_size=VOCAB), kind)


@pytest.mark.parametrize("seed", range(6))
def test_requests_of_all_kinds_get_what_each_would_get_alone(seed: int) -> None:
    runtime = joining(seed)
    driver, answers = drive(runtime, seed, 40, vocab=VOCAB, attention=True, workers=1 + seed % 2)
    assert [found for answer in answers for found in problems(runtime, answer)] == []
    assert sum(answer.outputs is not None for answer in answers) > 25
    assert (
        driver.scheduler.counters.step_rows.total > 2 * driver.scheduler.counters.step_rows.count
    )  # they shared steps


@pytest.mark.parametrize("seed", range(2))
def test_runtimes_that_do_not_join_give_the_same(seed: int) -> None:
    runtime = ScriptedRuntime(likes_to_end(seed), tiny_config(tgt_vocab_size=VOCAB))
    _, answers = drive(runtime, seed, 25, vocab=VOCAB, attention=True)
    assert [found for answer in answers for found in problems(runtime, answer)] == []


class TakesTheNextPlace(JoiningState):
    """A fault: a sentence that joins is written over its neighbour's."""

    def _write(self, place: int, source: Ids) -> None:
        super()._write(place, source)
        self.sources[(place + 1) % len(self.sources)] = source


class ForgetsToBegin(JoiningState):
    """A fault: a sentence that joins goes on from the tokens of who was there before."""

    def _write(self, place: int, source: Ids) -> None:
        before = self.prefixes[place * self.beam : (place + 1) * self.beam]
        super()._write(place, source)
        self.prefixes[place * self.beam : (place + 1) * self.beam] = before


class MixesNeighbours(JoiningState):
    """A fault: who leaves takes the cache of the next with it."""

    def idle(self, places: IntArray) -> None:
        super().idle(places)
        for place in places.tolist():
            if place + 1 < len(self.sources):
                self.sources[place + 1] = self.sources[place]


@pytest.mark.parametrize("fault", [TakesTheNextPlace, ForgetsToBegin, MixesNeighbours])
def test_a_row_that_takes_from_another_is_found(fault: type[JoiningState]) -> None:
    runtime = joining(0)
    _, answers = drive(joining(0, fault), 0, 40, vocab=VOCAB)
    assert any(problems(runtime, answer) for answer in answers)


def test_one_call_of_a_step_serves_sentences_of_all_ages_and_options() -> None:
    runtime = joining(1)
    decoder = Decoder(runtime)
    kinds: list[dict[str, Any]] = [{}, {"no_repeat_ngram": 2}, {"samples": 1}, {"token_scores": True}]
    for age, options in enumerate(kinds):
        search_options = SearchOptions(min_length=8, max_length=10, **options)
        decoder.turn(Orders((Sentence((age, 0), Source([4 + age, EOS]), search_options),)))
    assert [row for rows in runtime.rows for row in rows] == [1, 2, 3, 4]


def test_a_sentence_that_leaves_makes_room_for_the_next() -> None:
    decoder = Decoder(runtime := joining(2))
    options = SearchOptions(beam=2, min_length=8, max_length=10)
    decoder.turn(Orders(tuple(Sentence((n, 0), Source([4 + n, EOS]), options) for n in range(4))))
    decoder.turn(Orders(drop=((1, 0), (2, 0))))
    assert runtime.rows[-1] == [8, 4]
    decoder.turn(Orders((Sentence((9, 0), Source([9, EOS]), options),)))
    found = {}
    while not decoder.is_idle:
        found |= {event.key: event for event in decoder.turn().events}
    assert set(found) == {(0, 0), (3, 0), (9, 0)}
    for key, ids in {(0, 0): [4, EOS], (3, 0): [7, EOS], (9, 0): [9, EOS]}.items():
        event = found[key]
        assert isinstance(event, Finished)
        assert event.hypotheses == search(runtime, [ids], options)[0]


def test_what_one_sentence_runs_into_costs_no_other_its_answer() -> None:
    """The logits of one of three sentences are no numbers."""

    def model(source: Ids, tokens: Ids) -> FloatArray:
        row = likes_to_end(0)(source, tokens)
        return np.full_like(row, np.nan) if source[0] == 5 and len(tokens) == 2 else row

    for kind in (JoiningRuntime, ScriptedRuntime):
        runtime = kind(model, tiny_config(tgt_vocab_size=VOCAB))
        driver, options = Driver(runtime), SearchOptions(min_length=4, max_length=8)
        answers = [driver.submit([[first, EOS]], options) for first in (4, 5, 6)]
        driver.run()
        assert isinstance(answers[1].error, TfexportError)
        assert "not finite" in str(answers[1].error)
        for answer in (answers[0], answers[2]):
            assert problems(runtime, answer) == []


def test_runs_of_the_encoder_have_sources_of_like_length() -> None:
    found = pieces([3, 30, 28, 4, 29, 5, 10, 3])
    assert found == [[1, 4, 2], [6, 5, 3, 0, 7]]  # the shorter ones together have too few ids for runs of their own
    assert pieces([]) == []


def test_an_option_that_does_not_fit_the_model_fails_its_own_request() -> None:
    decoder = Decoder(joining(0))
    wrong, right = SearchOptions(suppress=(VOCAB + 1,)), SearchOptions(max_length=5)
    sentences = tuple(Sentence((n, 0), Source([4, EOS]), options) for n, options in enumerate((wrong, right)))
    events = list(decoder.turn(Orders(sentences)).events)
    while not decoder.is_idle:
        events += decoder.turn().events
    failed, finished = sorted(events, key=lambda event: str(event.key))
    assert isinstance(failed, Failed)
    assert "ids go from 0" in str(failed.error)
    assert isinstance(finished, Finished)


class BrokenFor(JoiningRuntime):
    """A runtime that cannot encode a source."""

    source: Ids = (9, 9, EOS)

    def encode(self, src_ids: IntArray, *more: Any, **named: Any) -> Any:
        if any(tuple(row[: len(self.source)]) == self.source for row in src_ids.tolist()):
            raise ZeroDivisionError("a fault")
        return super().encode(src_ids, *more, **named)


def test_a_fault_in_one_request_fails_it_alone() -> None:
    runtime = BrokenFor(likes_to_end(0), tiny_config(tgt_vocab_size=VOCAB))
    driver, options = Driver(runtime), SearchOptions(max_length=6)
    good = driver.submit([[4, 5, EOS]], options)
    driver.turn()
    bad = driver.submit([list(runtime.source)], options)
    driver.run()
    assert problems(runtime, good) == []
    assert str(bad.error) == "ZeroDivisionError in a worker"
    [note] = bad.error.__notes__  # type: ignore[union-attr]
    assert "a fault" in note
    assert pickle.loads(pickle.dumps(bad.error)).__notes__ == [note]  # it comes from another process
    later = driver.submit([[5, 4, EOS]], options)
    driver.run()
    assert problems(runtime, later) == []


def test_a_search_that_fails_costs_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, wide = joining(0), SearchOptions(beam=2, max_length=6)

    def broken(runtime: Any, sources: Any, options: SearchOptions, **more: Any) -> Any:
        if options == wide:
            raise OverflowError("cannot convert float infinity to integer")
        return search_batch(runtime, sources, options, **more)

    driver = Driver(runtime)
    monkeypatch.setattr(batch, "search_batch", broken)
    good = driver.submit([[4, 5, EOS]], SearchOptions(max_length=6))
    bad = driver.submit([[4, 5, EOS]], wide)
    driver.run()
    assert "OverflowError" in str(bad.error)
    assert problems(runtime, good) == []


def test_short_memory_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise MemoryError

    driver = Driver(joining(0))
    monkeypatch.setattr(batch, "search_batch", broken)
    bad = driver.submit([[4, 5, EOS]], SearchOptions(max_length=6))
    driver.run()
    assert isinstance(bad.error, UnavailableError)
    assert "Use a smaller beam" in str(bad.error)
