"""The runtime `ort-cpu` over the dialect `ort`: caches of beams that share their past, rows that change places, threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from makers.ort_bundles import CONFIG, random_model, random_sources, reference_of, with_end, write_bundle
from makers.tiny import BOS, SRC_VOCAB, TGT_VOCAB
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.runtimes.ort import cpu_session, ort_cpu_portable
from tfexport.runtimes.ort_cpu.beam_state import BeamState
from tfexport.runtimes.ort_cpu.bound_graphs import StepGraph
from tfexport.runtimes.ort_cpu.context import CacheLayout
from tfexport.runtimes.ort_cpu.greedy_state import GreedyState
from tfexport.runtimes.ort_cpu.load import ort_cpu
from tfexport.runtimes.ort_cpu.runtime import OrtCpuRuntime
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import Hypothesis, SearchOptions, pad, search

Found = list[list[tuple[int, ...]]]

BLOCK, ROOM = CacheLayout().block, CacheLayout().room

LONG = CONFIG.replace(output_bias=True)
"""90 positions, over several blocks of both caches."""

SHORT = LONG.replace(max_target_length=40)
MODELS: dict[str, tuple[ModelConfig, int, float]] = {
    "plain": (SHORT, 8, 1.5),
    "pre-norm": (SHORT.replace(norm_first=True, final_norm=True, activation="gelu"), 1, 1.5),
    "narrow heads": (SHORT.replace(n_heads=4), 8, 1.0),  # greedy search is a beam of one
    "tied": (SHORT.replace(tgt_vocab_size=31, tie_source_target=True, tie_output=True), 0, 1.5),
    "few tokens": (SHORT.replace(tgt_vocab_size=5, n_decoder_layers=1), 11, 1.0),
}
"""Models, seeds of their weights, and how much more they like eos: enough that sentences end at different steps."""

LENGTHS = [7, 1, 20, 3, 12, 5, 9, 2, 17, 8]


@pytest.fixture(scope="module")
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """The bundle of one of `MODELS`, or of an `endless` one, made once."""
    made: dict[str, Bundle] = {}

    def make(name: str) -> Bundle:
        if name not in made:
            config, seed, more = (LONG, 5, -30.0) if name == "endless" else MODELS[name]
            folder = tmp_path_factory.mktemp("random") / "bundle"
            made[name] = write_bundle(with_end(random_model(config, seed=seed), more), folder)
        return made[name]

    return make


def ids_of(found: list[list[Hypothesis]]) -> Found:
    return [[hypothesis.ids for hypothesis in hypotheses] for hypotheses in found]


def states_of(runtime: OrtCpuRuntime, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The states that the runtime makes from now on."""
    states: list[Any] = []
    encode = runtime.encode

    def watched(*arguments: Any, **options: Any) -> Any:
        states.append(encode(*arguments, **options))
        return states[-1]

    monkeypatch.setattr(runtime, "encode", watched)
    return states


# --- the tokens of PyTorch


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("beam", [1, 3, 4, 9])
@pytest.mark.parametrize("name", MODELS)
def test_searches_find_what_pytorch_finds(bundle_of: Callable[[str], Bundle], name: str, beam: int) -> None:
    """A beam of 9 is more than the tokens of one of the vocabularies."""
    bundle = bundle_of(name)
    sources = random_sources(bundle.config, LENGTHS)
    options = SearchOptions(beam=beam, nbest=beam, length_penalty=1.2)
    wanted = search(reference_of(bundle), sources, options)
    found = search(ort_cpu(bundle, threads=1), sources, options)
    assert ids_of(found) == ids_of(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-4)
        assert [h.finished for h in one] == [h.finished for h in other]


@pytest.mark.parametrize("beam", [1, 3])
def test_these_models_end_some_sentences_early_and_not_all(bundle_of: Callable[[str], Bundle], beam: int) -> None:
    lengths = []
    for name in MODELS:
        bundle = bundle_of(name)
        options = SearchOptions(beam=beam, length_penalty=1.2)
        found = search(ort_cpu(bundle, threads=1), random_sources(bundle.config, LENGTHS), options)
        lengths += [len(hypotheses[0].ids) for hypotheses in found]
    assert len(set(lengths)) > 8
    assert 5 <= lengths.count(40) <= 35


@pytest.mark.parametrize("beam", [1, 3, 4, 9])
@pytest.mark.parametrize("min_length", [0, 7])
def test_searches_find_what_the_portable_graphs_find(tiny_bundle: Path, beam: int, min_length: int) -> None:
    bundle = open_bundle(tiny_bundle)
    random = np.random.default_rng(0)
    sources = [random.integers(4, SRC_VOCAB, length).tolist() for length in [*LENGTHS, *LENGTHS]]
    options = SearchOptions(beam=beam, nbest=beam, min_length=min_length)
    runtimes = [make(bundle, threads=1) for make in (ort_cpu, ort_cpu_portable)]
    assert isinstance(runtimes[0], OrtCpuRuntime)
    found, wanted = (search(runtime, sources, options) for runtime in runtimes)
    assert ids_of(found) == ids_of(wanted)


def test_greedy_search_has_a_graph_of_its_own_where_heads_allow_it(bundle_of: Callable[[str], Bundle]) -> None:
    for name, kind, roles in (
        ("plain", GreedyState, {"encoder", "decoder_step"}),
        ("narrow heads", BeamState, {"encoder", "beam_step"}),
    ):
        runtime = ort_cpu(bundle_of(name), threads=1)
        assert isinstance(runtime, OrtCpuRuntime)
        state = runtime.encode(*pad([[5, 6], [7]], 1))
        runtime.best(state, np.full(2, BOS), 1)
        assert isinstance(state, kind)
        assert set(runtime.context._sessions) == roles  # the other graph is not loaded for nothing


@pytest.mark.parametrize("beam", [1, 3])
def test_sources_are_encoded_in_pieces_and_give_the_same_numbers(
    tiny_bundle: Path, beam: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    src_ids, src_len = pad(random_sources(CONFIG, LENGTHS), 1)
    runtime = ort_cpu(open_bundle(tiny_bundle), threads=1)
    whole: Any = runtime.encode(src_ids, src_len, beam=beam)
    sizes = []
    encode = OrtCpuRuntime._encode_into

    def watched(self: OrtCpuRuntime, ids: Any, *others: Any) -> None:
        sizes.append(ids.size)
        encode(self, ids, *others)

    monkeypatch.setattr(OrtCpuRuntime, "_encode_into", watched)
    for piece, pieces in ((1, 10), (59, 5), (60, 4), (199, 2), (200, 1)):
        monkeypatch.setattr("tfexport.runtimes.ort_cpu.runtime.ENCODED_AT_ONCE", piece)
        sizes.clear()
        found: Any = runtime.encode(src_ids, src_len, beam=beam)
        assert len(sizes) == pieces
        assert max(sizes) <= max(piece, src_ids.shape[1])
        assert all(np.array_equal(one, other) for one, other in zip(found.cross, whole.cross, strict=True))


# --- long outputs


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("beam", [1, 3, 4, 9])
def test_caches_grow_over_several_blocks(
    bundle_of: Callable[[str], Bundle], beam: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of("endless")
    runtime = ort_cpu(bundle, threads=1)
    states = states_of(runtime, monkeypatch)  # type: ignore[arg-type]
    sizes = []
    remember = "_make_room" if beam > 1 else "_grow"
    kind = BeamState if beam > 1 else GreedyState
    original = getattr(kind, remember)

    def watched(state: Any) -> None:
        original(state)
        sizes.append(state._cache[0].shape[2])

    monkeypatch.setattr(kind, remember, watched)
    sources = random_sources(bundle.config, LENGTHS)
    options = SearchOptions(beam=beam, nbest=beam, max_length=90)
    found = search(runtime, sources, options)
    assert {len(ids) for hypotheses in ids_of(found) for ids in hypotheses} == {90}
    assert len(sizes) >= 3
    assert all(size % BLOCK == 0 for size in sizes)
    assert ids_of(found) == ids_of(search(reference_of(bundle), sources, options))
    assert len(states) == 1


def test_a_greedy_cache_grows_block_by_block_and_keeps_what_it_holds(bundle_of: Callable[[str], Bundle]) -> None:
    runtime = ort_cpu(bundle_of("endless"), threads=1)
    state: Any = runtime.encode(*pad([[5, 6], [7]], 1))
    before = np.zeros(0)
    for step in range(2 * BLOCK + 1):
        runtime.best(state, np.array([5 + step % 9, 6]), 1)
        slots = state._cache[0].shape[2]
        assert slots == BLOCK * (step // BLOCK + 1)
        cache = np.stack(state._cache)
        kept = cache[:, :, :, : step + 1]
        assert np.abs(kept[:, :, :, step]).min() > 0
        assert not cache[:, :, :, step + 1 :].any()
        assert np.array_equal(kept[:, :, :, :step].ravel(), before)
        before = kept.ravel().copy()


@pytest.mark.parametrize("beam", [2, 4, 9])
def test_a_cache_holds_little_more_than_one_hypothesis_where_they_share_their_past(
    bundle_of: Callable[[str], Bundle], beam: int
) -> None:
    """All of a beam come from its first hypothesis, step after step: they share all but one token."""
    runtime = ort_cpu(bundle_of("endless"), threads=1)
    batch, config = 3, LONG
    state: Any = runtime.encode(*pad(random_sources(config, [5, 9, 2]), 1), beam=beam)
    rows = np.repeat(np.arange(batch) * beam, beam)
    most = 0
    for step in range(1, 91):
        runtime.best(state, np.tile(np.arange(5, 5 + beam), batch), 2)
        state = state.select(rows)
        most = max(most, state._cache[0].shape[2])
        seen = state._mask[:, 0].any(axis=1).sum(axis=1)
        assert (seen == step).all()
        live = step + beam
        # A step's slots and room for eight steps, or for an eighth of those that were; whole blocks.
        assert state._cache[0].shape[2] <= live + max(ROOM, step // 8) * beam + BLOCK
    assert most < 90 * beam


def test_a_sentence_that_is_done_takes_no_room(bundle_of: Callable[[str], Bundle]) -> None:
    """Of eight one ends early, which is too few to leave the buffers for: it sees nothing any more."""
    runtime, beam = ort_cpu(bundle_of("endless"), threads=1), 4
    state: Any = runtime.encode(*pad(random_sources(LONG, [5] * 8), 1), beam=beam)
    for step in range(1, 61):
        runtime.best(state, np.tile(np.arange(5, 5 + beam), len(state._places)), 2)
        live = len(state._places) - (step == 3)
        state = state.select(np.repeat(np.arange(live) * beam, beam))
    assert (len(state._places), len(state._src_len)) == (7, 8)
    assert not state._mask[7].any()
    assert state._cache[0].shape[2] <= 60 + beam + ROOM * beam + BLOCK


def test_the_first_step_of_a_beam_computes_one_hypothesis_of_each_sentence(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime: Any = ort_cpu(open_bundle(tiny_bundle), threads=1)
    runtime.context.attention_is_by_row = True
    sources, options = random_sources(CONFIG, LENGTHS), SearchOptions(beam=4, nbest=4)
    shapes = []
    begin = StepGraph.begin

    def watched(self: StepGraph, *arguments: Any) -> None:
        shapes.append(self.tokens.shape)
        begin(self, *arguments)

    monkeypatch.setattr(StepGraph, "begin", watched)
    found = search(runtime, sources, options)
    assert shapes[:2] == [(len(sources), 1), (len(sources), 4)]
    shapes.clear()
    search(runtime, sources[:1], options)
    assert shapes[0] == (1, 4)  # one row would have other last bits
    runtime.context.attention_is_by_row = False
    shapes.clear()
    wanted = search(runtime, sources, options)
    assert shapes[0] == (len(sources), 4)
    assert ids_of(found) == ids_of(wanted)
    scores = [[[hypothesis.score for hypothesis in row] for row in rows] for rows in (found, wanted)]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-6)


def test_all_hypotheses_go_on_from_a_first_token_that_they_share(tiny_bundle: Path) -> None:
    bundle, beam = open_bundle(tiny_bundle), 3
    runtimes: list[Any] = [make(bundle, threads=1) for make in (ort_cpu, ort_cpu_portable)]
    runtimes[0].context.attention_is_by_row = True
    states = [runtime.encode(*pad(random_sources(CONFIG, [5, 9]), 1), beam=beam) for runtime in runtimes]
    for tokens in ([2] * 6, [4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 4]):  # each in the place in which it was
        logits = []
        for index, runtime in enumerate(runtimes):
            found, states[index] = runtime.step(states[index], np.array(tokens))
            logits.append(found)
        assert logits[0].shape == logits[1].shape
        assert np.abs(logits[0] - logits[1]).max() < 1e-5


def test_hypotheses_share_no_step_where_one_row_alone_has_other_last_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = write_bundle(random_model(CONFIG), tmp_path / "narrow")
    wide = write_bundle(random_model(CONFIG.replace(d_model=48)), tmp_path / "wide")
    monkeypatch.setattr("tfexport.kernels.library", lambda: tmp_path)
    monkeypatch.setattr("tfexport.kernels.register", lambda _: None)
    made: list[Any] = [ort_cpu(bundle, threads=1) for bundle in (narrow, wide)]
    monkeypatch.setattr("tfexport.kernels.library", lambda: None)
    made.append(ort_cpu(wide, threads=1))
    assert [runtime.context.attention_is_by_row for runtime in made] == [False, True, False]


def test_sessions_have_the_threads_that_are_asked_for_and_no_slow_fusion(
    bundle_of: Callable[[str], Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[onnxruntime.SessionOptions] = []
    real = onnxruntime.InferenceSession

    def watched(path: Path, options: onnxruntime.SessionOptions, **more: Any) -> Any:
        made.append(options)
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        return real(path, options, **more)

    monkeypatch.setattr("tfexport.runtimes.ort.onnxruntime.InferenceSession", watched)
    runtime = ort_cpu(bundle_of("endless"), threads=3)
    for role in ("encoder", "decoder_step", "beam_step"):
        runtime.context.session(role)
        operators = {
            node.op_type for node in onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node
        }
        assert {"LayerNormalization", "ResidualNorm"} & operators
        assert "SkipLayerNormalization" not in operators
    assert [options.intra_op_num_threads for options in made] == [3, 3, 3]
    assert not runtime.capabilities.fork  # its sessions have threads, which a fork would lack
    assert ort_cpu(bundle_of("endless"), threads=1).capabilities.fork


@pytest.mark.parametrize("beam", [1, 4])
def test_a_cache_of_hypotheses_that_share_nothing_holds_all_of_them(tmp_path: Path, beam: int) -> None:
    model = with_end(random_model(LONG.replace(n_heads=4), seed=5), -30)  # no graph for greedy search alone
    bundle = write_bundle(model, tmp_path / "bundle")
    runtime, reference = ort_cpu(bundle, threads=1), reference_of(bundle)
    src_ids, src_len = pad(random_sources(LONG, [5, 9]), 1)
    states = [decoder.encode(src_ids, src_len, beam=beam) for decoder in (runtime, reference)]
    tokens = np.random.default_rng(0).integers(4, 30, (80, 2 * beam))
    for step in range(80):
        logits = []
        for index, decoder in enumerate((runtime, reference)):
            found, states[index] = decoder.step(states[index], tokens[step])
            logits.append(found)
        assert np.abs(logits[0] - logits[1]).max() < 2e-5
    state: Any = states[0]
    assert state._mask[:, 0].sum(axis=2).tolist() == [[80] * beam] * 2
    assert 80 * beam <= state._cache[0].shape[2] <= 1.5 * 80 * beam + BLOCK


@pytest.mark.parametrize("heads", [3, 4])
@pytest.mark.parametrize("beam", [1, 3])
def test_positions_end_where_the_model_does(tmp_path: Path, beam: int, heads: int) -> None:
    bundle = write_bundle(random_model(CONFIG.replace(max_target_length=4, n_heads=heads)), tmp_path / "bundle")
    runtime = ort_cpu(bundle, threads=1)
    state = runtime.encode(*pad([[5], [6]], 1), beam=beam)
    for _ in range(4):
        _, state = runtime.step(state, np.full(2 * beam, 5))
    for call in (runtime.step, lambda state, tokens: runtime.best(state, tokens, 2)):
        with pytest.raises(
            TfexportError, match=r"the model has 4 target positions, and no more\. Use a smaller --max-l"
        ):
            call(state, np.full(2 * beam, 5))
    (found, _) = search(runtime, [[5], [6]], SearchOptions(beam=beam, min_length=5))
    assert len(found[0].ids) == 4


# --- steps


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_logits_are_those_of_the_portable_graphs_whatever_is_selected(tiny_bundle: Path, beam: int) -> None:
    """Random reorders, drops and swaps of sentences at once, several at a time, over the growth of all caches."""
    bundle = open_bundle(tiny_bundle)
    random = np.random.default_rng(beam)
    for trial in range(6):
        batch = int(random.integers(1, 7))
        src_ids, src_len = pad(
            [random.integers(4, SRC_VOCAB, int(n)).tolist() for n in random.integers(1, 21, batch)], 1
        )
        runtimes: list[Any] = [make(bundle, threads=1) for make in (ort_cpu, ort_cpu_portable)]
        states = [runtime.encode(src_ids, src_len, beam=beam) for runtime in runtimes]
        for step in range(20):
            tokens = random.integers(4, TGT_VOCAB, states[0].rows)
            logits = []
            for index, runtime in enumerate(runtimes):
                found, states[index] = runtime.step(states[index], tokens)
                logits.append(found)
            assert logits[0].dtype == np.float32
            # Some are above 20, whose last bit is 2e-6: sums in another order differ in a few of them.
            assert np.abs(logits[0] - logits[1]).max() < 1e-6 * max(10, np.abs(logits[1]).max()), (trial, step)
            for _ in range(int(random.integers(0, 3))):
                sentences = states[0].rows // beam
                kept = random.permutation(sentences)[: max(1, sentences - int(random.integers(0, 3) == 0))]
                parents = random.integers(0, beam, (len(kept), beam))
                rows = (kept[:, None] * beam + parents).ravel()
                states = [state.select(rows) for state in states]
                assert states[0].rows == states[1].rows == len(rows)
            for one, other in zip(states[0].cross, states[1].cross, strict=True):
                assert one.shape == other.shape


def test_cross_keys_and_values_are_those_of_the_sentences_that_are_left(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    sources = [[5, 6, 7], [8] * 9, [9, 10], [11] * 5, [12]]
    src_ids, src_len = pad(sources, 1)
    wanted = TorchRuntime.from_bundle(bundle).encode(src_ids, src_len).cross
    for beam in (1, 2):
        state = ort_cpu(bundle, threads=1).encode(src_ids, src_len, beam=beam)
        real = np.arange(9) < src_len[:, None]
        for kept in (np.arange(5), np.array([0, 4, 2, 3]), np.array([0, 1])):
            rows = (kept[:, None] * beam + np.arange(beam)).ravel()
            state = state.select(rows)
            wanted, real = [tensor[kept] for tensor in wanted], real[kept]
            for one, other in zip(state.cross, wanted, strict=True):
                assert one.shape == other.shape
                assert np.abs(one.swapaxes(1, 2)[real] - other.swapaxes(1, 2)[real]).max() < 1e-5
        wanted = TorchRuntime.from_bundle(bundle).encode(src_ids, src_len).cross


@pytest.mark.parametrize("beam", [1, 3])
def test_best_tokens_are_those_of_the_logits_for_every_count(tiny_bundle: Path, beam: int) -> None:
    """In a sequence, too: the count changes from step to step, as a minimal length makes it."""
    runtime = ort_cpu(open_bundle(tiny_bundle), threads=1)
    src_ids, src_len = pad([[5, 6, 7], [8]], 1)
    tokens = np.arange(4, 4 + 2 * beam)
    logits: Any = runtime.encode(src_ids, src_len, beam=beam)
    scored: Any = runtime.encode(src_ids, src_len, beam=beam)
    for count in (1, 8, 2, 17, 18, TGT_VOCAB, TGT_VOCAB + 1, 1000, 3):
        numbers, logits = runtime.step(logits, tokens)
        best, scored = runtime.best(scored, tokens, count)
        exact = numbers.astype(np.float64)
        log_probs = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
        order = np.argsort(-exact, axis=1, kind="stable")[:, :count]
        assert best.ids.tolist() == order.tolist()
        np.testing.assert_allclose(best.log_probs, np.take_along_axis(log_probs, order, axis=1), atol=1e-5)


@pytest.mark.parametrize("beam", [1, 2])
def test_results_of_a_step_are_the_caller_s_own(tiny_bundle: Path, beam: int) -> None:
    """The next step writes over the runtime's buffers, not over what it gave away."""
    runtime = ort_cpu(open_bundle(tiny_bundle), threads=1)
    state: Any = runtime.encode(*pad([[5, 6, 7], [8]], 1), beam=beam)
    best, state = runtime.best(state, np.arange(4, 4 + 2 * beam), 3)
    kept = [array.copy() for array in best]
    for _ in range(2):
        _, state = runtime.best(state, np.arange(9, 9 + 2 * beam), 3)
    assert all(np.array_equal(one, other) for one, other in zip(best, kept, strict=True))
    logits, state = runtime.step(state, np.arange(4, 4 + 2 * beam))
    numbers = logits.copy()
    for _ in range(2):
        _, state = runtime.step(state, np.arange(9, 9 + 2 * beam))
    assert np.array_equal(logits, numbers)


def test_inputs_of_any_layout_and_type_are_taken(tiny_bundle: Path) -> None:
    runtime = ort_cpu(open_bundle(tiny_bundle), threads=1)
    src_ids, src_len = pad([[5, 6, 7], [8], [9, 10]], 1)
    wanted, _ = runtime.step(runtime.encode(src_ids, src_len), np.array([4, 5, 6]))
    wide = np.repeat(np.repeat(src_ids, 2, axis=0), 2, axis=1)[::2, ::2]  # every other number of memory
    lengths = np.repeat(src_len.astype(np.int32), 2)[::2]
    tokens = np.repeat(np.array([4, 5, 6], dtype=np.int32), 2)[::2]
    assert not wide.flags.c_contiguous
    assert not lengths.flags.c_contiguous
    found, _ = runtime.step(runtime.encode(wide, lengths), tokens)
    assert np.array_equal(found, wanted)


# --- rows that leave, and change places


def test_a_greedy_batch_closes_up_in_the_same_memory(tiny_bundle: Path) -> None:
    """Only the rows that change their place are copied; the rest stays where it lies."""
    bundle = open_bundle(tiny_bundle)
    runtime, reference = ort_cpu(bundle, threads=1), TorchRuntime.from_bundle(bundle)
    src_ids, src_len = pad([[n] * n for n in range(4, 12)], 1)
    state: Any = runtime.encode(src_ids, src_len)
    _, state = runtime.step(state, np.full(8, BOS))
    memory = [tensor.ctypes.data for tensor in (*state._cache, *state._cross)]
    before = np.stack(state._cache)
    kept = np.array([0, 7, 2, 3, 6])
    state = state.select(kept)
    assert [tensor.ctypes.data for tensor in (*state._cache, *state._cross)] == memory
    assert state.rows == 5
    assert np.array_equal(np.stack(state._cache)[:, :5], before[:, kept])  # what lies behind them is room
    tokens = np.arange(5, 10)
    logits, state = runtime.step(state, tokens)
    targets = np.stack([np.full(5, BOS), tokens], axis=1)
    wanted = reference.teacher_forced(src_ids[kept], src_len[kept], targets)[:, -1]
    assert np.abs(logits - wanted).max() < 1e-5


def test_sentences_of_a_beam_search_leave_once_enough_are_done(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    runtime, reference = ort_cpu(bundle, threads=1), TorchRuntime.from_bundle(bundle)
    src_ids, src_len = pad([[n] * n for n in range(4, 12)], 1)
    state: Any = runtime.encode(src_ids, src_len, beam=2)
    sentence, history = np.repeat(np.arange(8), 2), np.zeros((16, 0), dtype=np.int64)
    physical = []
    for step, kept in enumerate([[0, 1, 2, 3, 4, 5, 7], [6, 1, 2, 3, 4, 5], [0, 4, 2], [1, 0], [0]]):
        tokens = np.random.default_rng(step).integers(4, TGT_VOCAB, state.rows)
        logits, state = runtime.step(state, tokens)
        history = np.concatenate([history, tokens[:, None]], axis=1)
        wanted = reference.teacher_forced(src_ids[sentence], src_len[sentence], history)[:, -1]
        assert np.abs(logits - wanted).max() < 1e-5
        rows = (2 * np.array(kept)[:, None] + [1, 0]).ravel()
        state, sentence, history = state.select(rows), sentence[rows], history[rows]
        physical.append(state._cache[0].shape[0])
    assert physical == [8, 6, 3, 2, 1]  # at three quarters and less, their places are given up


@pytest.mark.parametrize("beam", [1, 2])
def test_what_lies_in_memory_that_is_given_back_reaches_no_other_sentence(tiny_bundle: Path, beam: int) -> None:
    """Places of sentences that are done, filled with NaN: nobody reads them."""
    runtime = ort_cpu(open_bundle(tiny_bundle), threads=1)
    src_ids, src_len = pad([[n] * n for n in range(4, 12)], 1)
    results = []
    for poison in (False, True):
        state: Any = runtime.encode(src_ids, src_len, beam=beam)
        _, state = runtime.step(state, np.full(8 * beam, BOS))
        whole = list(state._cache)
        rows = (np.arange(3)[:, None] * beam + np.arange(beam)).ravel()
        state = state.select(rows)
        if poison:
            for tensor in whole:
                tensor[3:] = np.nan
        results.append([runtime.step(state, np.full(3 * beam, 5))[0] for _ in range(18)])
    assert np.array_equal(*results)


# --- threads


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("beam", [1, 4])
def test_threads_over_one_runtime_decode_as_one_does_after_the_other(tiny_bundle: Path, beam: int) -> None:
    bundle = open_bundle(tiny_bundle)
    random = np.random.default_rng(0)
    batches = [
        [random.integers(4, SRC_VOCAB, int(n)).tolist() for n in random.integers(1, 21, 1 + index % 5)]
        for index in range(24)
    ]
    options = SearchOptions(beam=beam, nbest=beam)
    alone = [search(ort_cpu(bundle, threads=1), batch, options) for batch in batches]
    runtime = ort_cpu(bundle, threads=1)  # its graphs are loaded by whoever comes first
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda batch: search(runtime, batch, options), batches))
    assert together == alone  # scores, too


@pytest.mark.parametrize("beam", [1, 3])
def test_batches_under_way_side_by_side_share_nothing(tiny_bundle: Path, beam: int) -> None:
    """Steps of two batches take turns; one loses a sentence meanwhile, one is given up."""
    runtime = ort_cpu(open_bundle(tiny_bundle), threads=1)
    batches = [pad([[5, 6, 7], [8, 9]], 1), pad([[7, 6, 5], [9]], 1)]
    tokens = np.random.default_rng(2).integers(4, TGT_VOCAB, (20, 2 * beam))

    def steps(batch: Any, drop_at: int) -> Any:
        state = runtime.encode(*batch, beam=beam)
        for step in range(20):
            logits, state = runtime.step(state, tokens[step, : state.rows])
            yield logits
            if step == drop_at:
                state = state.select(np.arange(beam) + beam)

    wanted = [list(steps(batch, drop)) for batch, drop in zip(batches, (3, 99), strict=True)]
    runs = [steps(batch, drop) for batch, drop in zip(batches, (3, 99), strict=True)]
    given_up = steps(batches[0], 99)
    for step in range(20):
        for run, exact in zip(runs, wanted, strict=True):
            assert np.array_equal(next(run), exact[step])
        if step < 5:
            next(given_up)


def test_a_graph_is_loaded_once_by_threads_that_ask_together(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def slow(path: Path, threads: int | None) -> Any:
        loaded.append(path.name)
        time.sleep(0.1)  # time enough for the others to come and ask
        return cpu_session(path, threads)

    monkeypatch.setattr("tfexport.runtimes.ort_cpu.context.cpu_session", slow)
    runtime = ort_cpu(open_bundle(tiny_bundle), threads=1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda beam: search(runtime, [[5, 6]], SearchOptions(beam=beam)), [1, 2, 3] * 8))
    assert sorted(loaded) == ["beam_step.ort.onnx", "decoder_step.ort.onnx", "encoder.ort.onnx"]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("positions", ["sinusoidal", "relative"])
def test_a_beam_is_the_same_alone_and_in_a_batch_to_the_last_bit(
    tmp_path: Path, positions: str, precision: Any
) -> None:
    """Of sentences of one length, so that no padding is between them."""
    more = {"max_distance": 9} if positions == "relative" else {}
    model = random_model(CONFIG.replace(d_model=48, n_heads=3, positions=positions, **more), seed=5)
    runtime = ort_cpu(write_bundle(model, tmp_path / "bundle", (precision,)), precision=precision, threads=1)
    sources = random_sources(CONFIG, [9] * 16)
    options = SearchOptions(beam=4, nbest=4, max_length=20)
    together = search(runtime, sources, options)
    assert together == [search(runtime, [source], options)[0] for source in sources]
