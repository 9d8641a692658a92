"""PyTorch in buffers that stay in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.peers import pytorch_in_place
from benchmarks.peers.pytorch_in_place import InPlaceRuntime, StaticDecoder
from tests.support.fakes import tiny_config
from tfexport.models.transformer import Transformer
from tfexport.runtimes.outputs import best_from_logits
from tfexport.runtimes.pytorch import TorchRuntime


def test_a_small_vocabulary_is_ranked_whole() -> None:
    model = Transformer(tiny_config(src_vocab_size=9, tgt_vocab_size=9))
    runtime = InPlaceRuntime(model, StaticDecoder(model, best_on_device=True))
    batch = np.array([[4, 5]]), np.array([2])
    best, _ = runtime.best(runtime.encode(*batch), np.array([1]), 12)
    logits, _ = TorchRuntime(model).step(TorchRuntime(model).encode(*batch), np.array([1]))
    assert np.array_equal(best.ids, best_from_logits(logits, 12).ids)


def test_a_pool_forgets_what_was_longest_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch_in_place, "MOST_FREE", 2)
    pool = pytorch_in_place.BufferPool(torch.device("cpu"), compiled=True)
    for size in (1, 2, 3):
        pool.take(((size,), torch.int64))
    assert [specs[0][0] for specs, _ in pool._free] == [(2,), (3,)]
    eager = pytorch_in_place.BufferPool(torch.device("cpu"), compiled=False)
    eager.take(((1,), torch.int64))
    assert eager._free == []


def test_what_a_pool_keeps_goes_before_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pytorch_in_place.BufferPool(torch.device("cpu"), compiled=True)
    pool.take(((1,), torch.int64))
    empty = torch.empty

    def full(*arguments: Any, **options: Any) -> Tensor:
        if pool._free:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", full)
    assert [tuple(tensor.shape) for tensor in pool.take(((2,), torch.int64), ((3,), torch.int64)).tensors] == [
        (2,),
        (3,),
    ]
