"""PyTorch in buffers that stay in place, eager and compiled, on the CPU: the same numbers as the plain reference."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.peers import pytorch_in_place
from benchmarks.peers.pytorch_in_place import InPlaceRuntime, StaticDecoder, StaticState
from makers.ort_bundles import CONFIG, random_model, random_sources
from makers.tiny import BOS, MAX_LENGTH, PAD, SRC_VOCAB, TGT_VOCAB
from tfexport.bundle.reader import open_bundle
from tfexport.contract import BEST_TOKENS, Precision
from tfexport.errors import TfexportError
from tfexport.runtimes.buckets import Buckets
from tfexport.runtimes.outputs import best_from_logits
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, pad, search

RANDOM = np.random.default_rng(0)
SOURCES = [RANDOM.integers(4, SRC_VOCAB, length).tolist() for length in (7, 1, 20, 3, 12, 5, 9, 2)]
SMALL_CACHES = Buckets((4, 8, MAX_LENGTH))
SMALL_SHAPES = Buckets((4, 8, MAX_LENGTH), batch=(1, 2, 4, 8), src=(8, 16, MAX_LENGTH))
"""As for compiled code: with empty places among the rows and behind the sources."""

Make = Callable[..., InPlaceRuntime]


@pytest.fixture
def reference(tiny_bundle: Path) -> TorchRuntime:
    return TorchRuntime.from_bundle(open_bundle(tiny_bundle))


@pytest.fixture
def static(tiny_bundle: Path) -> Make:
    """Makes the runtime that a GPU has, on the CPU."""

    def make(precision: Precision = "float32", **options: Any) -> InPlaceRuntime:
        model = TorchRuntime.from_bundle(open_bundle(tiny_bundle), precision=precision)._model
        return InPlaceRuntime(model, StaticDecoder(model, **options))

    return make


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be compiled runs as it is: seconds instead of minutes, in the same buffers."""
    monkeypatch.setattr(pytorch_in_place, "compile_for_graphs", lambda function: function)


def random_targets(rows: int, length: int) -> np.ndarray:
    targets = np.random.default_rng(1).integers(4, TGT_VOCAB, (rows, length))
    targets[:, 0] = BOS
    return targets


def addresses(state: StaticState) -> list[int]:
    return [tensor.data_ptr() for tensor in state._cache.tensors]


@pytest.mark.parametrize("buckets", [None, SMALL_CACHES, SMALL_SHAPES])
def test_steps_to_the_full_length_equal_the_forward_without_a_cache(
    static: Make, reference: TorchRuntime, buckets: Buckets | None
) -> None:
    """With small caches this crosses their growth twice; five sentences leave three places of a batch of 8 empty."""
    runtime = static(buckets=buckets)
    src_ids, src_len = pad(SOURCES[:5], PAD)
    targets = random_targets(5, MAX_LENGTH)
    wanted = reference.teacher_forced(src_ids, src_len, targets)
    state = runtime.encode(src_ids, src_len)
    for position in range(MAX_LENGTH):
        logits, state = runtime.step(state, targets[:, position])
        assert np.abs(logits - wanted[:, position]).max() < 1e-5
    if buckets:
        with pytest.raises(TfexportError, match="a translation of 21 tokens"):
            runtime.step(state, targets[:, 0])


@pytest.mark.parametrize(
    "changes",
    [
        {"n_encoder_heads": 2},
        {"n_encoder_heads": 4, "positions": "relative", "max_distance": 3},
        {"positions": "none", "norm": "rms", "final_norm": True, "final_norm_in": "decoder"},
    ],
    ids=str,
)
def test_models_of_other_kinds_find_what_the_reference_finds(changes: dict[str, Any]) -> None:
    model = random_model(CONFIG.replace(max_target_length=MAX_LENGTH, **changes))
    static = InPlaceRuntime(model, StaticDecoder(model, buckets=SMALL_SHAPES))
    for options in (SearchOptions(), SearchOptions(beam=4, nbest=4)):
        sources = random_sources(CONFIG, (7, 1, 20, 3, 12))
        wanted, found = (search(runtime, sources, options) for runtime in (TorchRuntime(model), static))
        assert [[h.ids for h in row] for row in found] == [[h.ids for h in row] for row in wanted]


@pytest.mark.parametrize("buckets", [SMALL_CACHES, SMALL_SHAPES])
@pytest.mark.parametrize("beam", [1, 3])
def test_selected_rows_continue_the_rows_they_name(
    static: Make, reference: TorchRuntime, beam: int, buckets: Buckets
) -> None:
    """Beams are reordered, sentences dropped with and without a smaller batch for the rest, and the cache grows."""
    runtime = static(buckets=buckets)
    src_ids, src_len = pad(SOURCES[:4], PAD)
    targets = random_targets(4 * beam, 12)
    state = runtime.encode(src_ids, src_len, beam=beam)
    history = np.zeros((4 * beam, 0), dtype=np.int64)
    sentence = np.repeat(np.arange(4), beam)
    reversed_beams = np.arange(4 * beam).reshape(4, beam)[:, ::-1].ravel()
    selections = {
        2: reversed_beams,  # twice in a row: the two sets of buffers take turns
        3: reversed_beams,
        5: np.concatenate([np.arange(beam), np.full(beam, 2 * beam), np.arange(3 * beam, 4 * beam)]),  # three stay
        6: np.concatenate([np.arange(beam, 2 * beam)[::-1], np.arange(2 * beam, 3 * beam)]),  # then two
        8: np.arange(beam),
    }
    for position in range(12):
        tokens = targets[: state.rows, position]
        logits, state = runtime.step(state, tokens)
        history = np.concatenate([history, tokens[:, None]], axis=1)
        wanted = reference.teacher_forced(src_ids[sentence], src_len[sentence], history)[:, -1]
        assert np.abs(logits - wanted).max() < 1e-5
        if position in selections:
            rows = selections[position]
            state, history, sentence = state.select(rows), history[rows], sentence[rows]
            assert state.rows == len(rows)
            kept = sentence[::beam]
            expected = reference.encode(src_ids[kept], src_len[kept]).cross
            assert all(np.abs(one - other).max() < 1e-5 for one, other in zip(state.cross, expected, strict=True))


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("buckets", [None, SMALL_CACHES, SMALL_SHAPES])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("options", [SearchOptions(), SearchOptions(beam=4, nbest=4), SearchOptions(min_length=9)])
def test_searches_find_what_the_reference_finds(
    static: Make, reference: TorchRuntime, options: SearchOptions, on_device: bool, buckets: Buckets | None
) -> None:
    runtime = static(buckets=buckets, best_on_device=on_device)
    for batch in (SOURCES, SOURCES[3:6], SOURCES[:1]):
        found, wanted = search(runtime, batch, options), search(reference, batch, options)
        assert [[h.ids for h in hypotheses] for hypotheses in found] == [[h.ids for h in hs] for hs in wanted]
        scores = [[h.score for h in hypotheses] for hypotheses in found]
        assert scores == [pytest.approx([h.score for h in hs], abs=1e-5) for hs in wanted]


def test_a_step_writes_in_place_and_only_a_reorder_moves_the_cache(static: Make) -> None:
    runtime = static(buckets=SMALL_SHAPES)
    state = runtime.encode(*pad(SOURCES[:3], PAD), beam=2)
    assert isinstance(state, StaticState)
    first = addresses(state)
    for filled in range(1, 4):
        _, state = runtime.step(state, np.full(6, 5))
        state = state.select(np.arange(6))
        assert addresses(state) == first
        slots = state._cache.tensors[0].any(dim=(0, 1, 3))
        assert slots.tolist() == [slot < filled for slot in range(4)]
    state = state.select(np.array([1, 0, 2, 2, 5, 4]))
    second = addresses(state)
    assert not set(first) & set(second)
    state = state.select(np.array([1, 0, 2, 2, 5, 4]))
    assert addresses(state) == first


@pytest.mark.usefixtures("uncompiled")
def test_compiled_code_meets_its_buffers_again(static: Make, reference: TorchRuntime) -> None:
    """Whatever the last batch left in them."""
    runtime = static(compiled=True, buckets=SMALL_SHAPES)
    options = SearchOptions(beam=3)
    wanted = [hypotheses[0].ids for hypotheses in search(reference, SOURCES, options)]

    def pooled() -> set[int]:
        return {tensor.data_ptr() for _, tensors in runtime.decoder.pool._free for tensor in tensors}

    search(runtime, SOURCES, options)
    known = pooled()
    assert known
    for _, tensors in runtime.decoder.pool._free:
        for tensor in tensors:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 3)
    assert [hypotheses[0].ids for hypotheses in search(runtime, SOURCES, options)] == wanted
    assert pooled() == known


@pytest.mark.usefixtures("uncompiled")
def test_compiled_code_changes_to_much_smaller_batches_only(static: Make, reference: TorchRuntime) -> None:
    runtime = static(compiled=True)
    src_ids, src_len = pad(SOURCES, PAD)
    state = runtime.encode(src_ids, src_len)
    left = np.arange(8)
    for rows, places in (([1, 2, 5], 8), ([0, 2], 2), ([1], 2)):
        state, left = state.select(np.array(rows)), left[rows]
        assert isinstance(state, StaticState)
        assert (state.rows, len(state._tokens)) == (len(rows), places)
    logits, _ = runtime.step(state, np.array([BOS]))
    assert np.abs(logits - reference.teacher_forced(src_ids[left], src_len[left], np.array([[BOS]]))[:, 0]).max() < 1e-5


@pytest.mark.usefixtures("uncompiled")
def test_batches_on_their_way_share_no_buffers(static: Make, reference: TorchRuntime) -> None:
    runtime = static(compiled=True)
    batches = [pad([source], PAD) for source in (SOURCES[0], SOURCES[4])]
    states = [runtime.encode(*batch) for batch in batches]
    for batch, state in zip(batches, states, strict=True):
        logits, _ = runtime.step(state, np.array([BOS]))
        assert np.abs(logits - reference.teacher_forced(*batch, np.array([[BOS]]))[:, 0]).max() < 1e-5


@pytest.mark.parametrize(("precision", "error"), [("float16", 0.02), ("bfloat16", 0.2)])
def test_half_precision_is_near_the_reference(
    static: Make, reference: TorchRuntime, precision: Precision, error: float
) -> None:
    runtime = static(precision)
    assert (runtime.precision, reference.precision) == (precision, "float32")
    src_ids, src_len = pad(SOURCES, PAD)
    targets = random_targets(len(SOURCES), 12)
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


@pytest.mark.parametrize("count", [1, 9, BEST_TOKENS, BEST_TOKENS + 3, 2 * TGT_VOCAB])
def test_best_tokens_are_those_of_the_logits(static: Make, reference: TorchRuntime, count: int) -> None:
    src_ids, src_len = pad(SOURCES, PAD)
    tokens = np.full(len(SOURCES), BOS)
    logits, _ = reference.step(reference.encode(src_ids, src_len), tokens)
    wanted = best_from_logits(logits, count)
    for runtime, tolerance in ((reference, 0.0), (static(), 1e-5), (static(best_on_device=True), 1e-5)):
        best, _ = runtime.best(runtime.encode(src_ids, src_len), tokens, count)
        assert np.array_equal(best.ids, wanted.ids)
        assert np.abs(best.log_probs - wanted.log_probs).max() <= tolerance


def test_of_a_step_only_the_best_tokens_leave_the_device(static: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = static(best_on_device=True)
    decoder = runtime.decoder
    state = runtime.encode(*pad(SOURCES[:2], PAD))
    left: list[tuple[int, ...]] = []
    to_host = decoder.to_host

    def noted(*tensors: Tensor) -> list[Any]:
        left.extend(tuple(tensor.shape) for tensor in tensors)
        return to_host(*tensors)

    monkeypatch.setattr(decoder, "to_host", noted)
    runtime.best(state, np.array([BOS, BOS]), 9)
    assert left == [(2, BEST_TOKENS), (2, BEST_TOKENS)]


@pytest.mark.thorough
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
def test_compiled_code_finds_the_same_tokens_and_writes_only_to_fixed_addresses(
    static: Make, reference: TorchRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch runs code without CUDA graphs when it writes to an input whose address may change, and says nothing."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    moving: list[list[int]] = []

    def inner(graph: Any, inputs: list[Tensor], **options: Any) -> Any:
        moving.append(sorted(set(range(len(inputs))) - set(options["static_input_idxs"])))
        return compile_fx_inner(graph, inputs, **options)

    def spied(function: Any, *, mode: str, **options: Any) -> Any:
        assert mode == "reduce-overhead"
        return compiler(
            function, backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner), **options
        )

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", spied)
    # A graph from a cache would not be compiled, and so not be seen.
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", False)
    buckets = Buckets((8, MAX_LENGTH), batch=(4,), src=(MAX_LENGTH,))
    runtime = static(compiled=True, best_on_device=True, buckets=buckets)
    options = SearchOptions(beam=2, nbest=2)
    for batch in (SOURCES[:4], SOURCES[5:]):
        found, wanted = search(runtime, batch, options), search(reference, batch, options)
        assert [[h.ids for h in hypotheses] for hypotheses in found] == [[h.ids for h in hs] for hs in wanted]
    assert moving == [[]] * 5  # the encoder, and step and reorder with each of two caches
