"""A float32 model computed in float64 without a copy gives to the last bit what its copy in float64 gives."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from makers.ort_bundles import CONFIG, ONE_CHANGE, random_model
from makers.tiny import randomised
from tfexport.models.float64 import InFloat64
from tfexport.models.layers import KeyValue
from tfexport.models.model import EncoderClassifier
from tfexport.models.precision import in_precision
from tfexport.models.transformer import Transformer
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, search

RELATIVE = {"positions": "relative", "max_distance": 6}
KINDS: list[dict[str, Any]] = [
    *ONE_CHANGE,
    RELATIVE,
    {"norm": "rms"},
    {"gated": True},
    {"gated": True, "activation": "gelu"},
    {**RELATIVE, "norm": "rms", "gated": True, "d_head": 5},
    {"embedding_norm": True},
]
SRC, LENGTH, TGT = torch.tensor([[5, 6, 7], [4, 3, 1]]), torch.tensor([3, 2]), torch.tensor([[2, 3], [2, 0]])


def computed(model: Transformer) -> list[torch.Tensor]:
    """What every part of a model computes: both sides, a whole target, and one step after another."""
    source = SRC[:, : model.config.max_source_length]
    length = LENGTH.clamp(max=source.shape[1])
    target = TGT[:, : model.config.max_target_length]
    cross = model.encode(source, length)
    found = [tensor for pair in cross for tensor in pair]
    found.append(model(source, length, target))
    past = [KeyValue(*(t.to(found[0].dtype) for t in pair)) for pair in model.empty_cache(2, target.shape[1])]
    for position in range(target.shape[1]):
        index = torch.full((2,), position)
        logits, past, attention = model.step_with_attention(target[:, position], index, length, past, cross)
        found += [logits, attention, *(tensor for pair in past for tensor in pair)]
    return found


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("changes", KINDS, ids=str)
@torch.inference_mode()
def test_every_kind_of_model_gives_what_its_copy_in_float64_gives(changes: dict[str, Any]) -> None:
    model = random_model(CONFIG.replace(**changes))
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    wanted = computed(copy.deepcopy(model).double())
    with InFloat64():
        found = computed(model)
    narrow = computed(model)  # as before: nothing of it stays
    for one, exact, other in zip(found, wanted, narrow, strict=True):
        assert one.dtype == exact.dtype == torch.float64
        assert torch.equal(one, exact)
        assert other.dtype == torch.float32
    assert any(not torch.equal(one.float(), other) for one, other in zip(found, narrow, strict=True))
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@torch.inference_mode()
def test_weights_of_half_precision_are_widened_as_they_are(precision: Any) -> None:
    model = in_precision(random_model(CONFIG), precision)
    assert isinstance(model, Transformer)
    wanted = computed(copy.deepcopy(model).double())
    with InFloat64():
        found = computed(model)
    for one, exact in zip(found, wanted, strict=True):
        assert one.dtype == torch.float64
        assert torch.equal(one, exact)


@torch.inference_mode()
def test_a_classifier() -> None:
    config = CONFIG.replace(n_decoder_layers=0, tgt_vocab_size=0, max_target_length=0, n_classes=4, tie_output=False)
    model = randomised(EncoderClassifier(config))
    exact = copy.deepcopy(model).double()
    wanted = exact.head(exact.encoder(SRC, LENGTH)[:, 0])  # its logits are float32 in the end, whatever it computes in
    with InFloat64():
        found = model(SRC, LENGTH)
    assert found.dtype == torch.float64
    assert torch.equal(found, wanted)
    assert not torch.equal(found.float().double(), wanted)


def test_weights_are_widened_into_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of embeddings are not widened at all."""
    model = random_model(CONFIG.replace(tgt_vocab_size=4000, d_model=24))
    widened: list[tuple[int, ...]] = []
    places: dict[int, None] = {}
    double, copy_to = torch.Tensor.double, torch.Tensor.copy_

    def told(tensor: torch.Tensor) -> torch.Tensor:
        widened.append(tuple(tensor.shape))
        return double(tensor)

    def copied(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        widened.append(tuple(source.shape))
        places[tensor.data_ptr()] = None
        return copy_to(tensor, source)

    monkeypatch.setattr(torch.Tensor, "double", told)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    with torch.inference_mode(), InFloat64():
        model.encode(SRC, LENGTH)
    assert (24, 24) in widened
    assert len(places) == 1
    assert (31, 24) not in widened  # the source's table
    assert all(shape[-1:] != (4000,) and shape[:1] != (4000,) for shape in widened)


def test_a_runtime_decodes_in_float64_as_a_model_in_float64_does() -> None:
    model = random_model(CONFIG)
    narrow, wide = TorchRuntime(model), TorchRuntime(model).in_float64()
    ids, length = SRC.numpy(), LENGTH.numpy()
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()
        wanted = exact(SRC, LENGTH, TGT).numpy()
    assert np.array_equal(wide.teacher_forced(ids, length, TGT.numpy()), wanted)
    state = wide.encode(ids, length)
    for position in range(2):
        logits, state = wide.step(state, TGT[:, position].numpy())
        assert logits.dtype == np.float64
        np.testing.assert_allclose(logits, wanted[:, position], rtol=1e-12, atol=1e-12)  # with a cache, in float64 too
    assert narrow.teacher_forced(ids, length, TGT.numpy()).dtype == np.float32
    sources = [[5, 6, 7], [4]]
    options = SearchOptions(beam=2, max_length=6)
    assert search(wide, sources, options)[0][0].ids == search(narrow, sources, options)[0][0].ids
    assert wide.in_float32().model is model


def test_properties_of_a_matrix_do_not_widen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would cost a copy of the matrix: its type alone is asked for hundreds of times in a check."""
    matrix = torch.ones(3, 2)
    monkeypatch.setattr("tfexport.models.float64._widened", lambda value: pytest.fail("a matrix was widened"))
    with InFloat64():
        assert matrix.dtype == torch.float64
        assert matrix.shape == (3, 2)
