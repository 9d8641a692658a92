"""A search takes one step or several, and finds the same."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from tests.support.fakes import ScriptedRuntime, constant_model, random_model, tiny_config
from tests.support.scripted_ahead import AheadRuntime
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Ahead, Runtime, step_for
from tfexport.runtimes.outputs import Continuations
from tfexport.scheduling.batch import batch_for
from tfexport.scheduling.sentences import Finished, Sentence
from tfexport.search.options import SearchOptions
from tfexport.search.search import Hypothesis, search, search_batch, search_steps
from tfexport.search.search_batch import SearchBatch
from tfexport.search.source_batch import as_sources, encode

CONFIG = tiny_config(tgt_vocab_size=12, max_target_length=30)
SOURCES = [[5, 6], [7], [3, 4, 5], [9, 9], [8]]
OPTIONS = [
    SearchOptions(),
    SearchOptions(scores=True, max_length=11),
    SearchOptions(beam=3),
    SearchOptions(beam=4, nbest=4, length_penalty=0.6, token_scores=True, min_length=3),
    SearchOptions.for_profile("hf", beam=2, max_length=9, early_stopping="true", suppress=(7,)),
    SearchOptions.for_profile("joeynmt", beam=3),
    SearchOptions.for_profile("fairseq", beam=3),
]


def same(found: list[list[Hypothesis]], wanted: list[list[Hypothesis]]) -> bool:
    """Whether all is equal, where the search computes no scores too."""

    def plain(one: Hypothesis) -> Any:
        return [None if value != value else value for value in dataclasses.astuple(one)]

    return [list(map(plain, some)) for some in found] == [list(map(plain, some)) for some in wanted]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", OPTIONS)
def test_several_steps_at_once_find_what_steps_one_by_one_find(options: SearchOptions, seed: int) -> None:
    model = random_model(seed, CONFIG.tgt_vocab_size, spread=1.5)
    device = AheadRuntime(model, CONFIG)
    assert same(search(device, SOURCES, options), search(ScriptedRuntime(model, CONFIG), SOURCES, options))
    assert device.launches > 0


class BegunRuntime(AheadRuntime):
    """Compares what is begun with what is asked for after the host has seen the steps before it."""

    begun: tuple[Ahead, int] | None = None
    n_begun = 0

    def begin_ahead(self, state: Any, request: Ahead, sentences: int) -> None:
        assert self.begun is None
        self.begun, self.n_begun = (request, sentences), self.n_begun + 1

    def search_ahead(self, state: Any, request: Ahead) -> Any:
        if self.begun is not None:
            (begun, sentences), self.begun = self.begun, None
            assert sentences <= len(request.tokens) // state.beam
            assert {*hypotheses(begun, state.beam)} >= {*hypotheses(request, state.beam)}
            assert (begun.candidates, begun.banned, begun.end_ids) == (
                request.candidates,
                request.banned,
                request.end_ids,
            )
        return super().search_ahead(state, request)


def hypotheses(request: Ahead, beam: int) -> list[Any]:
    """The live hypotheses of each sentence: their last tokens and their log-probabilities."""
    tokens = request.tokens.reshape(-1, beam)
    scores = np.zeros(tokens.shape) if request.log_probs is None else request.log_probs
    return [(*one, *other) for one, other in zip(tokens.tolist(), scores.tolist(), strict=True)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_begun_early_is_what_is_asked_for_later(options: SearchOptions, seed: int) -> None:
    """Of sentences that go on; at least as many do as were certain to."""
    model = random_model(seed, CONFIG.tgt_vocab_size, spread=1.0)
    device = BegunRuntime(model, CONFIG)
    assert same(search(device, SOURCES, options), search(ScriptedRuntime(model, CONFIG), SOURCES, options))
    assert device.begun is None, "steps that nobody needs were begun"


def test_the_next_steps_are_begun_while_a_sentence_goes_on_for_certain() -> None:
    """Not behind the limit, and not where every sentence has a finished hypothesis."""
    for options in (SearchOptions(max_length=20), SearchOptions(beam=3, max_length=20)):
        endless = BegunRuntime(constant_model([0.0] * 2 + [-50.0] + [0.0] * 9), CONFIG)
        search(endless, SOURCES, options)
        assert (endless.launches, endless.n_begun) == (3, 2)
    ends_late = BegunRuntime(constant_model([0.0] * 2 + [-0.1] + [-9.0] * 9), CONFIG)
    search(ends_late, SOURCES, SearchOptions(beam=3, min_length=20, nbest=3))
    assert ends_late.n_begun == ends_late.launches - 1


@pytest.mark.parametrize("options", OPTIONS)
def test_sentences_are_told_with_the_steps_that_end_them_and_may_be_dropped(options: SearchOptions) -> None:
    """Each sentence once, with its outputs at once; what is dropped changes nothing for the others."""
    model = random_model(1, CONFIG.tgt_vocab_size, spread=1.5)
    wanted = search(ScriptedRuntime(model, CONFIG), SOURCES, options)
    told, turns = ended_of(AheadRuntime(model, CONFIG), options)
    assert sorted(told) == [*range(len(SOURCES))]
    assert all(same([found], [wanted[index]]) for index, found in told.items())
    *others, last = told
    dropped, _ = ended_of(AheadRuntime(model, CONFIG), options, drop=last)
    assert sorted(dropped) == sorted(others if turns > 1 else told)
    assert all(same([found], [wanted[index]]) for index, found in dropped.items())


def ended_of(
    runtime: Runtime, options: SearchOptions, *, drop: int | None = None
) -> tuple[dict[int, list[Hypothesis]], int]:
    """What a search tells of each sentence when it ends, in this order, and how often it was advanced."""
    sources = as_sources(SOURCES)
    runtime, state = encode(runtime, sources, options)
    batch = search_batch(runtime, sources, options, at_once=True, ahead=True)
    told: dict[int, list[Hypothesis]] = {}
    turns = 0
    while not batch.is_done:
        state = advanced(runtime, state, batch)
        turns += 1
        for index, outputs in zip(batch.ended.tolist(), batch.outputs(batch.ended), strict=True):
            assert index not in told
            told[index] = outputs
        if drop is not None and drop in batch.sentences.tolist():
            before = batch.sentences
            batch.drop(np.array([drop]))
            places = {index: place for place, index in enumerate(before.tolist())}
            kept = np.array([places[index] for index in batch.sentences.tolist()], dtype=np.int64)
            if not batch.is_done:
                state = state.select((kept[:, None] * options.width + np.arange(options.width)).ravel())
            drop = None
    return told, turns


def advanced(runtime: Runtime, state: Any, batch: SearchBatch) -> Any:
    ahead = batch.request_ahead()
    if ahead is None:
        output, state = step_for(runtime, state, batch.tokens, batch.request())
        rows = batch.advance(output, lambda: state.attention)
    else:
        several, state = runtime.search_ahead(state, ahead)
        rows = batch.advance_ahead(several)
    return state if rows is None or batch.is_done else state.select(rows)


@pytest.mark.parametrize("options", [SearchOptions(), SearchOptions(beam=3)])
def test_streaming_and_serving_never_ask_ahead(options: SearchOptions) -> None:
    """A reader sees each token when it is chosen; sentences join and leave between two steps."""
    runtime = AheadRuntime(random_model(1, CONFIG.tgt_vocab_size), CONFIG)
    wanted = search(runtime, SOURCES[:1], options)
    launches = runtime.launches
    for _ in search_steps(runtime, SOURCES[:1], options):
        pass
    [source] = as_sources(SOURCES[:1])
    sentence = Sentence("one", source, options)
    batch = batch_for(runtime, sentence)
    events = batch.add([sentence])
    while batch.rows:
        events += batch.step()
    [finished] = [event for event in events if isinstance(event, Finished)]
    assert same([finished.hypotheses], wanted)
    assert runtime.launches == launches > 0


@pytest.mark.parametrize("options", [SearchOptions(scores=True), SearchOptions(beam=2)])
def test_what_is_no_number_is_an_error_and_probability_0_is_none(options: SearchOptions) -> None:
    runtime = AheadRuntime(constant_model([0.0] * 12), CONFIG)
    batch = search_batch(runtime, as_sources([[5]]), options, ahead=True)
    assert batch.request_ahead() is not None
    shape = (8, 1, 4 if options.beam > 1 else 1)
    scores = np.full(shape, -1.0)
    scores[7] = math.nan
    tokens = np.full(shape, 5)
    with pytest.raises(TfexportError, match="not finite"):
        batch.advance_ahead(Continuations(scores, np.zeros(shape, dtype=np.int64), tokens))
    with pytest.raises(TfexportError, match="probability 0"):
        batch.advance_ahead(Continuations(np.full(shape, -np.inf), np.zeros(shape, dtype=np.int64), tokens))
