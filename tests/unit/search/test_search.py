"""Greedy and beam search against enumeration of every sequence and against the naive one-sentence searches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from makers.references import decode as naive
from tests.support.fakes import (
    BOS,
    EOS,
    Ids,
    Model,
    ScriptedRuntime,
    constant_model,
    echo_model,
    random_model,
    tied_model,
    tiny_config,
)
from tfexport.errors import TfexportError
from tfexport.runtimes.outputs import Best, best_from_logits
from tfexport.search.greedy import REMOVE_FINISHED_BELOW
from tfexport.search.search import Hypothesis, SearchOptions, pad, search
from tfexport.search.source_batch import search_limits

# A sum of -inf and inf, or a limit that overflows, first shows as a warning of NumPy.
pytestmark = pytest.mark.filterwarnings("error")

# Different lengths and a repeated sentence.
SOURCES: list[Ids] = [(5, 6, EOS), (7, EOS), (5, 6, 7, 8, EOS), (7, EOS), (9, 5, 9, EOS), (6,)]


def run(model: Model, sources: Sequence[Ids], *, vocab: int, **options: Any) -> list[list[Hypothesis]]:
    return search(ScriptedRuntime(model, tiny_config(tgt_vocab_size=vocab)), sources, SearchOptions(**options))


def ids_of(found: list[list[Hypothesis]]) -> list[list[Ids]]:
    return [[hypothesis.ids for hypothesis in hypotheses] for hypotheses in found]


def log_probs(model: Model, source: Ids, tokens: Ids, min_length: int = 0) -> list[float]:
    """The model's log-probabilities after `tokens`; an eos that comes too early is impossible, the others keep theirs."""
    logits = model(source, tokens).astype(np.float64)
    found = logits - np.logaddexp.reduce(logits)
    if len(tokens) < min_length:
        found[EOS] = -np.inf
    return list(found)


def every_hypothesis(
    model: Model, source: Ids, *, vocab: int, max_length: int, length_penalty: float, min_length: int = 0
) -> list[tuple[Ids, float]]:
    """All sequences that end in eos or at the limit, with their scores, best first."""
    found = []
    for length in range(1, max_length + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            if EOS in tokens[:-1] or (tokens[-1] != EOS and length < max_length):
                continue
            steps = [log_probs(model, source, tokens[:i], min_length)[token] for i, token in enumerate(tokens)]
            if math.isfinite(sum(steps)):
                found.append((tokens, sum(steps) / ((5 + length) / 6) ** length_penalty))
    return sorted(found, key=lambda hypothesis: -hypothesis[1])


class NaiveModel:
    """A scripted model in the shape that the naive searches call, which notes how many steps they took."""

    def __init__(self, model: Model, source: Ids):
        self.steps = 0
        self._model, self._source = model, source

    def __call__(self, src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
        tokens = tuple(tgt_ids[0, 1:].tolist())
        self.steps = max(self.steps, len(tokens) + 1)
        return torch.from_numpy(self._model(self._source, tokens))[None, None]


def naive_greedy(model: Model, source: Ids, max_length: int) -> Ids:
    return tuple(naive.greedy(NaiveModel(model, source), [0], bos=BOS, eos=EOS, max_length=max_length))


def naive_beam(model: Model, source: Ids, **options: Any) -> tuple[list[tuple[Ids, float]], int]:
    """The n-best list, and the number of steps until it was found."""
    stepped = NaiveModel(model, source)
    found = naive.beam(stepped, [0], bos=BOS, eos=EOS, **options)
    return [(tuple(tokens), score) for tokens, score in found], stepped.steps


# --- against every sequence there is


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0, -1.0])
@pytest.mark.parametrize("min_length", [0, 2])
def test_a_beam_wide_enough_finds_exactly_the_best_of_all_sequences(length_penalty: float, min_length: int) -> None:
    # 1 + 3 + 9 + 27 sequences end in eos and 81 at the limit: a beam that holds them all never prunes nor stops early.
    vocab, max_length, beam = 4, 4, 121
    model, sources = random_model(3, vocab), SOURCES[:3]
    options: dict[str, Any] = {"max_length": max_length, "length_penalty": length_penalty, "min_length": min_length}
    found = run(model, sources, vocab=vocab, beam=beam, nbest=beam, **options)
    for source, hypotheses in zip(sources, found, strict=True):
        expected = every_hypothesis(model, source, vocab=vocab, **options)
        assert len(expected) == (121 if min_length == 0 else 117)
        assert [hypothesis.ids for hypothesis in hypotheses] == [tokens for tokens, _ in expected]
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx([s for _, s in expected], abs=1e-6)
        assert [hypothesis.finished for hypothesis in hypotheses] == [tokens[-1] == EOS for tokens, _ in expected]


@pytest.mark.parametrize("seed", range(5))
def test_stopping_early_loses_nothing_where_there_is_no_penalty(seed: int) -> None:
    """Without a penalty a longer hypothesis never scores higher."""
    vocab, max_length, nbest = 5, 3, 20  # at most 64 sequences live, so the beam prunes none of them
    model = random_model(seed, vocab)
    options: dict[str, Any] = {"max_length": max_length, "length_penalty": 0.0}
    found = run(model, SOURCES, vocab=vocab, beam=64, nbest=nbest, **options)
    for source, hypotheses in zip(SOURCES, found, strict=True):
        expected = every_hypothesis(model, source, vocab=vocab, **options)[:nbest]
        assert [hypothesis.ids for hypothesis in hypotheses] == [tokens for tokens, _ in expected]


def test_greedy_takes_the_best_next_token_and_not_the_best_sequence() -> None:
    """Greedy goes wrong here, on purpose: token 3 promises more than 4 and ends worse."""

    def model(source: Ids, tokens: Ids) -> np.ndarray:
        probabilities = {(): [0, 0, 0.1, 0.5, 0.4], (3,): [0.25, 0.25, 0.2, 0.15, 0.15], (4,): [0, 0, 1.0, 0, 0]}
        with np.errstate(divide="ignore"):
            return np.log(np.array(probabilities.get(tokens, [0, 0, 1, 0, 0]), dtype=np.float32))

    [[greedy]] = run(model, [(6,)], vocab=5, length_penalty=0.0)
    assert greedy.ids == (3, 0, EOS)
    assert math.exp(greedy.score) == pytest.approx(0.5 * 0.25)
    [[best]] = run(model, [(6,)], vocab=5, beam=2, length_penalty=0.0)
    assert best.ids == (4, EOS)
    assert math.exp(best.score) == pytest.approx(0.4)


# --- against the naive searches


@pytest.mark.parametrize("seed", range(20))
def test_greedy_agrees_with_the_naive_one(seed: int) -> None:
    model = random_model(seed, 7)
    found = run(model, SOURCES, vocab=7, max_length=12)
    assert ids_of(found) == [[naive_greedy(model, source, 12)] for source in SOURCES]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("beam", [2, 3, 4])
def test_beam_agrees_with_the_naive_one(beam: int, seed: int) -> None:
    model = random_model(seed, 6)
    options: dict[str, Any] = {"beam": beam, "max_length": 8, "length_penalty": [0.0, 0.6, 1.5][seed % 3]}
    found = run(model, SOURCES, vocab=6, nbest=beam, **options)
    for source, hypotheses in zip(SOURCES, found, strict=True):
        expected, _ = naive_beam(model, source, **options)
        assert [hypothesis.ids for hypothesis in hypotheses] == [tokens for tokens, _ in expected]
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx([s for _, s in expected], abs=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_a_beam_wider_than_the_vocabulary_agrees_with_the_naive_one(seed: int) -> None:
    """Fewer hypotheses exist than the beam has room for, at first or for good."""
    model, sources = random_model(seed, 3), SOURCES[:3]
    for max_length in (1, 2, 5):
        options: dict[str, Any] = {"beam": 5, "max_length": max_length, "length_penalty": 0.6}
        found = run(model, sources, vocab=3, nbest=5, **options)
        assert ids_of(found) == [[ids for ids, _ in naive_beam(model, source, **options)[0]] for source in sources]


@pytest.mark.parametrize("seed", range(10))
def test_of_equals_the_lower_beam_and_then_the_lower_token_wins(seed: int) -> None:
    """Many equal values stand at the border of what a beam looks at: taking any of them is not good enough."""
    model = tied_model(seed, 64)
    assert ids_of(run(model, SOURCES, vocab=64, max_length=4)) == [
        [naive_greedy(model, source, 4)] for source in SOURCES
    ]
    for beam in (2, 4):
        options: dict[str, Any] = {"beam": beam, "max_length": 4, "length_penalty": 0.6}
        found = run(model, SOURCES, vocab=64, nbest=beam, **options)
        assert ids_of(found) == [[ids for ids, _ in naive_beam(model, source, **options)[0]] for source in SOURCES]


def test_ties_by_hand() -> None:
    everything_equal = constant_model([0.0] * 40)
    assert ids_of(run(everything_equal, [(6,)], vocab=40, max_length=2)) == [[(0, 0)]]
    # Step 1 leaves tokens 0 and 1; eos, 2, is the third and so not among the first two. Step 2 the same from beam 0.
    found = run(everything_equal, [(6,)], vocab=40, beam=2, nbest=2, max_length=2)
    assert ids_of(found) == [[(0, 0), (0, 1)]]
    # With three beams eos is among them. Lower beams first: all that step 2 looks at continues beam 0, and eos, found
    # in the search, comes before what the limit cuts.
    found = run(everything_equal, [(6,)], vocab=40, beam=3, nbest=3, max_length=2, length_penalty=0.0)
    assert ids_of(found) == [[(EOS,), (0, EOS), (0, 0)]]


# --- when sentences leave


@pytest.mark.parametrize("make_model", [random_model, tied_model])
@pytest.mark.parametrize("seed", range(10))
def test_a_beam_sentence_leaves_the_batch_as_soon_as_it_is_done(make_model: Callable[..., Model], seed: int) -> None:
    model, beam, config = make_model(seed, 6), 3, tiny_config(tgt_vocab_size=6)
    limits: dict[str, Any] = {"max_length": 9, "length_penalty": 0.6}
    runtime = ScriptedRuntime(model, config)
    search(runtime, SOURCES, SearchOptions(beam=beam, nbest=beam, **limits))
    steps = [naive_beam(model, source, beam=beam, **limits)[1] for source in SOURCES]
    assert len(set(steps)) > 1, "all sentences end together: this seed tests nothing"
    rows = [beam * sum(last >= step for last in steps) for step in range(1, max(steps) + 1)]
    assert runtime.rows == [rows]


@pytest.mark.parametrize("make_model", [random_model, tied_model])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 2.0])
def test_a_beam_sentence_is_done_when_nothing_can_become_the_best(
    make_model: Callable[..., Model], length_penalty: float
) -> None:
    """One output is asked for, and is the one that the search for all of them has first."""
    options: dict[str, Any] = {"beam": 3, "max_length": 9, "length_penalty": length_penalty}
    steps = []
    for seed in range(10):
        model, outputs = make_model(seed, 6), []
        for nbest in (1, 3):
            runtime = ScriptedRuntime(model, tiny_config(tgt_vocab_size=6))
            outputs.append(search(runtime, SOURCES, SearchOptions(**options, nbest=nbest)))
            steps.append(sum(runtime.rows[0]))
        assert [found[0] for found in outputs[0]] == [found[0] for found in outputs[1]]
    assert sum(steps[::2]) < sum(steps[1::2])


def test_a_greedy_sentence_leaves_the_batch_once_enough_of_them_are_done() -> None:
    sources: list[Ids] = [(5,) * length for length in (1, 2, 3, 4, 5, 6, 7, 20)]
    runtime = ScriptedRuntime(echo_model(8), tiny_config())
    found = search(runtime, sources, SearchOptions())
    assert ids_of(found) == [[(*source, EOS)] for source in sources]
    [rows] = runtime.rows
    assert len(rows) == 21
    assert rows[-1] == 1
    for step, count in enumerate(rows, start=1):
        live = sum(len(source) + 1 >= step for source in sources)
        assert live <= count
        assert live > REMOVE_FINISHED_BELOW * count


@given(
    sources=st.lists(st.lists(st.integers(3, 9), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
    beam=st.integers(1, 4),
    tied=st.booleans(),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_sentence_is_decoded_as_if_it_were_alone(
    sources: list[Ids], seed: int, beam: int, tied: bool, random: Any
) -> None:
    model = tied_model(seed, 8) if tied else random_model(seed, 8)
    options: dict[str, Any] = {"vocab": 8, "beam": beam, "nbest": beam, "max_length": 6, "max_length_ratio": 2.5}
    alone = {source: run(model, [source], **options)[0] for source in sources}
    shuffled = random.sample(sources, len(sources))
    for source, hypotheses in zip(shuffled, run(model, shuffled, **options), strict=True):
        assert [h.ids for h in hypotheses] == [h.ids for h in alone[source]]
        assert [h.score for h in hypotheses] == pytest.approx([h.score for h in alone[source]], abs=1e-9)


# --- options


@pytest.mark.parametrize("beam", [1, 3])
def test_no_sources_no_results(beam: int) -> None:
    runtime = ScriptedRuntime(random_model(0, 5), tiny_config())
    assert search(runtime, [], SearchOptions(beam=beam)) == []
    assert runtime.rows == []


@pytest.mark.parametrize("beam", [1, 3])
def test_eos_does_not_come_before_the_minimal_length(beam: int) -> None:
    wants_to_end = constant_model([0, 0, 9, 2, 1])
    [[hypothesis]] = run(wants_to_end, [(6,)], vocab=5, beam=beam, min_length=3)
    assert hypothesis.ids == (3, 3, 3, EOS)
    assert hypothesis.finished


@pytest.mark.parametrize("beam", [1, 3])
def test_the_limits_of_the_caller_the_model_and_the_source_hold_together(beam: int) -> None:
    never_ends = constant_model([0, 0, -9, 2, 1])

    def lengths(max_target_length: int = 50, **options: Any) -> list[int]:
        config = tiny_config(tgt_vocab_size=5, max_target_length=max_target_length)
        sources = [(7,) * length for length in (1, 2, 5)]
        found = search(ScriptedRuntime(never_ends, config), sources, SearchOptions(beam=beam, **options))
        assert not any(hypothesis.finished for [hypothesis] in found)
        return [len(hypothesis.ids) for [hypothesis] in found]

    assert lengths(max_length=1) == [1, 1, 1]
    assert lengths(max_length=4) == [4, 4, 4]
    assert lengths(max_length=9, max_target_length=3) == [3, 3, 3]
    assert lengths(max_length_ratio=1.5) == [2, 3, 8]
    assert lengths(max_length_ratio=0.1) == [1, 1, 1]
    assert lengths(max_length_ratio=1.5, max_length=6) == [2, 3, 6]
    assert lengths(max_length_ratio=1.5, max_target_length=3) == [2, 3, 3]
    assert lengths(max_length_ratio=1.5, min_length=6) == [2, 3, 8]


def test_a_length_ratio_is_exact_and_may_be_without_bound() -> None:
    def limits(ratio: float, *lengths: int) -> list[int]:
        config = tiny_config(max_target_length=200)
        return search_limits(SearchOptions(max_length_ratio=ratio, max_length=150), config, np.array(lengths)).tolist()

    assert limits(1.1, 50, 100, 51) == [55, 110, 57]  # in binary 50 * 1.1 is a little more than 55
    assert limits(2.2, 25, 26) == [55, 58]
    assert limits(1 / 3, 30, 31) == [10, 11]
    assert limits(1e-12, 3) == [1]
    assert limits(1e300, 1, 10) == [150, 150]
    assert limits(math.inf, 1, 10) == [150, 150]


@pytest.mark.parametrize("beam", [1, 3])
def test_eos_at_the_limit_counts_as_finished(beam: int) -> None:
    model = echo_model(9)
    for max_length, finished in ((3, True), (2, False)):
        [[hypothesis]] = run(model, [(5, 6)], vocab=9, beam=beam, max_length=max_length)
        assert (hypothesis.ids, hypothesis.finished) == ((5, 6, EOS)[:max_length], finished)


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.3])
def test_scores_are_normalised_sums_of_log_probabilities(beam: int, length_penalty: float) -> None:
    model = random_model(1, 6)
    options: dict[str, Any] = {
        "beam": beam,
        "nbest": beam,
        "length_penalty": length_penalty,
        "min_length": 2,
        "max_length": 7,
    }
    for source, hypotheses in zip(SOURCES, run(model, SOURCES, vocab=6, **options), strict=True):
        assert len(hypotheses) == beam
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
        for found in hypotheses:
            steps = [log_probs(model, source, found.ids[:i], 2)[token] for i, token in enumerate(found.ids)]
            assert found.log_prob == pytest.approx(sum(steps), abs=1e-6)
            assert found.score == pytest.approx(sum(steps) / ((5 + len(found.ids)) / 6) ** length_penalty, abs=1e-6)


def test_nbest_cuts_the_list_and_changes_nothing_else() -> None:
    model = random_model(2, 6)
    everything = run(model, SOURCES, vocab=6, beam=4, nbest=4, max_length=8)
    for nbest in (1, 2, 3):
        few = run(model, SOURCES, vocab=6, beam=4, nbest=nbest, max_length=8)
        assert few == [hypotheses[:nbest] for hypotheses in everything]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"beam": 0}, "beam is 0"),
        ({"beam": -2}, "beam is -2"),
        ({"nbest": 0}, "nbest is 0, below 1"),
        ({"nbest": 2}, "nbest 2 needs a beam of at least 2, and beam is 1"),
        ({"beam": 4, "nbest": 5}, "nbest 5 needs a beam of at least 5, and beam is 4"),
        ({"max_length": 0}, "max_length is 0"),
        ({"min_length": -1}, "min_length is -1"),
        ({"min_length": 5, "max_length": 5}, "min_length 5 is not below max_length 5"),
        ({"max_length_ratio": 0.0}, "max_length_ratio is 0.0"),
        ({"max_length_ratio": -1.0}, "max_length_ratio is -1.0"),
        ({"max_length_ratio": math.nan}, "max_length_ratio is nan"),
        ({"length_penalty": math.nan}, "length_penalty is nan"),
        ({"length_penalty": math.inf}, "length_penalty is inf"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(TfexportError, match=problem):
        SearchOptions(**options)


def test_all_wrong_options_are_named_together() -> None:
    with pytest.raises(TfexportError, match=r"beam is 0.*; max_length is -1") as caught:
        SearchOptions(beam=0, max_length=-1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("length_penalty", [1000.0, -1000.0])
def test_an_absurd_length_penalty_is_refused_or_decoded(beam: int, length_penalty: float) -> None:
    """3 ** 1000 is no float, nor is 1 / 3 ** -1000."""
    try:
        options = SearchOptions(beam=beam, length_penalty=length_penalty)
    except TfexportError:
        return
    runtime = ScriptedRuntime(echo_model(9), tiny_config())
    [[hypothesis]] = search(runtime, [(5,) * 12], options)
    assert hypothesis.ids == ((5,) * 12 + (EOS,))


# --- logits


@pytest.mark.parametrize("beam", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    "broken",
    [[math.nan] * 8, [0, 1, 2, math.nan, 4, 5, 6, 7], [0, 1, 2, 3, math.inf, 5, 6, 7], [-math.inf] * 8],
    ids=["all-nan", "one-nan", "inf", "all-minus-inf"],
)
def test_logits_that_are_not_numbers_are_an_error(broken: list[float], at: int, beam: int) -> None:
    """Whenever they come, and in whichever sentence of the batch."""

    def model(source: Ids, tokens: Ids) -> np.ndarray:
        is_broken = len(tokens) == at and len(source) == 2
        return np.array(broken if is_broken else [0, 0, -9, 3, 2, 1, 0, 0], dtype=np.float32)

    with pytest.raises(TfexportError, match="not finite numbers"):
        run(model, [(6,), (6, 6), (6, 6, 6)], vocab=8, beam=beam, max_length=5)


@pytest.mark.parametrize("beam", [1, 4])
def test_a_logit_of_minus_infinity_is_an_impossible_token(beam: int) -> None:
    model = constant_model([-math.inf, -math.inf, 0, 1, -math.inf, -math.inf])
    found = run(model, SOURCES[:2], vocab=6, beam=beam, nbest=beam, max_length=3)
    assert {token for hypotheses in found for h in hypotheses for token in h.ids} <= {EOS, 3}
    assert all(math.isfinite(h.log_prob) for hypotheses in found for h in hypotheses)


# --- the best tokens


def test_best_tokens_are_sorted_and_of_equals_the_lower_comes_first() -> None:
    logits = np.array([[1, 3, 2, 3, 1, 3], [5, 5, 5, 5, 5, 5], [0, 9, 1, 9, 2, 9]], dtype=np.float32)
    for count, wanted in (
        (1, [[1], [0], [1]]),
        (2, [[1, 3], [0, 1], [1, 3]]),
        (4, [[1, 3, 5, 2], [0, 1, 2, 3], [1, 3, 5, 4]]),
        (6, [[1, 3, 5, 2, 0, 4], [0, 1, 2, 3, 4, 5], [1, 3, 5, 4, 2, 0]]),
    ):
        assert best_from_logits(logits, count).ids.tolist() == wanted


@given(
    rows=st.lists(st.lists(st.integers(-3, 3), min_size=7, max_size=7), min_size=1, max_size=4),
    count=st.integers(1, 9),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_best_tokens_are_those_of_a_stable_sort(rows: list[list[int]], count: int) -> None:
    logits = np.array(rows, dtype=np.float32)
    best = best_from_logits(logits, count)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]  # as many as there are, where count is larger
    assert best.ids.tolist() == order.tolist()
    exact = logits.astype(np.float64)
    log_probs = exact - np.logaddexp.reduce(exact, axis=1, keepdims=True)
    assert best.log_probs.dtype == np.float64
    np.testing.assert_allclose(best.log_probs, np.take_along_axis(log_probs, order, axis=1), atol=1e-6)


def test_log_probabilities_neither_overflow_nor_vanish() -> None:
    best = best_from_logits(np.array([[30000.0, 29999.0, -30000.0], [-3e38, 0.0, -math.inf]], dtype=np.float32), 3)
    assert best.ids.tolist() == [[0, 1, 2], [1, 0, 2]]
    assert best.log_probs[0] == pytest.approx([-0.313262, -1.313262, -60000.313262], abs=1e-5)
    assert best.log_probs[1].tolist() == [0.0, pytest.approx(-3e38), -math.inf]


@pytest.mark.parametrize(
    "broken",
    [[math.nan, 1, 2, 3], [3, 2, 1, math.nan], [0, math.inf, 0, 0], [math.inf, -math.inf, 0, 0], [-math.inf] * 4],
)
def test_best_tokens_of_what_cannot_be_sorted_are_refused_by_the_search(broken: list[float]) -> None:
    logits = np.array([[4, 3, 2, 1], broken], dtype=np.float32)
    best = best_from_logits(logits, 2)
    assert best.ids.shape == best.log_probs.shape == (2, 2)
    assert np.isnan(best.log_probs[1]).all()
    with pytest.raises(TfexportError, match="not finite numbers"):
        run(lambda source, tokens: logits[source[0] - 5], [(5,), (6,)], vocab=4)


def candidates(*ids: int) -> Best:
    """One row: these tokens, of log-probabilities -1, -2, ..."""
    return Best(-np.arange(1, len(ids) + 1, dtype=np.float32)[None], np.array([ids]))


def shown(best: Best) -> list[tuple[int, float]]:
    return list(zip(best.ids[0].tolist(), best.log_probs[0].tolist(), strict=True))


def test_an_early_eos_is_taken_out_and_the_others_keep_their_order_and_log_probabilities() -> None:
    assert shown(candidates(5, EOS, 7, 8).without([EOS], 3, eos=EOS)) == [(5, -1), (7, -3), (8, -4)]
    assert shown(candidates(EOS, 5, 7, 8).without([EOS], 3, eos=EOS)) == [(5, -2), (7, -3), (8, -4)]
    assert shown(candidates(5, 7, 8, EOS).without([EOS], 3, eos=EOS)) == [(5, -1), (7, -2), (8, -3)]


def test_where_eos_is_no_candidate_the_one_too_many_goes() -> None:
    assert shown(candidates(5, 6, 7, 8).without([EOS], 3, eos=EOS)) == [(5, -1), (6, -2), (7, -3)]


def test_eos_stays_once_the_minimal_length_is_reached() -> None:
    for best in (candidates(5, EOS, 7), candidates(5, EOS, 7, 8)):
        assert shown(best.without([], 3, eos=EOS)) == [(5, -1), (EOS, -2), (7, -3)]


def test_of_a_vocabulary_smaller_than_the_beam_an_early_eos_comes_last_and_is_impossible() -> None:
    found = shown(candidates(1, EOS, 0).without([EOS], 6, eos=EOS))
    assert found == [(1, -1), (0, -3), (EOS, -math.inf)]


def test_an_early_eos_is_taken_out_of_each_row_by_itself() -> None:
    rows = [candidates(5, EOS, 7), candidates(5, 6, 7), candidates(EOS, 6, 7)]
    best = Best(np.concatenate([row.log_probs for row in rows]), np.concatenate([row.ids for row in rows]))
    assert best.without([EOS], 2, eos=EOS).ids.tolist() == [[5, 7], [5, 6], [6, 7]]


@pytest.mark.parametrize("beam", [1, 3])
def test_a_suppressed_token_is_never_said(beam: int) -> None:
    runtime = ScriptedRuntime(random_model(0, 7), tiny_config(tgt_vocab_size=7))
    options = SearchOptions(beam=beam, min_length=3, max_length=8)
    (plain,) = search(runtime, [[4]], options)
    word = next(token for token in plain[0].ids if token != EOS)
    silenced = ScriptedRuntime(random_model(0, 7), tiny_config(tgt_vocab_size=7, suppressed_ids=(word,)))
    (found,) = search(silenced, [[4]], options)
    assert all(word not in hypothesis.ids for hypothesis in found)


@pytest.mark.parametrize("beam", [1, 3])
def test_a_forced_first_token_is_said_and_costs_nothing(beam: int) -> None:
    config = tiny_config(tgt_vocab_size=7, forced_first_id=5)
    (found,) = search(
        ScriptedRuntime(random_model(0, 7), config), [[4]], SearchOptions(beam=beam, nbest=beam, max_length=8)
    )
    assert len(found) == beam
    assert all(hypothesis.ids[0] == 5 for hypothesis in found)
    first = SearchOptions(beam=beam, max_length=1)
    assert search(ScriptedRuntime(random_model(0, 7), config), [[4]], first)[0][0].log_prob == 0.0


# --- helpers and the fake itself


def test_pad() -> None:
    ids, lengths = pad([(5, 6), (7,), (8, 9, 4)], 1)
    assert ids.tolist() == [[5, 6, 1], [7, 1, 1], [8, 9, 4]]
    assert lengths.tolist() == [2, 1, 3]
    assert ids.dtype == lengths.dtype == np.int64


def test_the_scripted_runtime_refuses_what_a_real_one_would_get_wrong() -> None:
    runtime = ScriptedRuntime(random_model(0, 5), tiny_config())

    def fresh() -> Any:
        return runtime.encode(*pad([(5,), (6, 7)], 0), beam=2)

    misuses: dict[str, Callable[[], object]] = {
        "mix sentences": lambda: fresh().select(np.array([0, 2, 1, 3])),
        "already stepped": lambda: [runtime.step(state, np.full(4, BOS)) for state in [fresh()] * 2],
    }
    for message, misuse in misuses.items():
        with pytest.raises(AssertionError, match=message):
            misuse()
    assert fresh().select(np.array([3, 2])).sources == [(6, 7)]
