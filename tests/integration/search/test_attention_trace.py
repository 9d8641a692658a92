"""What hypotheses attended to, by runtimes on bundles: what PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from makers.ort_bundles import CONFIG, random_sources, reference_of, with_end, write_bundle
from makers.ort_bundles import random_model as random_transformer
from tfexport.bundle.reader import Bundle
from tfexport.decoding.attention_maps import attention_maps
from tfexport.errors import BundleError, RuntimeUnavailable, TfexportError
from tfexport.models.transformer import Transformer
from tfexport.runtimes.ort import ort_cpu_portable
from tfexport.runtimes.ort_cpu.load import ort_cpu
from tfexport.runtimes.ort_cpu.runtime import OrtCpuRuntime
from tfexport.runtimes.outputs import FloatArray
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import Hypothesis, SearchOptions, search

LENGTHS = [7, 1, 20, 3, 12, 5, 9, 2, 17, 8]


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


@pytest.mark.sampled(every=2)
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
        runtime.prepare(SearchOptions(beam=beam, attention=True).needs)
        assert f"{plain}_attention" in runtime.context._sessions


def test_who_cannot_tell_it_says_so(model: Transformer, bundle: Bundle, tmp_path: Path) -> None:
    plain = write_bundle(model, tmp_path / "plain")
    for make in (ort_cpu, ort_cpu_portable):
        with pytest.raises(BundleError, match="Export again with --alignments"):
            search(make(plain, threads=1), [[5]], SearchOptions(attention=True))
    portable: Any = ort_cpu_portable(bundle, threads=1)
    object.__setattr__(portable._graphs.device, "name", "cuda")
    with pytest.raises(RuntimeUnavailable, match="ort-cuda has no cross-attention weights"):
        search(portable, [[5]], SearchOptions(attention=True))
    for layer in (2, -3):
        with pytest.raises(TfexportError, match=rf"no decoder layer {layer}: this model has 2\. Give 0 to 1"):
            search(TorchRuntime(model), [[5]], SearchOptions(attention=True, alignment_layer=layer))
