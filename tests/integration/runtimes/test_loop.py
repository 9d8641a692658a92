"""The decoding loop with a GPU's buckets and a GPU's lateness, over ONNX Runtime sessions of the very graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from makers.tiny import BOS, MAX_LENGTH, SRC_VOCAB, TGT_VOCAB
from tests.support.fake_cuda import FakeCudart, use
from tfexport.bundle.reader import open_bundle
from tfexport.errors import TfexportError
from tfexport.runtimes.buckets import Buckets, cpu_buckets
from tfexport.runtimes.device import Call, DeviceTensor, HostDevice
from tfexport.runtimes.loop import LoopRuntime
from tfexport.runtimes.ort import OrtGraphs, ort_cpu_portable
from tfexport.runtimes.outputs import best_from_logits
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.runtimes.workspace import Executable, HostSearch
from tfexport.search.search import SearchOptions, pad, search

RANDOM = np.random.default_rng(4)
SOURCES = [RANDOM.integers(4, SRC_VOCAB, length).tolist() for length in (7, 1, 20, 3, 12, 5, 9, 2, 17, 4, 6)]
BUCKETS = Buckets((4, 8, 20), (1, 2, 4, 8, 16), (8, 16, 20), remedy="Ask for less.")


class LateExecutable:
    """A graph whose work goes to the stream of a fake GPU; counts how often it was bound and run."""

    def __init__(self, inner: Executable, gpu: FakeCudart):
        self._inner, self._gpu = inner, gpu
        self.bound: list[Mapping[str, DeviceTensor]] = []
        self.runs = 0

    def bind(self, tensors: Mapping[str, DeviceTensor], *, record: bool = True) -> Call:
        self.bound.append(tensors)
        call = self._inner.bind(tensors)

        def enqueue() -> None:
            self.runs += 1
            self._gpu.enqueue(call)

        return enqueue


class LateGraphs(HostSearch):
    """The graphs of a bundle on a fake GPU; the step for a cache is asked for by its size."""

    precision = "float32"

    def __init__(self, directory: Path, gpu: FakeCudart, buckets: Buckets):
        from tfexport.runtimes.cuda import CudaDevice

        inner = OrtGraphs(open_bundle(directory), "float32", HostDevice(), "onnx24", cpu_buckets(MAX_LENGTH), threads=1)
        self.device, self.buckets, self._inner, self._gpu = CudaDevice(), buckets, inner, gpu
        self.encoder = LateExecutable(inner.encoder, gpu)
        self.select_rows = LateExecutable(inner.select_rows, gpu)
        self.telling: dict[int, LateExecutable] = {}
        self.steps = {cache: LateExecutable(inner.step(cache), gpu) for cache in buckets.cache}

    def step(self, cache: int, *, attention: bool = False) -> LateExecutable:
        if attention and cache not in self.telling:
            self.telling[cache] = LateExecutable(self._inner.step(cache, attention=True), self._gpu)
        return (self.telling if attention else self.steps)[cache]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    return use(FakeCudart(), monkeypatch)


@pytest.fixture
def graphs(tiny_bundle: Path, gpu: FakeCudart) -> LateGraphs:
    return LateGraphs(tiny_bundle, gpu, BUCKETS)


@pytest.fixture
def runtime(tiny_bundle: Path, graphs: LateGraphs) -> LoopRuntime:
    return LoopRuntime("late", open_bundle(tiny_bundle).config, graphs)


@pytest.fixture
def reference(tiny_bundle: Path) -> TorchRuntime:
    return TorchRuntime.from_bundle(open_bundle(tiny_bundle))


@pytest.mark.parametrize("beam", [1, 2, 3, 9])
@pytest.mark.parametrize("min_length", [0, 3])
def test_searches_find_what_they_find_on_the_cpu(
    runtime: LoopRuntime, tiny_bundle: Path, beam: int, min_length: int
) -> None:
    """Twice: the second time over memory and bindings of the first. A beam of 9 asks for more than the graph tells."""
    options = SearchOptions(beam=beam, nbest=beam, min_length=min_length)
    wanted = search(ort_cpu_portable(open_bundle(tiny_bundle), threads=1), SOURCES, options)
    for _ in range(2):
        found = search(runtime, SOURCES, options)
        assert [[h.ids for h in hypotheses] for hypotheses in found] == [
            [h.ids for h in hypotheses] for hypotheses in wanted
        ]
        for one, other in zip(found, wanted, strict=True):
            assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-5)


@pytest.mark.parametrize("beam", [1, 3])
def test_attention_is_that_of_the_rows_of_the_search(aligned_bundle: Path, gpu: FakeCudart, beam: int) -> None:
    """Not of empty places, nor of source ids that only fill a bucket."""
    bundle, options = open_bundle(aligned_bundle), SearchOptions(beam=beam, nbest=beam, attention=True)
    runtime = LoopRuntime("late", bundle.config, LateGraphs(aligned_bundle, gpu, BUCKETS))
    wanted = search(TorchRuntime.from_bundle(bundle), SOURCES, options)
    for one, other in zip(search(runtime, SOURCES, options), wanted, strict=True):
        for hypothesis, reference in zip(one, other, strict=True):
            assert hypothesis.ids == reference.ids
            assert hypothesis.attention is not None
            np.testing.assert_allclose(hypothesis.attention, reference.attention, atol=1e-5)


def test_all_buckets_of_the_cache_are_used_and_all_shapes_come_from_buckets(
    runtime: LoopRuntime, graphs: LateGraphs
) -> None:
    search(runtime, SOURCES, SearchOptions(beam=3, min_length=18))
    assert all(step.runs for step in graphs.steps.values())
    for cache, step in graphs.steps.items():
        for tensors in step.bound:
            rows, _, slots, _ = tensors["past.0.key"].shape
            assert slots == cache
            assert tensors["past.0.key"] == tensors["present.0.key"]
            batch, _, src, _ = tensors["cross.0.key"].shape
            assert batch in (1, 2, 4, 8, 16)
            assert (rows, src) == (3 * batch, 20)
            assert tensors["tokens"].shape == tensors["position"].shape == (rows,)


def test_an_identity_moves_nothing_and_reorders_take_turns(
    runtime: LoopRuntime, graphs: LateGraphs, gpu: FakeCudart
) -> None:
    src_ids, src_len = pad(SOURCES[:2], 1)
    state = runtime.encode(src_ids, src_len, beam=2)
    addresses = []
    for rows in ([0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 2, 3], [0, 0, 3, 2]):  # the cache has 4 slots
        state = state.select(np.array(rows))
        before = graphs.select_rows.runs
        _, state = runtime.best(state, np.full(4, BOS), 4)
        assert graphs.select_rows.runs == before + (rows != [0, 1, 2, 3])
        addresses.append(state._cache["all"].address)
    assert len(set(addresses)) == 2
    assert addresses[0] == addresses[3] != addresses[1] == addresses[2]


def test_a_step_copies_once_each_way(runtime: LoopRuntime, gpu: FakeCudart) -> None:
    state = runtime.encode(*pad(SOURCES[:2], 1), beam=2)
    assert gpu.copies == {"to_device": 1, "to_host": 0}
    for step in range(1, 4):
        _, state = runtime.best(state, np.full(4, BOS), 4)
        state = state.select(np.array([1, 0, 3, 2]))
        assert gpu.copies == {"to_device": 1 + step, "to_host": step}


def test_done_sentences_leave_their_places_empty_until_half_is_done(
    runtime: LoopRuntime, graphs: LateGraphs, reference: TorchRuntime
) -> None:
    """Eight sentences, of which 7, 6, 5 and then 4 go on: only the last makes a smaller batch of it."""
    src_ids, src_len = pad(SOURCES[:8], 1)
    targets = np.random.default_rng(1).integers(4, TGT_VOCAB, (8, 12))
    targets[:, 0] = BOS
    state = runtime.encode(src_ids, src_len)
    live = np.arange(8)
    physical = []
    for position in range(12):
        logits, state = runtime.step(state, targets[live, position])
        wanted = reference.teacher_forced(src_ids[live], src_len[live], targets[live, : position + 1])[:, -1]
        assert np.abs(logits - wanted).max() < 1e-5
        if position in (1, 2, 4, 6):
            kept = np.delete(np.arange(len(live)), (3 * position) % len(live))
            state, live = state.select(kept), live[kept]
            assert state.rows == len(live)
        physical.append(state._batch)
    assert physical == [8] * 6 + [4] * 6
    assert [len(cross) for cross in state.cross] == [4] * len(state.cross)


def test_cross_keys_and_values_are_the_sentences_own(runtime: LoopRuntime, reference: TorchRuntime) -> None:
    src_ids, src_len = pad(SOURCES[:5], 1)
    wanted = reference.encode(src_ids, src_len).cross
    state = runtime.encode(src_ids, src_len, beam=2)
    real = np.arange(src_ids.shape[1]) < src_len[:, None]
    for _ in range(2):
        for one, other in zip(state.cross, wanted, strict=True):
            assert one.shape == other.shape
            assert np.abs(one.swapaxes(1, 2)[real] - other.swapaxes(1, 2)[real]).max() < 1e-5
        kept = np.array([0, 1, 4, 5, 8, 9])  # sentences 0, 2 and 4
        state = state.select(kept)
        wanted, real = [tensor[[0, 2, 4]] for tensor in wanted], real[[0, 2, 4]]
        break
    for one, other in zip(state.cross, wanted, strict=True):
        assert np.abs(one.swapaxes(1, 2)[real] - other.swapaxes(1, 2)[real]).max() < 1e-5


def test_nothing_is_allocated_bound_or_waited_for_twice_in_a_step(
    runtime: LoopRuntime, graphs: LateGraphs, gpu: FakeCudart
) -> None:
    src_ids, src_len = pad(SOURCES[:4], 1)
    for _ in range(2):  # the second batch meets the memory and the bindings of the first
        state = runtime.encode(src_ids, src_len, beam=2)
        tokens, order = np.full(8, 5), np.array([1, 0, 3, 2, 4, 5, 6, 7])
        for _ in range(11):  # a reorder is done with the next step
            _, state = runtime.best(state, tokens, 5)
            state = state.select(order)
        warm = dict(gpu.counts), sum(len(step.bound) for step in graphs.steps.values()), len(graphs.select_rows.bound)
        for step in range(1, 6):
            _, state = runtime.best(state, tokens, 5)
            state = state.select(order)
            now = dict(gpu.counts), sum(len(s.bound) for s in graphs.steps.values()), len(graphs.select_rows.bound)
            assert now == ({**warm[0], "wait": warm[0]["wait"] + step}, *warm[1:])


def test_batches_that_came_between_change_no_binding(runtime: LoopRuntime, graphs: LateGraphs) -> None:
    """Each binding is a recorded graph, and is made for the addresses."""

    def decode(count: int, beam: int) -> None:
        state = runtime.encode(*pad(SOURCES[:count], 1), beam=beam)
        for step in range(5):
            _, state = runtime.best(state, np.full(state.rows, 5), 4)
            if step == 2:
                state = state.select(np.arange(beam))  # one sentence is left

    batches = [(8, 1), (4, 2), (2, 4), (8, 2), (1, 3)]  # the same rows for different sentences
    for batch in batches:
        decode(*batch)
    bound = [len(step.bound) for step in graphs.steps.values()]
    for batch in (*reversed(batches), *batches):
        decode(*batch)
    assert [len(step.bound) for step in graphs.steps.values()] == bound


def test_batches_under_way_at_once_keep_to_bindings_of_their_own(runtime: LoopRuntime, graphs: LateGraphs) -> None:
    """Else each pair of their buffers would be bound, and recorded, some day."""
    order = np.array([1, 0, 3, 2])

    def decode(*turns: int) -> None:
        states = [runtime.encode(*pad(SOURCES[:2], 1), beam=2) for _ in range(3)]
        for turn in turns:
            _, states[turn] = runtime.best(states[turn], np.full(4, 5), 4)
            states[turn] = states[turn].select(order)

    decode(*(0, 1, 2) * 3)
    bound = [len(step.bound) for step in graphs.steps.values()]
    for turns in ((0, 0, 0, 1, 2), (2, 2, 1, 0, 1), (1, 1, 0, 2, 2)):
        decode(*turns)
    assert [len(step.bound) for step in graphs.steps.values()] == bound


def test_memory_comes_back_and_is_used_again(runtime: LoopRuntime, gpu: FakeCudart) -> None:
    used = []
    for _ in range(6):
        search(runtime, SOURCES, SearchOptions(beam=3))
        used.append(gpu.in_use)
    assert used[1] == used[-1]


def test_two_batches_may_be_under_way_at_once(runtime: LoopRuntime, reference: TorchRuntime) -> None:
    batches = [pad(SOURCES[:3], 1), pad(SOURCES[3:6], 1)]
    states = [runtime.encode(*batch) for batch in batches]
    targets = np.random.default_rng(2).integers(4, TGT_VOCAB, (3, 6))
    for position in range(6):
        for index, batch in enumerate(batches):
            logits, states[index] = runtime.step(states[index], targets[:, position])
            wanted = reference.teacher_forced(*batch, targets[:, : position + 1])[:, -1]
            assert np.abs(logits - wanted).max() < 1e-5


def test_best_tokens_are_those_of_the_logits(runtime: LoopRuntime) -> None:
    src_ids, src_len = pad(SOURCES[:3], 1)
    tokens = np.array([BOS, 5, 9])
    logits, _ = runtime.step(runtime.encode(src_ids, src_len), tokens)
    for count in (1, 8, 17, 18, TGT_VOCAB, 1000):
        best, _ = runtime.best(runtime.encode(src_ids, src_len), tokens, count)
        wanted = best_from_logits(logits, count)
        assert best.ids.tolist() == wanted.ids.tolist()
        assert np.abs(best.log_probs - wanted.log_probs).max() < 1e-5


@pytest.mark.parametrize(
    ("buckets", "beam", "message"),
    [
        (
            Buckets((20,), (1, 2, 4), (20,), remedy="Ask for less."),
            1,
            r"a batch of 5 sentences is more than the 4 planned",
        ),
        (Buckets((20,), (8,), (8, 16), remedy="Ask for less."), 1, r"a source of 20 ids is more than the 16 planned"),
        (
            Buckets((20,), (1, 8), (20,), rows=9, remedy="Ask for less."),
            2,
            r"5 sentences with beam 2 are more than 9 rows",
        ),
    ],
)
def test_what_was_not_planned_for_is_refused_before_anything_runs(
    tiny_bundle: Path, gpu: FakeCudart, buckets: Buckets, beam: int, message: str
) -> None:
    graphs = LateGraphs(tiny_bundle, gpu, buckets)
    runtime = LoopRuntime("late", open_bundle(tiny_bundle).config, graphs)
    with pytest.raises(TfexportError, match=message + r".* Ask for less\."):
        search(runtime, SOURCES[:5], SearchOptions(beam=beam))
    assert graphs.encoder.runs == 0


def test_a_translation_ends_where_the_plan_does(tiny_bundle: Path, gpu: FakeCudart) -> None:
    graphs = LateGraphs(tiny_bundle, gpu, Buckets((4, 8), None, None, remedy="Ask for less."))
    runtime = LoopRuntime("late", open_bundle(tiny_bundle).config, graphs)
    for hypotheses in search(runtime, SOURCES[:2], SearchOptions(min_length=12)):
        assert len(hypotheses[0].ids) == 8
        assert not hypotheses[0].finished
    state = runtime.encode(*pad(SOURCES[:2], 1))
    for _ in range(8):
        _, state = runtime.step(state, np.array([BOS, 5]))
    with pytest.raises(TfexportError, match=r"a translation of 9 tokens is more than the 8 planned for\. Ask for less"):
        runtime.step(state, np.array([BOS, 5]))


def test_reorders_may_follow_each_other_at_once(runtime: LoopRuntime, tiny_bundle: Path) -> None:
    src_ids, src_len = pad(SOURCES[:2], 1)
    logits = []
    for decoder in (runtime, ort_cpu_portable(open_bundle(tiny_bundle), threads=1)):
        state = decoder.encode(src_ids, src_len, beam=3)
        _, state = decoder.step(state, np.array([5, 6, 7, 8, 9, 10]))
        for rows in ([1, 2, 0, 3, 5, 4], [0, 0, 2, 5, 4, 3], [2, 1, 0, 4, 3, 5]):
            state = state.select(np.array(rows))
        logits.append(decoder.step(state, np.array([11, 12, 13, 14, 15, 16]))[0])
    assert np.abs(logits[0] - logits[1]).max() < 1e-5


def test_sentences_may_leave_twice_at_once(runtime: LoopRuntime, tiny_bundle: Path) -> None:
    src_ids, src_len = pad(SOURCES[:8], 1)
    logits = []
    for decoder in (runtime, ort_cpu_portable(open_bundle(tiny_bundle), threads=1)):
        state = decoder.encode(src_ids, src_len)
        _, state = decoder.step(state, np.arange(5, 13))
        for kept in ([0, 1, 2, 3, 4, 5, 6, 7], [1, 3, 5, 7], [0, 2, 3], [1, 2], [1]):
            state = state.select(np.array(kept))
        logits.append(decoder.step(state, np.array([20]))[0])
    assert np.abs(logits[0] - logits[1]).max() < 1e-5


def test_two_batches_may_lose_sentences_at_once(runtime: LoopRuntime, reference: TorchRuntime) -> None:
    batches = [pad(SOURCES[:8], 1), pad(SOURCES[3:11], 1)]
    kept = [np.array([0, 2, 5]), np.array([1, 6, 7])]
    states = []
    for batch in batches:
        _, state = runtime.step(runtime.encode(*batch), np.full(8, BOS))
        states.append(state)
    states = [state.select(rows) for state, rows in zip(states, kept, strict=True)]
    for state, rows, (src_ids, src_len) in zip(states, kept, batches, strict=True):
        logits, _ = runtime.step(state, np.array([7, 8, 9]))
        wanted = reference.teacher_forced(src_ids[rows], src_len[rows], np.array([[BOS, 7], [BOS, 8], [BOS, 9]]))[:, 1]
        assert np.abs(logits - wanted).max() < 1e-5


def test_a_batch_that_is_given_up_leaves_the_next_one_alone(runtime: LoopRuntime, reference: TorchRuntime) -> None:
    one, other = pad(SOURCES[:3], 1), pad([source[::-1] for source in SOURCES[:3]], 1)
    runtime.encode(*one)
    state = runtime.encode(*other)
    logits, _ = runtime.step(state, np.array([BOS, BOS, BOS]))
    wanted = reference.teacher_forced(*other, np.full((3, 1), BOS))[:, 0]
    assert np.abs(logits - wanted).max() < 1e-5


def test_memory_that_waits_unused_is_given_up_where_it_is_missing(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(memory: int) -> int:
        """Batches of many shapes; returns the most memory that was in use."""
        gpu = use(FakeCudart(memory=memory), monkeypatch)
        runtime = LoopRuntime("late", open_bundle(tiny_bundle).config, LateGraphs(tiny_bundle, gpu, BUCKETS))
        for beam in (1, 2, 3):
            for count in (1, 3, 11):
                search(runtime, SOURCES[:count], SearchOptions(beam=beam))
        return gpu.in_use

    most = decode(1 << 30)
    assert decode(most * 4 // 5) <= most * 4 // 5
