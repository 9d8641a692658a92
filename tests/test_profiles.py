"""Search profiles against the toolkits themselves (Transformers, CTranslate2), or against a naive search written from their
documentation (fairseq, Marian, JoeyNMT): the same n-best lists, and the same scores."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import BOS, EOS, PAD, Ids, Model, ScriptedRuntime, constant_model, random_model, tiny_config
from references import toolkits
from tiny import randomised

from tfexport.config import ModelConfig
from tfexport.decoding.alignments import Replacement
from tfexport.decoding.hypothesis import SourceTokens
from tfexport.decoding.profiles import PROFILES, ProfileName
from tfexport.decoding.search import Hypothesis, SearchOptions, search
from tfexport.errors import TfexportError
from tfexport.models.transformer import Transformer
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.verification.parity import random_sources

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import converters
import hugging_face

NBest = list[tuple[Ids, float]]
LIMIT = 14
SCORES = 1e-4

CONFIG = ModelConfig(
    d_model=24,
    n_heads=3,
    d_ff=40,
    n_encoder_layers=2,
    n_decoder_layers=2,
    src_vocab_size=31,
    tgt_vocab_size=37,
    max_source_length=20,
    max_target_length=30,
    unk_id=0,
    pad_id=1,
    bos_id=2,
    eos_id=3,
    output_bias=True,
    embedding_scale=24**0.5,
)


MODELS = [(1, 2.0), (2, 2.0), (7, 1.0), (8, 3.0), (14, 2.0), (13, 2.0)]
"""Seeds, and a liking for eos with which some outputs of each end, at many lengths, and others run into the limit."""


def model_of(number: int, config: ModelConfig = CONFIG) -> Transformer:
    """One of the random models."""
    seed, end = MODELS[number % len(MODELS)]
    model = randomised(Transformer(config), seed=seed)
    assert isinstance(model, Transformer)
    assert model.output_bias is not None
    with torch.no_grad():
        model.output_bias[[CONFIG.unk_id, CONFIG.pad_id]] = -20.0  # a trained model does not emit them
        model.output_bias[CONFIG.eos_id] += end
    return model.eval()


def sources_of(count: int, number: int = 0) -> list[list[int]]:
    """Random sources without bos and eos: CTranslate2 takes one of special tokens alone for empty, and decodes nothing."""
    sources = random_sources(CONFIG, count, seed=number)
    return [[token if token > CONFIG.eos_id else token + 4 for token in source] for source in sources]


def found_by(
    runtime: Any, sources: Sequence[Sequence[int]], options: SearchOptions, batch: int = 8
) -> list[list[Hypothesis]]:
    return [
        found for at in range(0, len(sources), batch) for found in search(runtime, sources[at : at + batch], options)
    ]


def assert_same(ours: list[list[Hypothesis]], theirs: list[NBest]) -> None:
    """The same outputs in the same order, where their scores can be told apart; scores beyond 100 in six digits."""
    assert len(ours) == len(theirs)
    for found, wanted in zip(ours, theirs, strict=True):
        assert [h.score for h in found] == pytest.approx([score for _, score in wanted], abs=SCORES, rel=1e-6)
        for hypothesis, (ids, score) in zip(found, wanted, strict=True):
            near = {other for other, value in wanted if abs(value - score) <= 1e-5}
            assert hypothesis.ids in near | {ids}


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


# --- Transformers


def generated(model: Transformer, sources: Sequence[Sequence[int]], **settings: Any) -> list[NBest]:
    """What `generate` finds."""
    theirs = hugging_face.convert(model)
    beam, longest = settings["num_beams"], max(map(len, sources))
    ids = torch.tensor([[*source, *[CONFIG.pad_id] * (longest - len(source))] for source in sources])
    mask = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources])
    with torch.inference_mode():
        found = theirs.generate(
            input_ids=ids,
            attention_mask=mask,
            num_return_sequences=beam,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            **settings,
        )
    rows = [tuple(row[1:]) for row in found.sequences.tolist()]
    rows = [row[: row.index(EOS_ID) + 1] if EOS_ID in row else row for row in rows]
    if beam == 1:  # a greedy search tells no score: that of a beam of one
        steps = torch.stack(found.logits, dim=1).double().log_softmax(-1)
        A = settings.pop("length_penalty", 1.0)
        scores = [
            float(step[range(len(row)), list(row)].sum()) / len(row) ** A for step, row in zip(steps, rows, strict=True)
        ]
    else:
        scores = found.sequences_scores.tolist()
    both = list(zip(rows, scores, strict=True))
    return [both[at : at + beam] for at in range(0, len(both), beam)]


EOS_ID = CONFIG.eos_id
HF_OPTIONS: list[dict[str, Any]] = [
    {},
    {"early_stopping": "true"},
    {"early_stopping": "never", "length_penalty": 2.0},
    {"early_stopping": "never", "length_penalty": -1.0},
    {"length_penalty": 0.0, "min_length": 3},
    {"length_penalty": 1.7},
]


@pytest.mark.parametrize("beam", [1, 4, 8])
@pytest.mark.parametrize("number", range(len(HF_OPTIONS)))
def test_hf_finds_what_transformers_finds(number: int, beam: int) -> None:
    given = HF_OPTIONS[number]
    model, sources = model_of(number), sources_of(10, number)
    options = SearchOptions.for_profile("hf", beam=beam, nbest=beam, max_length=LIMIT, **given)
    theirs: dict[str, Any] = {"num_beams": beam, "max_new_tokens": LIMIT}
    if beam > 1:
        stop: Any = {"true": True, "false": False, "never": "never"}[options.early_stopping]
        theirs |= {"length_penalty": options.length_penalty, "early_stopping": stop}
    if options.min_length:
        theirs["min_new_tokens"] = options.min_length
    wanted = generated(model, sources, **theirs)
    if beam == 1:
        options = SearchOptions.for_profile("hf", max_length=LIMIT, min_length=given.get("min_length"))
    assert_same(found_by(TorchRuntime(model), sources, options), wanted)


# --- CTranslate2


CT2_OPTIONS: list[dict[str, Any]] = [
    {},
    {"length_penalty": 0.0},
    {"length_penalty": 0.0, "nbest": 1},
    {"length_penalty": 0.0, "nbest": 2},
    {"length_penalty": 0.6, "min_length": 3},
    {"length_penalty": -1.0, "nbest": 2},
]


def translated(
    model: Transformer, folder: Path, sources: Sequence[Sequence[int]], options: SearchOptions, **more: Any
) -> list[NBest]:
    """What CTranslate2 finds."""
    ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed: pip install ctranslate2")
    if not folder.exists():
        converters.write_ctranslate2(model, folder)
    translator = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    settings = {
        "beam_size": options.beam,
        "num_hypotheses": options.nbest,
        "length_penalty": options.length_penalty,
        "min_decoding_length": options.min_length,
        "max_decoding_length": options.max_length,
        "max_input_length": 0,
        "return_scores": True,
        **more,
    }
    results = translator.translate_batch([[str(token) for token in source] for source in sources], **settings)
    return [
        [
            (tuple(int(token) for token in tokens), score)
            for tokens, score in zip(result.hypotheses, result.scores, strict=True)
        ]
        for result in results
    ]


def without_eos(found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
    """As CTranslate2 gives them."""
    return [
        [Hypothesis(h.ids[:-1] if h.finished else h.ids, h.score, h.log_prob, h.finished) for h in hypotheses]
        for hypotheses in found
    ]


@pytest.mark.parametrize("beam", [1, 4, 8])
@pytest.mark.parametrize("number", range(len(CT2_OPTIONS)))
def test_opennmt_finds_what_ctranslate2_finds(number: int, beam: int, tmp_path: Path) -> None:
    given = {"nbest": beam, **CT2_OPTIONS[number]}
    given["nbest"] = min(beam, given["nbest"])
    model, sources = model_of(number), sources_of(10, number)
    options = SearchOptions.for_profile("opennmt", beam=beam, max_length=LIMIT, **given)
    wanted = translated(model, tmp_path / "ct2", sources, options)
    assert_same(without_eos(found_by(TorchRuntime(model), sources, options)), wanted)


COVERAGE: list[dict[str, Any]] = [
    {"coverage_penalty": 0.2},
    {"coverage_penalty": 0.5, "length_penalty": 0.0, "nbest": 1},
    {"coverage_penalty": 2.0, "length_penalty": 0.6},
]
ONE_BY_ONE: dict[str, Any] = {"return_attention": True, "max_batch_size": 1}
"""CTranslate2 4.8.5 ends with a segmentation fault where greedy search has a coverage penalty and attention is not asked
for; and in batches its beam search takes the first sentence's attention of the first step for that of all."""


@pytest.mark.parametrize("beam", [1, 4, 8])
@pytest.mark.parametrize("number", range(len(COVERAGE)))
def test_coverage_penalties_are_ctranslate2s(number: int, beam: int, tmp_path: Path) -> None:
    given = {"nbest": beam, **COVERAGE[number]}
    model, sources = model_of(number), sources_of(25, number)
    options = SearchOptions.for_profile("opennmt", beam=beam, max_length=LIMIT, attention=True, **given)
    more = {**ONE_BY_ONE, "coverage_penalty": options.coverage_penalty}
    wanted = translated(model, tmp_path / "ct2", sources, options, **more)
    assert_same(without_eos(found_by(TorchRuntime(model), sources, options)), wanted)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("beam", [1, 4])
def test_unknown_tokens_are_replaced_by_what_ctranslate2_replaces_them_with(
    beam: int, layer: int, tmp_path: Path
) -> None:
    model, sources = model_of(1), sources_of(50, 1)
    assert model.output_bias is not None
    with torch.no_grad():
        model.output_bias[CONFIG.unk_id] += 22.0  # it writes some
    converters.write_ctranslate2(model, tmp_path / "ct2", alignment_layer=layer)
    options = SearchOptions.for_profile("opennmt", beam=beam, max_length=LIMIT, attention=True, alignment_layer=layer)
    wanted = translated(model, tmp_path / "ct2", sources, options, replace_unknowns=True, **ONE_BY_ONE)
    found = found_by(TorchRuntime(model), sources, options)
    replacement, replaced = Replacement(CONFIG.unk_id), set()
    for source, [hypothesis], [(theirs, _)] in zip(sources, found, wanted, strict=True):
        assert hypothesis.attention is not None
        words = replacement.words(hypothesis.ids, hypothesis.attention, SourceTokens.of(source, CONFIG, None))
        ours = [int(words.get(place, index)) for place, index in enumerate(hypothesis.ids)]
        assert tuple(ours[: len(theirs)]) == theirs
        replaced |= {(len(source), place, word) for place, word in words.items()}
    assert len(replaced) > 30


# --- fairseq, Marian and JoeyNMT


FAKE = tiny_config(tgt_vocab_size=7, unk_id=3)


def next_log_probs(model: Model, source: Ids) -> toolkits.NextLogProbs:
    def after(tokens: Ids) -> list[float]:
        logits = model(source, tokens).astype(np.float64)
        return list(logits - np.logaddexp.reduce(logits))

    return after


def torch_log_probs(model: Transformer, source: Ids) -> toolkits.NextLogProbs:
    """Of the whole model, run anew for every prefix."""

    def after(tokens: Ids) -> list[float]:
        with torch.inference_mode():
            ids = torch.tensor([[CONFIG.bos_id, *tokens]])
            logits = model(torch.tensor([source]), torch.tensor([len(source)]), ids)
        return logits[0, -1].double().log_softmax(-1).tolist()

    return after


def naive(
    profile: ProfileName, after: toolkits.NextLogProbs, config: ModelConfig, options: SearchOptions
) -> toolkits.NBest:
    beam, limit, penalty = options.beam, options.max_length, options.length_penalty
    if profile == "fairseq":
        return toolkits.fairseq(
            after,
            eos=config.eos_id,
            pad=config.pad_id,
            beam=beam,
            max_len=limit - 1,
            lenpen=penalty,
        )
    if profile == "joeynmt":
        never = {config.bos_id, config.pad_id}
        found = toolkits.joeynmt(
            after, eos=config.eos_id, never=never, beam=beam, max_output_length=limit, beam_alpha=penalty
        )
        return found[: options.nbest]
    return toolkits.marian(after, eos=config.eos_id, unk=config.unk_id, beam=beam, max_length=limit, normalize=penalty)


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
        wanted = [naive(profile, next_log_probs(model, source), config, options) for source in sources]
        assert_same(found, wanted)


SMALL = CONFIG.replace(n_encoder_layers=1, n_decoder_layers=1)


@pytest.mark.parametrize("beam", [1, 4, 8])
@pytest.mark.parametrize("profile", ["fairseq", "marian", "joeynmt"])
def test_so_they_do_with_real_models(profile: ProfileName, beam: int) -> None:
    """200 inputs for each setting, of four models."""
    options = SearchOptions.for_profile(profile, beam=beam, nbest=beam, max_length=5)
    best = set()
    for number in (0, 1, 4, 5):
        model, sources = model_of(number, SMALL), sources_of(50, number)
        wanted = [naive(profile, torch_log_probs(model, source), CONFIG, options) for source in sources]
        assert_same(found_by(TorchRuntime(model), sources, options, batch=25), wanted)
        best |= {found[0][0] for found in wanted}
    assert len(best) > 5
    assert {ids[-1] == EOS_ID for ids in best} == ({True} if profile == "fairseq" else {True, False})


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
        options = SearchOptions.for_profile("opennmt", length_penalty=given.pop("length_penalty", 0.0), **given)
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
    with pytest.raises(TfexportError, match="early_stopping is true, which only the profile hf has"):
        SearchOptions(early_stopping="true")
