"""What hypotheses attended to, through every reorder of a beam, and what follows from it for their scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import ATTENTION_HEADS, ATTENTION_LAYERS, EOS, Ids, ScriptedRuntime, attention_of, random_model, tiny_config
from ort_bundles import CONFIG, random_sources, reference_of, with_end, write_bundle
from ort_bundles import random_model as random_transformer

from tfexport.bundle.reader import Bundle
from tfexport.decoding.attention_maps import attention_maps
from tfexport.decoding.attention_trace import coverage
from tfexport.decoding.search import Hypothesis, SearchOptions, search
from tfexport.errors import BundleError, RuntimeUnavailable, TfexportError
from tfexport.models.transformer import Transformer
from tfexport.runtimes.base import FloatArray
from tfexport.runtimes.ort import ort_cpu_portable
from tfexport.runtimes.ort_cpu.load import ort_cpu
from tfexport.runtimes.ort_cpu.runtime import OrtCpuRuntime
from tfexport.runtimes.pytorch import TorchRuntime

FAKE = tiny_config(tgt_vocab_size=7, n_decoder_layers=ATTENTION_LAYERS, n_heads=ATTENTION_HEADS, d_model=6)
SOURCES: list[Ids] = [(5, 6, EOS), (7, EOS), (5, 6, 7, 8, EOS), (9, 5, 9, EOS), (6,)]
LENGTHS = [7, 1, 20, 3, 12, 5, 9, 2, 17, 8]

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"beam": 3, "nbest": 3},
    "wide beam": {"beam": 6, "nbest": 6},
    "samples": {"samples": 3, "seed": 4},
    "narrowing beam": {"beam": 4, "nbest": 4, "profile": "marian", "length_penalty": 0.0},
    "beam that ends at the limit": {"beam": 3, "nbest": 3, "profile": "hf", "max_length": 4},
    "beam with rules": {"beam": 3, "nbest": 3, "no_repeat_ngram": 2, "min_length": 2},
}


# --- whose attention it is


@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize("name", SEARCHES)
def test_hypotheses_keep_what_they_attended_to(name: str, layer: int) -> None:
    """Attention is a function of a sentence and its tokens here: another row's would be another one."""
    for seed in range(3):
        options = SearchOptions(**{"max_length": 7, **SEARCHES[name]}, attention=True, alignment_layer=layer)
        found = search(ScriptedRuntime(random_model(seed, 7), FAKE), SOURCES, options)
        plain = search(
            ScriptedRuntime(random_model(seed, 7), FAKE),
            SOURCES,
            SearchOptions(**{**vars(options), "attention": False}),
        )
        assert found == plain
        for source, hypotheses in zip(SOURCES, found, strict=True):
            for hypothesis in hypotheses:
                wanted = [
                    attention_of(source, hypothesis.ids[:t])[layer].mean(axis=0) for t in range(len(hypothesis.ids))
                ]
                np.testing.assert_allclose(hypothesis.attention, wanted, atol=1e-6)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return with_end(random_transformer(CONFIG.replace(output_bias=True, max_target_length=40), seed=8), 1.5)


@pytest.fixture(scope="module")
def bundle(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(model, tmp_path_factory.mktemp("bundle"), ("float32", "int8"), alignments=True)


def by_pytorch(model: Transformer, source: list[int], hypothesis: Hypothesis, layer: int) -> FloatArray:
    """Of the whole model over the whole output."""
    with torch.inference_mode():
        tokens = torch.tensor([[model.config.bos_id, *hypothesis.ids[:-1]]])
        _, maps = model.forward_with_attention(torch.tensor([source]), torch.tensor([len(source)]), tokens)
    return maps[layer][0].mean(dim=0).numpy()


MAKE: dict[str, Callable[[Bundle], Any]] = {
    "ort-cpu": lambda bundle: ort_cpu(bundle, threads=1),
    "portable": lambda bundle: ort_cpu_portable(bundle, threads=1),
    "torch": reference_of,
}


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("name", MAKE)
def test_real_runtimes_tell_what_pytorch_computes(bundle: Bundle, model: Transformer, name: str, beam: int) -> None:
    sources = random_sources(CONFIG, LENGTHS)
    for layer in (0, 1):
        options = SearchOptions(beam=beam, nbest=beam, attention=True, alignment_layer=layer)
        found = search(MAKE[name](bundle), sources, options)
        lengths = {len(hypothesis.ids) for hypotheses in found for hypothesis in hypotheses}
        assert len(lengths) > 3  # sentences left the batch at different times
        for source, hypotheses in zip(sources, found, strict=True):
            for hypothesis in hypotheses:
                np.testing.assert_allclose(
                    hypothesis.attention, by_pytorch(model, source, hypothesis, layer), atol=1e-4
                )


def test_so_does_int8_with_its_own_weights(bundle: Bundle, model: Transformer) -> None:
    """Each row adds up to 1, and is near PyTorch's."""
    sources = random_sources(CONFIG, LENGTHS)
    found = search(ort_cpu(bundle, precision="int8", threads=1), sources, SearchOptions(beam=4, attention=True))
    for source, (hypothesis, *_) in zip(sources, found, strict=True):
        assert hypothesis.attention is not None
        np.testing.assert_allclose(hypothesis.attention.sum(axis=1), 1, atol=1e-5)
        np.testing.assert_allclose(hypothesis.attention, by_pytorch(model, source, hypothesis, -1), atol=0.1)


@pytest.mark.parametrize("name", MAKE)
def test_maps_of_forced_outputs_are_pytorchs(bundle: Bundle, model: Transformer, name: str) -> None:
    source, target = [5, 6, 7, 8, 9], (4, 9, 4, 30, 3)
    maps = attention_maps(MAKE[name](bundle), source, target)
    assert maps.shape == (2, 3, 5, 5)
    with torch.inference_mode():
        tokens = torch.tensor([[CONFIG.bos_id, *target[:-1]]])
        _, wanted = model.forward_with_attention(torch.tensor([source]), torch.tensor([5]), tokens)
    np.testing.assert_allclose(maps, torch.cat(wanted).numpy(), atol=1e-4)


def test_a_search_that_does_not_ask_runs_the_plain_graphs(bundle: Bundle) -> None:
    runtime = ort_cpu(bundle, threads=1)
    assert isinstance(runtime, OrtCpuRuntime)
    for beam, plain in ((1, "decoder_step"), (3, "beam_step")):
        search(runtime, [[5, 6]], SearchOptions(beam=beam))
        assert plain in runtime.context._sessions
        assert f"{plain}_attention" not in runtime.context._sessions
        assert runtime.prepare(SearchOptions(beam=beam, attention=True))
        assert f"{plain}_attention" in runtime.context._sessions


def test_who_cannot_tell_it_says_so(model: Transformer, bundle: Bundle, tmp_path: Path) -> None:
    plain = write_bundle(model, tmp_path / "plain")
    for make in (ort_cpu, ort_cpu_portable):
        with pytest.raises(BundleError, match="Export again with --alignments"):
            search(make(plain, threads=1), [[5]], SearchOptions(attention=True))
    portable: Any = ort_cpu_portable(bundle, threads=1)
    object.__setattr__(portable.graphs.device, "name", "cuda")
    with pytest.raises(RuntimeUnavailable, match="ort-cuda does not tell what outputs attend to"):
        search(portable, [[5]], SearchOptions(attention=True))
    for layer in (2, -3):
        with pytest.raises(TfexportError, match=rf"no decoder layer {layer}: this model has 2\. Give 0 to 1"):
            search(TorchRuntime(model), [[5]], SearchOptions(attention=True, alignment_layer=layer))


# --- the coverage penalty


def test_coverage_is_what_the_paper_says() -> None:
    """Wu et al. 2016, section 7: sum over i of log(min(sum over j of p_ij, 1)), i of the source and j of the output."""
    random = np.random.default_rng(0)
    for _ in range(50):
        length, src = random.integers(1, 9, 2)
        attention = random.dirichlet(np.full(src, 0.3), length)
        wanted = sum(math.log(min(sum(attention[j][i] for j in range(length)), 1.0)) for i in range(src))
        assert coverage(attention) == pytest.approx(wanted, abs=1e-9)
    assert coverage(np.eye(4)) == 0  # each source token had all of one token's attention
    assert coverage(np.array([[1.0, 0.0], [1.0, 0.0]])) == 0  # log 0 is left out, as in CTranslate2
    assert coverage(np.full((4, 2), 0.5)) == 0  # more than 1 is no better than 1


@pytest.mark.parametrize("beta", [0.2, 3.0])
def test_a_wide_beam_finds_the_best_of_all_outputs(beta: float) -> None:
    """Scored one by one, by the definition."""
    config = FAKE.replace(tgt_vocab_size=5)
    options = SearchOptions(beam=100, nbest=100, max_length=3, coverage_penalty=beta, attention=True)
    without = SearchOptions(beam=100, nbest=100, max_length=3)
    changed = 0
    for seed, source in itertools.product(range(4), SOURCES):
        logits = random_model(seed, 5)
        wanted: list[tuple[float, Ids]] = []
        for length in (1, 2, 3):
            for ids in itertools.product(range(5), repeat=length):
                if EOS in ids[:-1] or (length < 3 and ids[-1] != EOS):
                    continue
                total, sums = 0.0, np.zeros(len(source))
                for t, token in enumerate(ids):
                    row = logits(source, ids[:t]).astype(np.float64)
                    total += row[token] - np.logaddexp.reduce(row)
                    sums += attention_of(source, ids[:t])[-1].mean(axis=0)
                cp = beta * sum(math.log(min(covered, 1.0)) for covered in sums)
                wanted.append((total / ((5 + length) / 6) ** 0.6 + cp, ids))
        wanted.sort(reverse=True)
        [found] = search(ScriptedRuntime(logits, config), [source], options)
        assert [hypothesis.ids for hypothesis in found] == [ids for _, ids in wanted[: len(found)]]
        assert [hypothesis.score for hypothesis in found] == pytest.approx([score for score, _ in wanted[: len(found)]])
        [plain] = search(ScriptedRuntime(logits, config), [source], without)
        changed += plain[0].ids != found[0].ids
    assert changed > 1  # it decides


@pytest.mark.parametrize("name", SEARCHES)
def test_scores_are_those_without_it_and_the_penalty(name: str) -> None:
    options = SearchOptions(**{"max_length": 7, **SEARCHES[name]}, attention=True, coverage_penalty=0.7)
    for hypotheses in search(ScriptedRuntime(random_model(1, 7), FAKE), SOURCES, options):
        for hypothesis in hypotheses:
            assert hypothesis.attention is not None
            plain = options.normalise(hypothesis.log_prob, len(hypothesis.ids))
            assert hypothesis.score == pytest.approx(plain + 0.7 * coverage(hypothesis.attention))
        if not options.samples:
            assert sorted(hypotheses, key=lambda h: -h.score) == hypotheses


def test_attention_is_told_only_to_who_asks() -> None:
    [[found]] = search(ScriptedRuntime(random_model(1, 7), FAKE), SOURCES[:1], SearchOptions(coverage_penalty=0.2))
    assert found.attention is None


@pytest.mark.parametrize("beta", [-0.1, math.inf, math.nan])
def test_a_penalty_that_is_none_is_refused(beta: float) -> None:
    with pytest.raises(TfexportError, match="coverage_penalty is"):
        SearchOptions(coverage_penalty=beta)
