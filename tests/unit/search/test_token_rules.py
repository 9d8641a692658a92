"""Rules about the next token: against every sequence there is, and by hand."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.fakes import BOS, EOS, Ids, Model, ScriptedRuntime, constant_model, random_model, tiny_config
from tfexport.errors import TfexportError
from tfexport.runtimes.outputs import Best, IntArray
from tfexport.search.profiles import PROFILES
from tfexport.search.rules.no_repeat_ngram import NoRepeatNgram
from tfexport.search.rules.repetition_penalty import RepetitionPenalty
from tfexport.search.search import Hypothesis, SearchOptions, Source, search
from tfexport.search.token_rules import log_softmax

VOCAB = 5
SOURCES: list[Ids] = [(5, 6, EOS), (7, EOS), (6,)]


def run(model: Model, sources: Sequence[Any], *, vocab: int = VOCAB, **options: Any) -> list[list[Hypothesis]]:
    return search(ScriptedRuntime(model, tiny_config(tgt_vocab_size=vocab)), sources, SearchOptions(**options))


def breaks(ids: Ids, **rules: Any) -> bool:
    """Whether an output breaks a rule, told from its definition."""
    n = rules.get("no_repeat_ngram", 0)
    ngrams = [(BOS, *ids)[at : at + n] for at in range(len(ids) + 2 - n)] if n else []
    return (
        len(set(ngrams)) < len(ngrams)
        or bool(set(ids) & set(rules.get("suppress", ())))
        or ids[0] in rules.get("suppress_first", ())
        or ids[: len(rules.get("prefix", ()))] != rules.get("prefix", ())[: len(ids)]
    )


def best_of_all(model: Model, source: Ids, length: int, **rules: Any) -> tuple[Ids, float]:
    """The best of all outputs that break no rule: those that end in eos, or have `length` tokens."""
    found = []
    for size in range(1, length + 1):
        for ids in itertools.product(range(VOCAB), repeat=size):
            if EOS in ids[:-1] or (ids[-1] != EOS and size < length) or breaks(ids, **rules):
                continue
            steps = [log_softmax(model(source, ids[:at])[None])[0, token] for at, token in enumerate(ids)]
            found.append((ids, float(sum(steps))))
    return max(found, key=lambda one: one[1])


RULES: list[dict[str, Any]] = [
    {"no_repeat_ngram": 1},
    {"no_repeat_ngram": 2},
    {"no_repeat_ngram": 3},
    {"suppress": (3,)},
    {"suppress": (0, 4)},
    {"suppress_first": (0, EOS - 1, 4)},
    {"prefix": (4, 3)},
    {"prefix": (3, 3, 3), "no_repeat_ngram": 2, "suppress": (3,)},
]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("rules", RULES[:-1], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_finds_the_best_of_all_outputs_that_keep_the_rules(seed: int, rules: dict[str, Any]) -> None:
    model = random_model(seed, VOCAB)
    options = {name: value for name, value in rules.items() if name != "prefix"}
    sources = [Source(source, prefix=rules.get("prefix", ())) for source in SOURCES]
    found = run(model, sources, beam=150, nbest=1, max_length=4, length_penalty=0.0, **options)
    for source, [hypothesis] in zip(SOURCES, found, strict=True):
        ids, log_prob = best_of_all(model, source, 4, **rules)
        assert hypothesis.ids == ids
        assert hypothesis.log_prob == pytest.approx(log_prob, abs=1e-6)


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_no_output_breaks_a_rule(rules: dict[str, Any], beam: int) -> None:
    """What the forced beginning breaks is its own affair."""
    for seed in range(5):
        options = {name: value for name, value in rules.items() if name != "prefix"}
        sources = [Source(source, prefix=rules.get("prefix", ())) for source in SOURCES]
        found = run(random_model(seed, VOCAB), sources, beam=beam, nbest=beam, max_length=9, **options)
        for hypothesis in itertools.chain(*found):
            assert not breaks(hypothesis.ids, **(rules if len(rules) == 1 else {"prefix": rules["prefix"]}))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("beam", [1, 4])
def test_where_no_token_may_come_an_output_ends(beam: int, profile: Any) -> None:
    """Of the second source at once, though it is too early for eos; of the third after a forced beginning."""
    model, config = random_model(3, 7), tiny_config(tgt_vocab_size=7)
    lists = [None, np.array([EOS, 3, 4]), np.array([EOS, 3]), np.array([EOS, 4, 6])]
    prefixes: list[Ids] = [(), (), (5,), ()]
    asked = [Source((5, 6), prefix=prefix, candidates=one) for one, prefix in zip(lists, prefixes, strict=True)]
    rules: dict[str, Any] = {"suppress": (3, 4, 5), "min_length": 3, "max_length": 6, "token_scores": True}
    options = SearchOptions.for_profile(profile, beam=beam, nbest=beam, **rules)
    found = search(ScriptedRuntime(model, config), asked, options)
    assert [one[0].ids for one in found[1:3]] == [(EOS,), (5, EOS)]
    assert [len(one) for one in found[1:3]] == [1, 1]
    for one in (h for outputs in found for h in outputs):
        assert np.isfinite([one.score, one.log_prob, *one.token_log_probs]).all()
        assert not {3, 4} & set(one.ids)
        assert EOS not in one.ids[:-1]
    for hypothesis in (*found[0], *found[3]):
        assert len(hypothesis.ids) > options.min_new_tokens
    for source, outputs in zip(asked, found, strict=True):
        assert [h.ids for h in outputs] == [h.ids for h in search(ScriptedRuntime(model, config), [source], options)[0]]
    if not options.search_profile.renormalises:  # the model's own log-probability of eos among the words of the list
        row = model((5, 6), ())[[EOS, 3, 4]]
        assert found[1][0].log_prob == pytest.approx(log_softmax(row[None])[0, 0], abs=1e-6)


@pytest.mark.parametrize("options", [{"samples": 2}, {"alternatives": 2}, {"no_repeat_ngram": 2}], ids=str)
def test_so_it_ends_where_logits_are_looked_at(options: dict[str, Any]) -> None:
    runtime = ScriptedRuntime(random_model(3, VOCAB), tiny_config(tgt_vocab_size=VOCAB))
    asked = SearchOptions(suppress=(3,), min_length=3, max_length=6, **options)
    [found] = search(runtime, [Source((5, 6), candidates=np.array([EOS, 3]))], asked)
    assert {one.ids for one in found} == {(EOS,)}


def test_what_has_no_probability_at_all_is_refused_by_a_beam() -> None:
    model = constant_model([-math.inf, -math.inf, -math.inf, 1.0, 0.0])
    for given in ({"suppress": (3, 4)}, {"suppress": (3, 4), "profile": "fairseq"}):
        with pytest.raises(TfexportError, match="probability 0 to all tokens that may continue an output"):
            run(model, [(6,)], beam=2, max_length=4, min_length=2, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{}, {"samples": 2}, {"no_repeat_ngram": 2}, {"profile": "opennmt"}], ids=str)
def test_so_it_is_by_a_search_without_a_beam(given: dict[str, Any]) -> None:
    """Of one sentence, of which it is said; the others of the batch end before."""

    def model(source: Ids, tokens: Ids) -> NDArray[np.float32]:
        ends = 0.0 if source == (6,) or len(tokens) < 2 else -math.inf
        return np.array([-math.inf, -math.inf, ends, 1.0, 0.0], dtype=np.float32)

    rules: dict[str, Any] = {"beam": 1, "max_length": 5, "suppress": (3, 4), **given}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {one.ids for found in run(model, [(6,), (7,)], min_length=0, **rules) for one in found} == {(EOS,)}
        begun = [Source((6,), prefix=(3, 4)), Source((7,), prefix=(3, 4))]
        with pytest.raises(TfexportError, match="probability 0 to all tokens that may continue an output"):
            run(model, begun, **rules)
        never = Source((6,), prefix=(3, BOS, EOS), most=3)  # what is said comes, however unlikely
        [[found, *_]] = run(model, [never], **rules)
    assert (found.ids, found.log_prob) == ((3, BOS, EOS), -math.inf)


class Counting(ScriptedRuntime):
    """Notes which way it is asked."""

    asked: str = ""

    def step(self, *arguments: Any) -> Any:
        self.asked += "s"
        return super().step(*arguments)

    def best(self, state: Any, tokens: IntArray, count: int) -> tuple[Best, Any]:
        found = super().best(state, tokens, count)
        self.asked = self.asked[:-1] + "b"
        return found


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, "bbbb"),
        ({"suppress": (3,), "min_length": 2}, "bbbb"),
        ({"suppress_first": (3, 4)}, "bbbb"),
        ({"repetition_penalty": 1.1}, "ssss"),
        ({"no_repeat_ngram": 3}, "ssss"),
        ({"samples": 2}, "ssss"),
        ({"profile": "marian"}, "bbbb"),
        ({"profile": "fairseq"}, "bbbs"),
        ({"profile": "opennmt", "min_length": 1}, "sbbb"),
    ],
)
def test_logits_are_asked_for_only_where_a_rule_needs_them(options: dict[str, Any], asked: str) -> None:
    runtime = Counting(constant_model([0, 0, -9, 2, 1, 0]), tiny_config(tgt_vocab_size=6, unk_id=5))
    search(runtime, [(6,), (7,)], SearchOptions(max_length=4, **options))
    assert runtime.asked == asked


def test_a_forced_beginning_needs_logits_no_longer_than_it_lasts() -> None:
    runtime = Counting(constant_model([0, 0, -9, 2, 1]), tiny_config(tgt_vocab_size=5))
    [[found], [other]] = search(runtime, [Source((6,), prefix=(4, 0)), (7,)], SearchOptions(max_length=4))
    assert runtime.asked == "ssbb"
    assert (found.ids, other.ids) == ((4, 0, 3, 3), (3, 3, 3, 3))


# --- against Transformers


# --- by their definitions


def test_a_repetition_is_penalised_once_and_away_from_zero() -> None:
    scores = np.array([[2.0, -2.0, 1.0, -1.0], [4.0, 3.0, -2.0, 0.0]])
    RepetitionPenalty(repetition_penalty=2.0).penalise(scores, np.array([[0, 1, 0], [2, 2, 3]]))
    assert scores.tolist() == [[1.0, -4.0, 1.0, -1.0], [4.0, 3.0, -4.0, 0.0]]


def test_what_would_repeat_an_ngram_is_banned() -> None:
    history = np.array([[1, 5, 6, 5], [1, 5, 6, 6]])
    for n, banned in ((1, [{1, 5, 6}, {1, 5, 6}]), (2, [{6}, {6}]), (3, [set(), set()]), (9, [set(), set()])):
        allowed = np.ones((2, 8), dtype=bool)
        NoRepeatNgram(no_repeat_ngram=n).ban(allowed, history)
        assert [set(np.flatnonzero(~row).tolist()) for row in allowed] == banned


def test_an_output_ends_where_nothing_else_may_come() -> None:
    """Each token once, and no eos before the sixth: there are four others."""
    for beam in (1, 2):
        [[found, *_]] = run(constant_model([4, 3, 0, 2, 1]), [(6,)], beam=beam, no_repeat_ngram=1, min_length=6)
        assert found.ids[-1] == EOS
        assert found.finished
        assert len(set(found.ids)) == len(found.ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suppress": (5,)}, "5 is to be suppressed, but ids go from 0 to 4"),
        ({"suppress_first": (-1,)}, "-1 is to be suppressed"),
        ({"suppress": (EOS,)}, "the end of a sentence cannot be suppressed. Use --min-length"),
    ],
)
def test_what_cannot_be_suppressed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TfexportError, match=message):
        run(constant_model([0.0] * VOCAB), [(6,)], **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram is -1"),
        ({"samples": -1}, "samples is -1"),
        ({"samples": 2, "beam": 4}, "sampling does not use a beam, and beam is 4"),
        ({"temperature": 0.5}, "need sampling, and samples is 0"),
        ({"samples": 1, "temperature": 0.0}, "temperature is 0.0"),
        ({"samples": 1, "top_k": -1}, "top_k is -1"),
        ({"samples": 1, "top_p": 0.0}, "top_p is 0.0"),
        ({"samples": 1, "top_p": 1.1}, "top_p is 1.1"),
        ({"samples": 1, "seed": 2**64}, "seed is 18446744073709551616"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(TfexportError, match=problem):
        SearchOptions(**options)


# --- the log-probability of each token


@pytest.mark.parametrize("options", [{}, {"beam": 3, "nbest": 3}, {"samples": 3}, {"beam": 4, "profile": "hf"}])
def test_token_log_probs_are_those_of_the_model_and_sum_up(options: dict[str, Any]) -> None:
    model = random_model(3, VOCAB)
    for source, hypotheses in zip(
        SOURCES, run(model, SOURCES, max_length=6, token_scores=True, **options), strict=True
    ):
        for found in hypotheses:
            steps = [log_softmax(model(source, found.ids[:at])[None])[0, token] for at, token in enumerate(found.ids)]
            assert found.token_log_probs == pytest.approx(steps, abs=1e-6)
            assert found.log_prob == pytest.approx(sum(steps), abs=1e-6)


# --- against CTranslate2
