"""The PyTorch runtimes: states are values, half precision, and GPUs that are missing or full."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from makers.tiny import BOS, PAD, SRC_VOCAB, TGT_VOCAB
from tfexport.bundle.reader import open_bundle
from tfexport.contract import Precision
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import pad

RANDOM = np.random.default_rng(0)
SOURCES = [RANDOM.integers(4, SRC_VOCAB, length).tolist() for length in (7, 1, 20, 3, 12, 5, 9, 2)]


@pytest.fixture
def reference(tiny_bundle: Path) -> TorchRuntime:
    return TorchRuntime.from_bundle(open_bundle(tiny_bundle))


@pytest.mark.parametrize(("precision", "error"), [("float16", 0.02), ("bfloat16", 0.2)])
def test_half_precision_is_near_the_reference(
    reference: TorchRuntime, tiny_bundle: Path, precision: Precision, error: float
) -> None:
    runtime = TorchRuntime.from_bundle(open_bundle(tiny_bundle), precision=precision)
    assert (runtime.precision, reference.precision) == (precision, "float32")
    src_ids, src_len = pad(SOURCES, PAD)
    targets = np.random.default_rng(1).integers(4, TGT_VOCAB, (len(SOURCES), 12))
    targets[:, 0] = BOS
    wanted = reference.teacher_forced(src_ids, src_len, targets)
    state = runtime.encode(src_ids, src_len)
    differences = []
    for position in range(12):
        logits, state = runtime.step(state, targets[:, position])
        assert logits.dtype == np.float32
        differences.append(np.abs(logits - wanted[:, position]))
    assert np.max(differences) > 1e-5  # it is not float32 in disguise
    assert np.mean(differences) < error
    assert all(cross.dtype == np.float32 for cross in state.cross)


def test_states_of_the_reference_are_values(reference: TorchRuntime) -> None:
    state = reference.encode(*pad(SOURCES[:2], PAD))
    before = [tensor.clone() for cache in state.past for tensor in cache]
    results = [reference.step(state, np.array([BOS, 5]))[0] for _ in range(2)]
    assert np.array_equal(*results)
    assert all(torch.equal(now, then) for now, then in zip((t for c in state.past for t in c), before, strict=True))


@pytest.mark.parametrize(
    ("cuda", "raised", "message"),
    [
        (
            None,
            None,
            r"is built without CUDA. Install one with CUDA as pytorch.org says, or decode with --runtime torch\.",
        ),
        (
            "13.0",
            "Found no NVIDIA driver.\nCheck it.",
            r"cannot use .* here \(Found no NVIDIA driver\)\. Run on a machine",
        ),
    ],
)
def test_without_a_gpu_there_is_one_line_of_what_to_do(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, raised: str | None, message: str
) -> None:
    def no_gpu(*_: object, **__: object) -> Tensor:
        raise RuntimeError(raised)

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch, "zeros", no_gpu)
    with pytest.raises(RuntimeUnavailable, match=message) as caught:
        TorchRuntime.from_bundle(open_bundle(tiny_bundle), device="cuda")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_this_machine_without_a_gpu_says_so(tiny_bundle: Path) -> None:
    with pytest.raises(RuntimeUnavailable, match="--runtime torch"):
        TorchRuntime.from_bundle(open_bundle(tiny_bundle), device="cuda")


def test_a_full_gpu_is_one_line_of_what_to_do(reference: TorchRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    state = reference.encode(*pad(SOURCES[:1], PAD))

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

    monkeypatch.setattr(reference.model, "step", full)
    with pytest.raises(TfexportError, match=r"memory is full\. Decode with a smaller --batch-size"):
        reference.step(state, np.array([BOS]))
