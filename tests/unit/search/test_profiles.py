"""Search profiles against a naive search written from the documentation of fairseq, Marian and JoeyNMT: the same n-best
lists, and the same scores."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from makers.references import toolkits
from tests.support.fakes import BOS, EOS, PAD, Ids, Model, ScriptedRuntime, constant_model, random_model, tiny_config
from tests.support.searches import (
    LIMIT,
    MODELS,
    assert_same,
    found_by,
    found_by_definition,
    model_of,
    sources_of,
)
from tfexport.errors import TfexportError
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.profiles import PROFILES, ProfileName
from tfexport.search.search import SearchOptions, search


def test_the_models_end_some_outputs_and_not_others() -> None:
    """Else the searches would not be told apart."""
    options = SearchOptions.for_profile("hf", beam=4, nbest=4, max_length=LIMIT)
    hypotheses = [
        hypothesis
        for number in range(len(MODELS))
        for found in found_by(TorchRuntime(model_of(number)), sources_of(10, number), options)
        for hypothesis in found
    ]
    assert 0.3 < np.mean([hypothesis.finished for hypothesis in hypotheses]) < 0.9
    assert len({len(hypothesis.ids) for hypothesis in hypotheses if hypothesis.finished}) > 5


# --- fairseq, Marian and JoeyNMT


FAKE = tiny_config(tgt_vocab_size=7, unk_id=3)


def next_log_probs(model: Model, source: Ids) -> toolkits.NextLogProbs:
    def after(outputs: list[Ids]) -> list[list[float]]:
        logits = np.array([model(source, tokens) for tokens in outputs], np.float64)
        return (logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).tolist()

    return after


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("length_penalty", [None, 0.6, -0.5])
@pytest.mark.parametrize("beam", [1, 4, 8])
@pytest.mark.parametrize("profile", ["fairseq", "marian", "joeynmt"])
def test_others_find_what_their_documentation_says(
    profile: ProfileName, beam: int, length_penalty: float | None
) -> None:
    """200 inputs for each setting, of four models."""
    random = np.random.default_rng(8)
    config = FAKE.replace(tgt_vocab_size=19)  # more words than the widest beam, as every toolkit has
    options = SearchOptions.for_profile(profile, beam=beam, nbest=beam, max_length=6, length_penalty=length_penalty)
    for seed in range(4):
        model = cache(random_model(seed, config.tgt_vocab_size))
        sources: list[Ids] = [(*random.integers(4, 100, random.integers(1, 6)).tolist(), seed) for _ in range(50)]
        found = found_by(ScriptedRuntime(model, config), sources, options)
        wanted = [found_by_definition(profile, next_log_probs(model, source), config, options) for source in sources]
        assert_same(found, wanted)


# --- by hand


def test_fairseq_ends_with_eos_at_the_limit_of_each_sentence() -> None:
    """Whatever it costs: the limit's last token is eos, of each sentence at its own limit."""
    never_ends = constant_model([0, 0, -9, 2, 1, 0, 0])
    for beam in (1, 3):
        options = SearchOptions.for_profile("fairseq", beam=beam, nbest=beam, max_length_ratio=2.0)
        found = search(ScriptedRuntime(never_ends, FAKE), [(7,) * length for length in (1, 3, 2)], options)
        assert [len(hypotheses[0].ids) for hypotheses in found] == [2, 6, 4]
        assert all(h.finished and h.ids[-1] == EOS and EOS not in h.ids[:-1] for hs in found for h in hs)


def test_opennmt_without_a_penalty_goes_on_until_the_best_candidate_ends() -> None:
    """Two outputs end early, as the second best of their steps; the best of the third step is eos, and beats one of them.
    And it stops there, though fewer than `beam` are finished, where no more are asked for. Where one is, nothing beats the
    first one any more when the second step is done."""

    def model(source: Ids, tokens: Ids) -> np.ndarray:
        eos, three = {0: (0.4, 0.5), 1: (0.2, 0.7), 2: (0.6, 0.38)}.get(len(tokens), (0.01, 0.98))
        return np.log(np.array([0.001, 0.001, eos, three, 0.002, 0.001, 0.001], dtype=np.float32))

    def steps(**given: Any) -> tuple[list[Ids], int]:
        runtime = ScriptedRuntime(model, FAKE)
        lengths = {"min_length": 0, "length_penalty": given.pop("length_penalty", 0.0)}
        options = SearchOptions.for_profile("opennmt", **lengths, **given)
        [found] = search(runtime, [(5,)], options)
        return [hypothesis.ids for hypothesis in found], len(runtime.rows[0])

    assert steps(beam=2, nbest=2) == ([(EOS,), (3, 3, EOS)], 3)
    assert steps(beam=2, nbest=2, length_penalty=1e-9) == ([(EOS,), (3, EOS)], 2)
    assert steps(beam=4, nbest=3)[1] == 3
    assert steps(beam=4, nbest=1) == ([(EOS,)], 2)


def test_joeynmt_goes_on_behind_the_end() -> None:
    """What follows the first output's eos is likelier than all else, and keeps a second output out of the beam."""

    def model(source: Ids, tokens: Ids) -> np.ndarray:
        after_eos, eos = EOS in tokens, (0.6 if tokens == (3,) else 0.1)
        likely = (0.001, 0.94, 0.03) if after_eos else (eos, 0.96 - eos, 0.01)
        return np.log(np.array([0.001, 0.001, *likely, 0.001, 0.001], dtype=np.float32))

    def outputs(**given: Any) -> list[Ids]:
        options = SearchOptions.for_profile("joeynmt", nbest=given["beam"], max_length=5, **given)
        [found] = search(ScriptedRuntime(model, FAKE), [(5,)], options)
        return [hypothesis.ids for hypothesis in found]

    assert outputs(beam=2) == [(3, EOS), (3, 3, 3, 3, 3)]
    assert outputs(beam=3) == [(3, EOS), (3, 3, 3, 3, 3), (3, 3, EOS)]


def test_joeynmt_is_done_when_an_end_has_come_in_each_place() -> None:
    """The best candidates of steps 2 and 3 end, both in the first place; in the second one that of step 4 does."""

    def model(source: Ids, tokens: Ids) -> np.ndarray:
        before_eos = ((0.1, 0.85), (0.5, 0.45), (0.6, 0.35), (0.3, 0.65))
        eos, three = (0.14, 0.14) if EOS in tokens else before_eos[len(tokens)]
        rest = (1 - eos - three) / 5
        return np.log(np.array([rest, rest, eos, three, rest, rest, rest], dtype=np.float32))

    runtime = ScriptedRuntime(model, FAKE)
    [found] = search(runtime, [(5,)], SearchOptions.for_profile("joeynmt", beam=2, nbest=2, length_penalty=3.0))
    assert [one.ids for one in found] == [(3, EOS), (3, 3, EOS)]
    assert len(runtime.rows[0]) == 4


def test_special_tokens_that_a_toolkit_never_writes() -> None:
    likes_them = constant_model([9, 8, -1, 9, 1, 0, 0])  # pad, bos and unk
    for profile, banned in (("fairseq", PAD), ("marian", 3), ("joeynmt", PAD), ("joeynmt", BOS)):
        for beam in (1, 4):
            options = SearchOptions.for_profile(profile, beam=beam, nbest=beam, max_length=4)  # type: ignore[arg-type]
            [hypotheses] = search(ScriptedRuntime(likes_them, FAKE), [(5,)], options)
            assert hypotheses
            assert not any(banned in hypothesis.ids for hypothesis in hypotheses)


def test_what_is_not_said_is_the_profiles_own() -> None:
    for name, profile in PROFILES.items():
        options = SearchOptions.for_profile(name, beam=4, length_penalty=None, min_length=None)
        assert (options.length_penalty, options.min_length) == (profile.length_penalty, profile.min_length)
        given = SearchOptions.for_profile(name, beam=4, length_penalty=0.3, min_length=2)
        assert (given.profile, given.beam, given.length_penalty, given.min_length) == (name, 4, 0.3, 2)
    assert SearchOptions.for_profile("tfexport") == SearchOptions()
    assert SearchOptions.for_profile("fairseq", max_length=1).min_length == 0


def test_only_hf_stops_early_in_three_ways() -> None:
    with pytest.raises(TfexportError, match="early_stopping is true, which only the profile hf supports"):
        SearchOptions(early_stopping="true")
