"""The runtimes on the CPU: one protocol, one result; the cache is written in place, grows, and follows its rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from makers.tiny import BOS, SRC_VOCAB, TGT_VOCAB
from tfexport.bundle.reader import open_bundle
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.runtimes import load_runtime
from tfexport.runtimes.device import host_array
from tfexport.runtimes.ort import ort_cpu_portable
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, pad, search

RANDOM = np.random.default_rng(0)
SOURCES = [RANDOM.integers(4, SRC_VOCAB, length).tolist() for length in (7, 1, 20, 3, 12, 5, 9, 2)]


@pytest.fixture(params=["ort-cpu", "portable", "torch"])
def runtime(request: pytest.FixtureRequest, tiny_bundle: Path) -> Any:
    bundle = open_bundle(tiny_bundle)
    if request.param == "portable":
        return ort_cpu_portable(bundle, threads=1)
    return load_runtime(request.param, bundle, threads=1)


@pytest.fixture
def reference(tiny_bundle: Path) -> TorchRuntime:
    return TorchRuntime.from_bundle(open_bundle(tiny_bundle))


def random_targets(rows: int, length: int) -> np.ndarray:
    targets = np.random.default_rng(1).integers(4, TGT_VOCAB, (rows, length))
    targets[:, 0] = BOS
    return targets


def test_steps_to_the_full_length_equal_the_forward_without_a_cache(runtime: Any, reference: TorchRuntime) -> None:
    """20 steps: the caches on ONNX Runtime start at 16 slots, so this crosses their growth."""
    src_ids, src_len = pad(SOURCES, 1)
    targets = random_targets(len(SOURCES), 20)
    wanted = reference.teacher_forced(src_ids, src_len, targets)
    state = runtime.encode(src_ids, src_len)
    for position in range(20):
        logits, state = runtime.step(state, targets[:, position])
        assert np.abs(logits - wanted[:, position]).max() < 1e-5


@pytest.mark.parametrize("beam", [1, 3])
def test_selected_rows_continue_the_rows_they_name(runtime: Any, reference: TorchRuntime, beam: int) -> None:
    """Beams are reordered and sentences dropped at once, in the middle of a target and again after it."""
    src_ids, src_len = pad(SOURCES[:4], 1)
    targets = random_targets(4 * beam, 9)
    state = runtime.encode(src_ids, src_len, beam=beam)
    history = np.zeros((4 * beam, 0), dtype=np.int64)
    sentence = np.repeat(np.arange(4), beam)
    for position in range(9):
        tokens = targets[: state.rows, position]
        logits, state = runtime.step(state, tokens)
        history = np.concatenate([history, tokens[:, None]], axis=1)
        wanted = reference.teacher_forced(src_ids[sentence], src_len[sentence], history)[:, -1]
        assert np.abs(logits - wanted).max() < 1e-5
        rows = None
        if position in (2, 3):  # twice in a row: the two buffer sets take turns
            rows = np.concatenate([np.arange(s * beam, (s + 1) * beam)[::-1] for s in range(4)])
        if position == 5:
            rows = np.concatenate([np.full(beam, 3 * beam), np.arange(beam)])  # sentences 3 and 0 stay
        if rows is not None:
            state, history, sentence = state.select(rows), history[rows], sentence[rows]
            assert state.rows == len(rows)


def cache_of(state: Any) -> np.ndarray:
    """The keys and values of all layers [blocks, rows, heads, cache, head_dim], as they lie in memory."""
    return host_array(state._cache["all"])


def test_cache_is_written_in_place(tiny_bundle: Path) -> None:
    runtime = ort_cpu_portable(open_bundle(tiny_bundle), threads=1)
    src_ids, src_len = pad(SOURCES[:2], 1)
    state = runtime.encode(src_ids, src_len)
    cache = state._cache["all"]
    before = cache_of(state).copy()
    assert not before.any()
    for step in range(3):
        _, state = runtime.step(state, np.array([BOS, BOS]))
        assert state._cache["all"] == cache  # the same address, too
        found = cache_of(state)
        changed = (found != before).any(axis=(2, 4))  # [blocks, rows, cache]
        assert changed.tolist() == np.broadcast_to(np.arange(found.shape[3]) == step, changed.shape).tolist()
        before = found.copy()


def test_garbage_in_unused_slots_changes_nothing(tiny_bundle: Path) -> None:
    runtime = ort_cpu_portable(open_bundle(tiny_bundle), threads=1)
    src_ids, src_len = pad(SOURCES[:2], 1)
    results = []
    for garbage in (0.0, 1e6):
        state = runtime.encode(src_ids, src_len)
        cache_of(state)[:] = garbage
        results.append([runtime.step(state, np.array([BOS, 5]))[0].copy() for _ in range(4)])
    assert np.array_equal(*results)


def test_what_an_earlier_batch_left_in_memory_changes_nothing(tiny_bundle: Path) -> None:
    """Memory is used again, and a NaN would poison sums even where a mask hides it."""
    runtime = ort_cpu_portable(open_bundle(tiny_bundle), threads=1)
    src_ids, src_len = pad(SOURCES[:2], 1)
    results, addresses = [], []
    for _ in range(2):
        state = runtime.encode(src_ids, src_len)
        addresses.append(state._cache["all"].address)
        results.append([runtime.step(state, np.array([BOS, 5]))[0].copy() for _ in range(18)])  # over the growth
        cache_of(state)[:] = np.nan
        host_array(state._sources.cross["all"])[:] = np.nan
        del state
    assert np.array_equal(*results)
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize("beam", [1, 4])
def test_a_sentence_decodes_the_same_alone_shuffled_and_padded(runtime: Any, beam: int) -> None:
    options = SearchOptions(beam=beam, nbest=beam)
    alone = [search(runtime, [source], options)[0] for source in SOURCES]
    for order in (range(8), [5, 2, 7, 0, 1, 6, 4, 3], [2, 1]):
        together = search(runtime, [SOURCES[index] for index in order], options)
        for index, hypotheses in zip(order, together, strict=True):
            assert [h.ids for h in hypotheses] == [h.ids for h in alone[index]]
            assert [h.score for h in hypotheses] == pytest.approx([h.score for h in alone[index]], abs=1e-5)


def test_padding_may_be_anything(runtime: Any) -> None:
    src_ids, src_len = pad(SOURCES[:3], 1)
    other = src_ids.copy()
    other[np.arange(src_ids.shape[1]) >= src_len[:, None]] = 30
    states = [runtime.encode(ids, src_len) for ids in (src_ids, other)]
    logits = [runtime.step(state, np.full(3, BOS))[0].copy() for state in states]
    assert np.array_equal(*logits)


def test_unknown_runtime_names_those_there_are(tiny_bundle: Path) -> None:
    with pytest.raises(RuntimeUnavailable, match="Use one of: ort-cpu, ort-cuda, tensorrt, torch, torch-cuda"):
        load_runtime("ort-gpu", open_bundle(tiny_bundle))


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("ort-cpu", "ort_cpu.load", "cpu"),
        ("ort-cuda", "ort", "cuda"),
        ("tensorrt", "tensorrt", "tensorrt-rtx"),
        ("torch", "pytorch", "export"),
        ("torch-cuda", "pytorch", "export"),
    ],
)
def test_missing_library_names_the_extra_that_brings_it(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, f"tfexport.runtimes.{module}", None)
    with pytest.raises(RuntimeUnavailable, match=rf"pip install 'tfexport\[{extra}\]'"):
        load_runtime(name, open_bundle(tiny_bundle))


def test_weights_that_are_not_numbers_are_an_error_not_a_translation(tiny_bundle: Path) -> None:
    runtime = TorchRuntime.from_bundle(open_bundle(tiny_bundle))
    with torch.no_grad():
        runtime._model.encoder.layers[0].norms[0].weight[0] = torch.nan
    with pytest.raises(TfexportError, match="not finite"):
        search(runtime, SOURCES, SearchOptions())
