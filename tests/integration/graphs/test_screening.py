"""The best tokens without all logits: whatever the weights, they are float32's; and who asks for scores has them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from makers.ort_bundles import (
    CONFIG,
    configs,
    random_model,
    random_sources,
    session_of,
    write_bundle,
    write_graphs,
)
from makers.paths import ROOT
from tests.support.graph_checks import self_check
from tfexport import contract, graph_contract
from tfexport.bundle.reader import Bundle, file_sha256, open_bundle
from tfexport.commands.demo import embedded_checkpoint
from tfexport.config import ModelConfig
from tfexport.contract import FEWEST_WORDS, SCREENING_FILE
from tfexport.errors import TfexportError
from tfexport.exporter.pipeline import export
from tfexport.graphs.emitter import Emitter
from tfexport.graphs.projections import Projection
from tfexport.graphs.screening import LEVELS, screen, screening_tensors
from tfexport.graphs.stored_weights import StoredWeights
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.transformer import Transformer
from tfexport.runtimes.ort_cpu.runtime import OrtCpuRuntime
from tfexport.search.search import Hypothesis, SearchOptions, Source, search
from tfexport.verification.parity import check

WIDE = CONFIG.replace(tgt_vocab_size=1030, output_bias=True)
LENGTHS = [7, 1, 20, 3, 12, 5]
SCORED, ALONE = SearchOptions(max_length=30), SearchOptions(max_length=30, scores=False)

Change = Callable[[torch.Tensor, torch.Tensor], None]
"""What is done to the output projection [vocab, d_model] and its bias [vocab]."""

ort_bundle = partial(write_bundle, dialects=("ort",))


def ids_of(found: list[list[Hypothesis]]) -> list[tuple[int, ...]]:
    return [hypotheses[0].ids for hypotheses in found]


def wide_model(change: Change | None = None, **changes: Any) -> Transformer:
    model = random_model(WIDE.replace(**changes), seed=4)
    if change is not None:
        with torch.no_grad():
            assert model.output_weight is not None
            assert model.output_bias is not None
            change(model.output_weight, model.output_bias)
    return model


def whole_rows(bundle: Bundle) -> tuple[OrtCpuRuntime, list[int]]:
    """A runtime, and how many rows of each of its steps are multiplied with the whole projection."""
    path = bundle.graph("greedy_step", "float32", "ort")
    proto = onnx.inliner.inline_local_functions(onnx.load(path, load_external_data=False))
    (compress,) = (node for node in proto.graph.node if node.op_type == "Compress")
    proto.graph.output.append(onnx.helper.make_tensor_value_info(compress.output[0], onnx.TensorProto.FLOAT, None))
    counting = path.with_name("counting.onnx")
    onnx.save(proto, counting)
    runtime, rows = OrtCpuRuntime(bundle, threads=1), []
    session = session_of(counting)
    run = session.run_with_iobinding

    def counted(binding: Any, *more: Any) -> None:
        binding.bind_output(compress.output[0])
        run(binding, *more)
        rows.append(len(binding.get_outputs()[-1].numpy()))

    session.run_with_iobinding = counted
    runtime.context._sessions["greedy_step"] = session
    return runtime, rows


def alike(weight: torch.Tensor, _: torch.Tensor) -> None:
    """Words in families of 300 that 8 bits cannot tell apart."""
    random = torch.Generator().manual_seed(1)
    noise = torch.randn(900, weight.shape[1], generator=random)
    weight[:900] = 1.5 * weight[:3].repeat_interleave(300, 0) + 1e-4 * noise


def one_is_huge(weight: torch.Tensor, _: torch.Tensor) -> None:
    weight[17] *= 1e4


def overflowing(weight: torch.Tensor, _: torch.Tensor) -> None:
    weight *= 1e25  # the squares of which are infinite


def few_may_come(_: torch.Tensor, bias: torch.Tensor) -> None:
    bias[5:] = -torch.inf


def large_biases(_: torch.Tensor, bias: torch.Tensor) -> None:
    bias[::7] -= 1e9
    bias[3] += 8.0


def all_equal(weight: torch.Tensor, bias: torch.Tensor) -> None:
    weight[:], bias[:] = 0.0, 0.0


CHANGES: list[Change | None] = [None, alike, one_is_huge, overflowing, few_may_come, large_biases, all_equal]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__ if change else "random")
@pytest.mark.parametrize("bias", [True, False], ids=["biased", "not biased"])
def test_the_best_tokens_are_those_of_all_logits(tmp_path: Path, change: Change | None, bias: bool) -> None:
    if change in (few_may_come, large_biases) and not bias:
        pytest.skip("it is about biases")
    model = wide_model(change)
    if not bias:
        weights = {name: tensor for name, tensor in model.state_dict().items() if name != "output_bias"}
        model = Transformer(WIDE.replace(output_bias=False))
        model.load_state_dict(weights)
        model.eval()
    runtime = OrtCpuRuntime(ort_bundle(model, tmp_path / "bundle"), threads=1)
    sources = random_sources(WIDE, LENGTHS)
    for changes in ({}, {"min_length": 12}, {"suppress": tuple(range(4, 40))}, {"suppress_first": (5, 9, 11)}):
        scored, alone = (replace(options, **changes) for options in (SCORED, ALONE))
        assert ids_of(search(runtime, sources, alone)) == ids_of(search(runtime, sources, scored)), changes


def test_rows_that_are_not_proven_are_multiplied_whole_and_no_others(tmp_path: Path) -> None:
    runtime, rows = whole_rows(ort_bundle(wide_model(alike), tmp_path / "alike"))
    found = ids_of(search(runtime, random_sources(WIDE, LENGTHS), ALONE))
    assert found == ids_of(search(runtime, random_sources(WIDE, LENGTHS), SCORED))
    assert 0 < sum(rows) < len(LENGTHS) * len(rows)


def test_of_a_trained_model_all_rows_are_proven(tmp_path: Path) -> None:
    bundle = open_bundle(export(load_checkpoint(embedded_checkpoint(), {}), tmp_path / "bundle", gate=None).directory)
    runtime, rows = whole_rows(bundle)
    tokenizer = bundle.tokenizer("source")
    assert tokenizer is not None
    text = (ROOT / "benchmarks" / "sentences.de").read_text(encoding="utf-8").splitlines()
    search(runtime, [tokenizer.encode(line) for line in text[:32]], ALONE)
    assert len(rows) > 10
    assert sum(rows) == 0


@pytest.mark.thorough
@settings(max_examples=5, deadline=None)
@given(config=configs())
def test_any_model_is_screened_as_pytorch_computes(config: ModelConfig) -> None:
    """Vocabularies that are too small for it, too, if they are asked: where there are fewer words than candidates."""
    few = pytest.MonkeyPatch()
    few.setattr(contract, "FEWEST_WORDS", 1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = random_model(config, seed=2)
            self_check(model, write_graphs(model, Path(folder)), Path(folder))
    finally:
        few.undo()


def test_a_small_vocabulary_and_other_precisions_are_not_screened(tmp_path: Path) -> None:
    ort_bundle(random_model(CONFIG), tmp_path / "small", ["float32", "int8"])
    assert CONFIG.tgt_vocab_size < FEWEST_WORDS
    assert not (tmp_path / "small" / SCREENING_FILE).exists()
    bundle = ort_bundle(wide_model(), tmp_path / "wide", ["float32", "int8", "int4"])
    screened = {
        graph.file for graph in bundle.graphs if SCREENING_FILE.encode() in (bundle.directory / graph.file).read_bytes()
    }
    assert screened == {"greedy_step.ort.onnx"}
    relative = WIDE.replace(n_heads=4)  # greedy search is a beam of one
    assert not ort_bundle(random_model(relative), tmp_path / "beam").has_graph("greedy_step", "float32", "ort")
    assert not (tmp_path / "beam" / SCREENING_FILE).exists()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
@pytest.mark.parametrize("vocab", [37, 1030])
def test_every_precision_ranks_as_it_scores(tmp_path: Path, precision: contract.Precision, vocab: int) -> None:
    bundle = ort_bundle(
        random_model(WIDE.replace(tgt_vocab_size=vocab), seed=1), tmp_path / "bundle", ["float32", "int8", "int4"]
    )
    runtime = OrtCpuRuntime(bundle, precision=precision, threads=1)
    sources = random_sources(WIDE, LENGTHS)
    for changes in ({}, {"min_length": 12}, {"suppress": tuple(range(4, 30))}):
        scored, alone = (replace(options, **changes) for options in (SCORED, ALONE))
        assert ids_of(search(runtime, sources, alone)) == ids_of(search(runtime, sources, scored)), changes


@pytest.mark.parametrize("vocab", [37, 1030])
def test_where_nothing_may_come_an_output_ends(tmp_path: Path, vocab: int) -> None:
    config = WIDE.replace(tgt_vocab_size=vocab)
    runtime = OrtCpuRuntime(ort_bundle(random_model(config), tmp_path / "bundle"), threads=1)
    everything = tuple(index for index in range(vocab) if index != config.eos_id)
    found = search(runtime, [[5, 6]], replace(ALONE, suppress=everything, min_length=2))
    assert ids_of(found) == ids_of(search(runtime, [[5, 6]], replace(SCORED, suppress=everything, min_length=2)))
    assert ids_of(found) == [(config.eos_id,)]


@pytest.mark.parametrize("where", ["decoder.norm.weight", "decoder.layers.0.norms.0.bias"])
def test_numbers_that_are_none_are_told(tmp_path: Path, where: str) -> None:
    model = wide_model(final_norm=True)
    bundle = ort_bundle(model, tmp_path / "bundle")
    weights = load_file(bundle.weights)
    weights[where] = np.full_like(weights[where], np.nan)
    save_file(weights, bundle.weights, {"format": "pt"})
    bundle._verified.sums = {**bundle.files, bundle.weights.name: file_sha256(bundle.weights)}
    with pytest.raises(TfexportError, match="not finite numbers"):
        search(OrtCpuRuntime(bundle, threads=1), [[5, 6]], ALONE)


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other words' numbers, and bounds that lie. (With honest ones nothing would be proven, and all is right.)"""

    def of_other_words(weight: NDArray[np.float32]) -> dict[str, NDArray[np.generic]]:
        tensors = screening_tensors(np.roll(weight, 1, axis=0))
        return {name: array * 0 if name.endswith(("norm", "error")) else array for name, array in tensors.items()}

    for module in ("exporter.weights", "verification.files"):
        monkeypatch.setattr(f"tfexport.{module}.screening_tensors", of_other_words)


@pytest.mark.thorough
def test_parity_finds_a_screen_of_other_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model()
    plant(monkeypatch)
    bundle = write_bundle(model, tmp_path / "bundle")
    comparison = check(bundle.directory, None, ["ort-cpu"], max_length=12, say=lambda _: None)
    (report,) = comparison.reports
    assert not report.passed
    assert report.logits.error <= report.allowed(report.logits)  # logits are told by another graph
    assert "outputs do not follow from the logits of the runtime" in report.failures[-1]
    wrong = {(found.file, found.first.node) for found in comparison.graphs["float32"] if found.first is not None}
    assert {file for file, _ in wrong} == {"greedy_step.ort.onnx"}
    assert all(node.startswith("screening/") for _, node in wrong)
    monkeypatch.undo()
    comparison = check(bundle.directory, None, ["ort-cpu"], max_length=2, say=lambda _: None)
    assert {found.file for found in comparison.mismatches} == {SCREENING_FILE}


OPTIONS: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"min_length": 3, "suppress": (5,), "suppress_first": (7,), "max_length_ratio": 2.0}, True),
    ({"profile": "marian"}, True),
    ({"scores": True}, False),
    ({"beam": 2}, False),
    ({"samples": 1}, False),
    ({"alternatives": 2}, False),
    ({"attention": True}, False),
    ({"coverage_penalty": 0.2}, False),
    ({"repetition_penalty": 1.2}, False),
    ({"no_repeat_ngram": 3}, False),
    ({"profile": "hf", "force_eos": True}, False),
    ({"profile": "opennmt"}, False),
    ({"profile": "fairseq"}, False),
]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("asks", "alone"), OPTIONS, ids=[str(asks) for asks, _ in OPTIONS])
def test_who_needs_more_than_the_best_token_has_it(tmp_path: Path, asks: dict[str, Any], alone: bool) -> None:
    asked = {"scores": False, "max_length": 8, **asks}
    options = SearchOptions.for_profile(asked.pop("profile", "tfexport"), **asked)
    assert options.best_only == alone
    bundle = ort_bundle(random_model(WIDE), tmp_path / "bundle", alignments=True)
    runtime = OrtCpuRuntime(bundle, threads=1)
    runtime.prepare(options.needs)
    search(runtime, [[5, 6]], options)
    assert ("greedy_step" in runtime.context._sessions) == alone
    assert len(runtime.context._sessions) == 2  # nothing is loaded for nobody


@pytest.mark.parametrize(
    "source", [Source((5, 6), prefix=(9,)), Source((5, 6), least=3), Source((5, 6), candidates=np.arange(9))]
)
def test_so_has_a_sentence_that_does(tmp_path: Path, source: Source) -> None:
    runtime = OrtCpuRuntime(ort_bundle(random_model(WIDE), tmp_path / "bundle"), threads=1)
    sources = [source, Source((7, 8, 9))]
    assert ids_of(search(runtime, sources, ALONE)) == ids_of(search(runtime, sources, SCORED))
    assert "greedy_step" not in runtime.context._sessions


def test_a_bundle_without_the_graph_decodes_by_the_other(tmp_path: Path) -> None:
    bundle = ort_bundle(random_model(WIDE), tmp_path / "bundle")
    older = replace(bundle, graphs=tuple(graph for graph in bundle.graphs if graph.role != "greedy_step"))
    runtime = OrtCpuRuntime(older, threads=1)
    sources = random_sources(WIDE, LENGTHS)
    assert ids_of(search(runtime, sources, ALONE)) == ids_of(search(OrtCpuRuntime(bundle, threads=1), sources, ALONE))
    assert "greedy_step" not in runtime.context._sessions


def test_both_graphs_share_a_cache(tmp_path: Path) -> None:
    """Over the edge of its first block, in turns."""
    runtime = OrtCpuRuntime(ort_bundle(random_model(WIDE), tmp_path / "bundle"), threads=1)
    source, length = np.array([[5, 6, 7]]), np.array([3])
    plain, mixed = (runtime.encode(source, length) for _ in range(2))
    token, other = np.array([WIDE.bos_id]), np.array([WIDE.bos_id])
    for step in range(40):
        best, plain = runtime.best(plain, token, 1)
        found, mixed = runtime.argmax(mixed, other, ()) if step % 3 else runtime.best(mixed, other, 1)
        token, other = best.ids[:, 0], found.ids[:, 0]
        assert token == other


def test_the_self_check_finds_wrong_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model()
    plant(monkeypatch)
    graphs = write_graphs(model, tmp_path)
    with pytest.raises(TfexportError, match=r"greedy_step\.ort\.onnx departs .* at screening/.*: .*best"):
        self_check(model, graphs, tmp_path)


def ranked(tmp_path: Path, weight: NDArray[np.float32], states: NDArray[np.float32]) -> list[int]:
    """The words that screening finds for `states` [rows, d_model], by a graph that is nothing else."""
    vocab, width = weight.shape
    config = CONFIG.replace(tgt_vocab_size=vocab, d_model=width, n_heads=1)
    given = contract.TensorSpec("states", "float32", ("rows", "d_model"), "")
    greedy = graph_contract.ORT_GREEDY_STEP
    spec = contract.GraphSpec("greedy_step", (given, greedy.inputs[3]), greedy.outputs[:2], dialect="ort")
    save_file({"output_weight": weight}, tmp_path / contract.WEIGHTS_FILE)
    save_file(screening_tensors(weight), tmp_path / SCREENING_FILE)
    stored = StoredWeights(tmp_path / contract.WEIGHTS_FILE, tmp_path / SCREENING_FILE)
    output = Projection("output", ("output_weight",), ())
    emitter = Emitter(spec, config, stored, [output], lambda *_: pytest.fail("the whole projection"))
    logits, ids = screen(emitter, output, emitter.inputs["states"], emitter.inputs["banned"])
    emitter.set_output(logits, "best.logits")
    emitter.set_output(ids, "best.ids")
    ir.save(emitter.model(), tmp_path / "screening.onnx")
    session = session_of(tmp_path / "screening.onnx")
    found: list[int] = session.run(["best.ids"], {"states": states, "banned": np.zeros(0, np.int64)})[0][:, 0].tolist()
    return found


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("small", [0.0, 1e-44, 1e-39])
def test_a_row_of_zeros_changes_no_other(tmp_path: Path, place: int, small: float) -> None:
    """A NaN among the lengths would be lost in ONNX Runtime's ReduceMax, and with it the largest of other rows."""
    weight = np.zeros((1100, 24), np.float32)
    weight[:, 0] = np.linspace(1e-6, 1e-2, 1100)  # decoys, all better than the right word as 8 bits see it
    weight[500, 0], weight[500, 1:] = 0.0, 1.0
    states = np.zeros((4, 24), np.float32)
    states[:, 0] = 1.0
    states[(place + 2) % 4, 1:] = 0.49 / LEVELS  # which are rounded to 0
    states[place] = small
    best = ranked(tmp_path, weight, states)
    assert best[(place + 2) % 4] == 500
    if small == 0.0:
        assert best[place] == 0  # all are equal


def test_of_equal_logits_the_lower_id_is_best(tmp_path: Path) -> None:
    """Whatever their bounds are."""
    weight = np.zeros((1100, 24), np.float32)
    weight[20, 0] = weight[30, 0] = 1.0
    weight[30, 5] = 3.0
    states = np.zeros((2, 24), np.float32)
    states[:, 0], states[1, 7] = 1.0, 0.5
    assert ranked(tmp_path, weight, states) == [20, 20]


@pytest.mark.parametrize("vocab", [37, 1030])
def test_a_model_that_begins_with_one_token_needs_no_other_graph(tmp_path: Path, vocab: int) -> None:
    config = WIDE.replace(tgt_vocab_size=vocab, forced_first_id=6)
    runtime = OrtCpuRuntime(ort_bundle(random_model(config), tmp_path / "bundle"), threads=1)
    sources = random_sources(config, LENGTHS)
    alone = ids_of(search(runtime, sources, ALONE))
    assert "decoder_step" not in runtime.context._sessions
    assert alone == ids_of(search(runtime, sources, SCORED))
    assert {ids[0] for ids in alone} == {6}
