"""When a search stays on the host, and what it says of that."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from tests.support.fakes import ScriptedRuntime, constant_model, tiny_config
from tfexport.runtimes.base import AHEAD, Capabilities
from tfexport.search import multi_step
from tfexport.search.multi_step import SearchAhead, obstacle
from tfexport.search.options import SearchOptions
from tfexport.search.source_batch import as_sources
from tfexport.search.token_rules import TokenRules

CONFIG = tiny_config(tgt_vocab_size=30)
ABLE = Capabilities(greedy_ahead=True, beam_ahead=True, waits_for_host=True)


def ahead_of(options: SearchOptions, capabilities: Capabilities = ABLE) -> SearchAhead:
    limits = np.array([20, 20])
    rules = TokenRules(ScriptedRuntime(constant_model([0.0] * 30), CONFIG), options, as_sources([[5], [6]]), limits)
    return SearchAhead(rules, options, capabilities)


def requested(searcher: SearchAhead, length: int) -> Any:
    return searcher.request(length, np.arange(2), np.array([1, 1]), None, 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (SearchOptions(), ""),
        (SearchOptions(beam=4, suppress=(7,), min_length=3), ""),
        (SearchOptions(samples=1), "sampling"),
        (SearchOptions(no_repeat_ngram=2), "rules about past tokens"),
        (SearchOptions(attention=True), "attention weights"),
        (SearchOptions.for_profile("marian", beam=2), "the profile marian, whose beam depends on finished hypotheses"),
        (SearchOptions.for_profile("marian"), ""),
    ],
)
def test_what_keeps_a_search_on_the_host_is_named_once(
    options: SearchOptions, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_step, "_noted", set())
    assert obstacle(options) == reason
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (requested(ahead_of(options), 0) is None) == bool(reason)
    assert [record.getMessage().startswith(f"note: {reason}: ") for record in caplog.records] == [True] * bool(reason)


def test_a_runtime_that_cannot_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    assert requested(ahead_of(SearchOptions(), Capabilities(beam_ahead=True)), 0) is None
    assert requested(ahead_of(SearchOptions(beam=2), Capabilities(greedy_ahead=True)), 0) is None
    assert not caplog.records


def test_each_step_has_its_banned_tokens() -> None:
    searcher = ahead_of(SearchOptions(min_length=3, suppress=(7, 9), suppress_first=(8,)))
    eos = CONFIG.eos_id
    first = requested(searcher, 0)
    assert [set(banned) for banned in first.banned] == [{eos, 7, 8, 9}, {eos, 7, 9}, {eos, 7, 9}, *[{7, 9}] * 5]
    assert [set(banned) for banned in requested(searcher, 8).banned] == [{7, 9}] * AHEAD
    assert first.end_ids == (eos,)


def test_the_host_makes_steps_that_have_fewer_finite_candidates_than_the_search_needs() -> None:
    """The first step continues one hypothesis. CUDA's TopK returns places that do not exist in place of `-inf`."""
    searcher = ahead_of(SearchOptions(beam=4, suppress=(7, 9)))
    for candidates, by_device in ((28, True), (29, False)):  # 30 words, 2 of them banned
        found = searcher.request(0, np.arange(2), np.array([1, 1]), None, candidates)
        assert (found is not None) == by_device


def test_steps_that_need_more_than_the_best_tokens_stay_on_the_host() -> None:
    """The profile opennmt shares the probability of a banned token, which is the first; that of fairseq forces an end."""
    opennmt = ahead_of(SearchOptions.for_profile("opennmt", beam=2))
    assert requested(opennmt, 0) is None
    assert requested(opennmt, 1) is not None
    fairseq = ahead_of(SearchOptions.for_profile("fairseq", beam=2))
    assert [length for length in range(20) if requested(fairseq, length) is None] == [*range(12, 20)]
