"""Phrases are met where the limit has room for them, whatever the model, the profile and the batch."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from tests.support.constrained import has_all
from tests.support.fakes import EOS, Ids, Model, ScriptedRuntime, constant_model, echo_model, random_model, tiny_config
from tfexport.errors import TfexportError
from tfexport.runtimes.outputs import FloatArray
from tfexport.search.hypothesis import Phrase, Source
from tfexport.search.options import ConstraintOrder
from tfexport.search.phrase_rules import Glued, PhraseRules
from tfexport.search.profiles import ProfileName
from tfexport.search.search import Hypothesis, SearchOptions, search
from tfexport.text.word_parts import WordParts

pytestmark = pytest.mark.filterwarnings("error")
VOCAB = 24
PROFILES = get_args(ProfileName)


def phrases(*several: Ids) -> tuple[Phrase, ...]:
    return tuple(Phrase(ids, str(ids)) for ids in several)


def run(model: Model, sources: list[Source], **given: Any) -> list[list[Hypothesis]]:
    options = SearchOptions.for_profile(given.pop("profile", "tfexport"), **given)
    return search(ScriptedRuntime(model, tiny_config(tgt_vocab_size=VOCAB, unk_id=3)), sources, options)


def random_sources(random: np.random.Generator, count: int) -> list[Source]:
    sources = []
    for _ in range(count):
        required = [tuple(random.integers(4, 9, random.integers(1, 4)).tolist()) for _ in range(random.integers(0, 6))]
        ids = tuple(random.integers(4, 100, random.integers(1, 6)).tolist())
        sources.append(Source(ids, required=phrases(*required)))
    return sources


def ends_now_and_then(seed: int) -> Model:
    inner = random_model(seed, VOCAB, spread=3.0)

    def logits(source: Ids, tokens: Ids) -> FloatArray:
        row = inner(source, tokens)
        row[EOS] += 0.3 * len(tokens)
        return row

    return logits


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("order", ["ordered", "unordered"])
@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("profile", PROFILES)
def test_phrases_are_met_where_there_is_room(profile: ProfileName, beam: int, order: str) -> None:
    random = np.random.default_rng([beam, PROFILES.index(profile), order == "ordered"])
    n_met = n_missing = 0
    for limit in (4, 7, 9, 11, 14, 17):
        sources, seed = random_sources(random, 12), limit
        found = run(
            ends_now_and_then(seed),
            sources,
            profile=profile,
            beam=beam,
            nbest=beam,
            max_length=limit,
            constraint_order=order,
        )
        room = limit - (profile in ("fairseq", "hf"))  # an eos, or the start token
        for source, hypotheses in zip(sources, found, strict=True):
            required = [phrase.ids for phrase in source.required]
            assert hypotheses
            if sum(map(len, required)) <= room:
                assert all(has_all(one.ids, required, order) for one in hypotheses)  # type: ignore[arg-type]
                assert not any(one.missing for one in hypotheses)
                n_met += bool(required)
            else:
                assert all(one.missing for one in hypotheses)
                n_missing += 1
    assert n_met > 10
    assert n_missing > 2


@pytest.mark.parametrize("beam", [1, 4])
def test_a_sentence_is_searched_as_it_is_alone(beam: int) -> None:
    random = np.random.default_rng(3)
    sources = random_sources(random, 12)
    assert 0 < sum(not source.required for source in sources) < 12
    model = ends_now_and_then(5)
    for given in ({}, {"profile": "fairseq"}, {"profile": "marian"}, {"no_repeat_ngram": 3}):
        settings = {"beam": beam, "nbest": beam, "max_length": 16, **given}
        together = run(model, sources, **settings)
        assert together == [run(model, [source], **settings)[0] for source in sources]
        plain = [Source(source.ids) for source in sources if not source.required]
        wanted = run(model, plain, **settings)
        assert [one for one, source in zip(together, sources, strict=True) if not source.required] == wanted


def test_what_the_model_says_anyway_has_the_score_of_a_plain_beam_search() -> None:
    source = Source((5, 6, 7, EOS))
    [plain] = run(echo_model(VOCAB), [source], beam=4)
    [required] = run(echo_model(VOCAB), [Source(source.ids, required=phrases((6, 7)))], beam=4)
    assert required[0].ids == plain[0].ids
    assert required[0].score == pytest.approx(plain[0].score)


def test_phrases_that_a_rule_forbids_are_told() -> None:
    """And do not keep a sentence from its end."""
    source = Source((5,), required=phrases((6,), (7, 8)), forbidden=phrases((9, 9)))
    for given in ({"suppress": (7,)}, {"bad_words": ((9,), (7, 8))}):
        [found] = run(ends_now_and_then(1), [source], beam=3, nbest=3, max_length=40, **given)
        assert [one.missing for one in found] == [phrases((7, 8))] * 3
        assert all(6 in one.ids and one.finished and len(one.ids) < 30 for one in found)
    [[best]] = run(ends_now_and_then(1), [Source((5,), required=phrases((1, 9, 9)), forbidden=phrases((9, 9)))], beam=2)
    assert best.missing == phrases((1, 9, 9))


@pytest.mark.parametrize(
    ("required", "missing", "given"),
    [
        (phrases((6,), (7, 9)), phrases((7, 9)), {"end_tokens": (9,)}),
        (phrases((7, 8), (6,), (7, 8)), phrases((7, 8)), {"no_repeat_ngram": 2}),
        (phrases((6,), (7, 8, 7)), phrases((7, 8, 7)), {"no_repeat_ngram": 1}),
        (phrases((7, 8, 7), (6,), (9,)), phrases((7, 8, 7)), {"no_repeat_ngram": 1}),
        (phrases((6,), (7, 8)), phrases((7, 8)), {"encoder_no_repeat_ngram": 2}),
    ],
)
def test_phrases_that_can_never_come_are_left_out(
    required: tuple[Phrase, ...], missing: tuple[Phrase, ...], given: dict[str, Any]
) -> None:
    source = Source((5, 7, 8), required=required)
    orders: tuple[ConstraintOrder, ...] = ("unordered", "ordered")
    for order in orders:
        [[best]] = run(ends_now_and_then(1), [source], beam=4, max_length=50, constraint_order=order, **given)
        assert best.missing == missing
        assert best.finished
        assert len(best.ids) < 30


def test_a_phrase_may_have_hundreds_of_tokens() -> None:
    """What is kept from outputs grows with its tokens, not with all sequences in it."""
    long = tuple(range(4, 20)) * 200
    required = (Phrase(long, "x", is_whole=True), Phrase((*long, 20), "y", is_whole=True))
    parts = WordParts(continuing=(20, 21, VOCAB + 3))
    glued = Glued.of(Source((5,), required=required, word_parts=parts), VOCAB)
    assert glued is not None
    for past, banned in ((long, {21}), ((*long, 20), {20, 21}), (long[1:], set())):
        allowed = np.ones(VOCAB, dtype=bool)
        glued.ban(allowed, [*past])
        assert {*np.flatnonzero(~allowed).tolist()} == banned
    rules = PhraseRules([Source((5,), required=required, forbidden=phrases((6, 5), (4,) * 3))], VOCAB)
    assert not rules.forbid(long, 0)
    assert rules.forbid((*long, 6, 5), 0)


def test_without_room_outputs_are_as_far_as_they_can_be() -> None:
    source = Source((5,), required=phrases((6,), (7, 8), (9, 9)))
    [found] = run(
        ends_now_and_then(1), [source], beam=3, nbest=3, max_length=3, profile="fairseq", constraint_order="unordered"
    )
    assert found
    assert all(len(one.missing) == 2 and one.finished for one in found)


def test_a_search_that_is_stuck_ends_without_its_phrases() -> None:
    """A model that only knows eos, and one whose tokens are used up by a rule."""
    only_eos = constant_model([-np.inf] * EOS + [0.0] + [-np.inf] * (VOCAB - EOS - 1))
    [found] = run(only_eos, [Source((5,), required=phrases((6,)))], beam=2)
    assert [(one.ids, one.missing) for one in found] == [((EOS,), phrases((6,)))]
    few = constant_model([-np.inf] * EOS + [0.0, 1.0] + [-np.inf] * (VOCAB - EOS - 2))
    [found] = run(few, [Source((5,), required=phrases((6,)))], beam=2, no_repeat_ngram=1)
    assert [(one.ids, one.missing) for one in found] == [((3, EOS), phrases((6,)))]


def test_a_prefix_may_have_phrases_already() -> None:
    source = Source((5,), prefix=(6, 7, 8), required=phrases((7, 8), (9,)))
    for profile in PROFILES:
        [[best]] = run(ends_now_and_then(2), [source], profile=profile, beam=3, max_length=12)
        assert best.ids[:3] == (6, 7, 8)
        assert best.ids.count(9) >= 1
        assert not best.missing


def test_words_beyond_a_shortlist_come_where_they_are_required() -> None:
    source = Source((5,), candidates=np.array([10, 11, 12]), required=phrases((6, 7)))
    [[best]] = run(ends_now_and_then(2), [source], beam=3, max_length=8)
    assert (6, 7) in zip(best.ids, best.ids[1:], strict=False)
    assert {*best.ids} <= {6, 7, 10, 11, 12, EOS}


def test_forbidden_phrases_never_come() -> None:
    likes = constant_model([0, 0, 1, 0, 5, 5, *[0] * (VOCAB - 6)])
    sources = [Source((5,), forbidden=phrases((4,), (5, 5))), Source((5,)), Source((6,), forbidden=phrases((5,)))]
    for given in ({}, {"beam": 3}, {"samples": 2}, {"beam": 2, "alternatives": 2}):
        first, second, third = run(likes, sources, max_length=8, **given)
        assert all(4 not in one.ids and (5, 5) not in zip(one.ids, one.ids[1:], strict=False) for one in first)
        assert any({4, 5} & {*one.ids} for one in second)
        assert all(5 not in one.ids for one in third)


def test_sampling_and_alternatives_have_no_phrases() -> None:
    source = Source((5,), required=phrases((6,)))
    for given in ({"samples": 2}, {"beam": 2, "alternatives": 2}):
        with pytest.raises(TfexportError, match="Leave out"):
            run(ends_now_and_then(1), [source, Source((5,))], **given)


def test_a_sentence_goes_on_while_any_bank_may_have_a_better_output() -> None:
    """An output with the phrase at its beginning ends early. That of an emptier bank ends later, and is likelier."""
    likely = {
        (): {7: -0.1, 6: -5.0, 8: -8.0},
        (6,): {6: 0.0},
        (6, 6): {EOS: 0.0},
        (7,): {8: 0.0},
        (7, 8): {9: 0.0},
        (7, 8, 9): {6: 0.0},
        (7, 8, 9, 6): {6: 0.0},
        (7, 8, 9, 6, 6): {EOS: 0.0},
    }

    def logits(source: Ids, tokens: Ids) -> FloatArray:
        row = np.full(VOCAB, -30.0, dtype=np.float32)
        for token, value in likely.get(tokens, {10: 0.0}).items():
            row[token] = value
        return row

    for profile in ("tfexport", "hf"):
        [found] = run(
            logits,
            [Source((5,), required=phrases((6, 6)))],
            profile=profile,
            beam=3,
            nbest=1,
            max_length=12,
            length_penalty=0.0,
        )
        assert found[0].ids == (7, 8, 9, 6, 6, EOS)


@pytest.mark.parametrize("beam", [1, 4])
def test_whole_phrases_are_no_parts_of_longer_words(beam: int) -> None:
    """Every token but 10 and 11 continues a word, or has its word go on."""
    parts = WordParts(continuing=tuple(range(12, VOCAB)), unfinished=(4, 5))
    required = (Phrase((6,), "x", is_whole=True), Phrase((7, 8), "y", is_whole=True))
    n_glued = 0
    for seed in range(8):
        whole = Source((5, seed), required=required, word_parts=parts)
        loose = Source(
            (5, seed), required=tuple(phrase._replace(is_whole=False) for phrase in required), word_parts=parts
        )
        for source in (whole, loose):
            [[best]] = run(ends_now_and_then(seed), [source], beam=beam, max_length=16)
            assert not best.missing
            triples = [*zip((0, *best.ids), best.ids, best.ids[1:], strict=False)]
            is_glued = any(
                (last >= 12 and (two == 6 or (one, two) == (7, 8))) or (two in (4, 5) and last in (6, 7))
                for one, two, last in triples
            )
            assert not (source is whole and is_glued)
            n_glued += is_glued
    assert n_glued > 3
    signs = tuple(Phrase(ids, "+", is_whole=True) for ids, *_ in required)
    assert Glued.of(Source((5,), required=signs, word_parts=parts), VOCAB) is None


def test_a_phrase_may_have_another_with_more_in_it() -> None:
    parts = WordParts(continuing=(12, 13))
    required = (Phrase((6,), "New", is_whole=True), Phrase((6, 12), "Newton", is_whole=True))
    [[best]] = run(ends_now_and_then(3), [Source((5,), required=required, word_parts=parts)], beam=4, max_length=12)
    assert not best.missing
    assert (6, 12, 12) not in zip(best.ids, best.ids[1:], best.ids[2:], strict=False)
