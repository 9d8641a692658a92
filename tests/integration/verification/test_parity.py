"""Parity finds what is wrong: planted faults fail it, the clean bundle passes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from makers.tiny import HEADS, SRC_VOCAB, TinyCheckpoint
from tfexport.bundle.reader import open_bundle
from tfexport.decoding.line_reader import Reader, read_pairs
from tfexport.decoding.translate import Writer
from tfexport.errors import TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.model import build_model
from tfexport.models.transformer import Transformer
from tfexport.runtimes import load_runtime
from tfexport.runtimes.base import Capabilities
from tfexport.runtimes.outputs import Best, best_from_logits
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions
from tfexport.system.json_text import json_text
from tfexport.verification.bleu_chrf import Quality
from tfexport.verification.gate import DecodingGate
from tfexport.verification.parity import Reference, check, compare, compare_all, quality_of, random_sources
from tfexport.verification.report import LIMITS

LINES = [b"de4 de5 de6", b"", b"de7", b"de9 de10 de11 de12 de13", b"de5 nothing de6"]


def silent(_: str) -> None:
    pass


def test_clean_bundle_passes_and_counts_what_it_compared(tiny_bundle: Path) -> None:
    notes: list[str] = []
    (ort, pytorch) = check(tiny_bundle, LINES, ["ort-cpu", "torch"], say=notes.append).reports
    for report in (ort, pytorch):
        assert report.passed
        assert report.sentences == report.identical == 4
        assert report.top1_agree == report.steps > 4
        assert set(report.cross) == {"cross.0.key", "cross.0.value"}
        assert 0 < report.logits.own <= 1e-5
        assert 0 < report.logits.error <= report.allowed(report.logits) < 1e-4
        assert report.unfounded == report.failures == []
    assert notes == ["note: 1 lines cannot be decoded (empty, too long, ...) and are not compared"]


@pytest.mark.thorough
def test_checkpoint_read_afresh_is_the_reference(tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    comparison = check(tiny_bundle, LINES, ["ort-cpu"], checkpoint=tiny_checkpoint.path, say=silent)
    assert comparison.reports[0].passed
    assert comparison.passed
    assert comparison.mismatches == []


def test_other_checkpoint_fails_and_is_named(
    tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    weights = torch.load(tiny_checkpoint.path, weights_only=True)
    weights["decoder.fc_out.bias"] += 0.01
    torch.save(weights, tmp_path / "other.pt")
    notes: list[str] = []
    comparison = check(tiny_bundle, LINES, ["ort-cpu"], checkpoint=tmp_path / "other.pt", say=notes.append)
    (report,) = comparison.reports
    assert not report.passed
    assert report.logits.error == pytest.approx(0.01, abs=1e-4)
    assert report.cross_max < 1e-5  # the encoder is the same
    assert "not the file that" in notes[0]
    (mismatch,) = comparison.mismatches
    assert str(mismatch).startswith("weights.safetensors: output_bias differs from the model's in 37 of 37 numbers")
    wrong = {found.first.node.split("/")[0] for found in comparison.graphs["float32"] if found.first is not None}
    assert wrong <= {"output", "BestToken_1"}
    assert wrong


def test_a_setting_of_the_manifest_that_the_checkpoint_contradicts_must_be_confirmed(
    own_bundle: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    """The manifest has it in both places, as after an export with --config."""
    path = own_bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["config"]["source_eos"] is True
    assert "source_eos" not in manifest["source"]["given"]
    manifest["config"]["source_eos"] = manifest["source"]["given"]["source_eos"] = False
    path.write_text(json.dumps(manifest))
    notes: list[str] = []

    def told(**hints: Any) -> list[str]:
        notes.clear()
        reference = Reference(tiny_checkpoint.path, hints=hints)
        found = check(own_bundle, None, ["torch"], checkpoint=reference, max_length=4, say=notes.append)
        assert found.passed == (not found.mismatches)
        return list(map(str, found.mismatches))

    assert told() == [
        "manifest.json: source_eos is False, the checkpoint's own is True: if the bundle is right, give --config "
        'FILE.json with {"source_eos": false}'
    ]
    assert told(source_eos=False) == []
    assert told(source_eos=True) == ["manifest.json: source_eos is False, the checkpoint's is True"]
    manifest["config"]["suppressed_ids"] = manifest["source"]["given"]["suppressed_ids"] = [7]
    path.write_text(json.dumps(manifest))
    assert told(source_eos=False) == []  # the checkpoint has none of its own
    assert any("suppressed_ids [7]" in note and "not compared" in note for note in notes)


def test_lengths_that_an_export_lowered_are_a_note(tmp_path: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    lengths = {"max_source_length": 7, "max_target_length": 6}
    loaded = load_checkpoint(
        tiny_checkpoint.path, {"n_heads": HEADS, **lengths}, tokenizers=tiny_checkpoint.tokenizers()
    )
    export(loaded, tmp_path / "bundle", gate=None)
    notes: list[str] = []
    reference = Reference(tiny_checkpoint.path)
    found = check(tmp_path / "bundle", None, ["torch"], checkpoint=reference, max_length=4, say=notes.append)
    assert found.passed
    told = [note for note in notes if "_length is" in note]
    assert [note.partition(",")[0] for note in told] == [f"note: {name} is {most}" for name, most in lengths.items()]


def scale_weight(model: Transformer) -> None:
    model.decoder.layers[0].feed_forward.hidden.weight *= 1.01


def swap_projections(model: Transformer) -> None:
    attention = model.decoder.layers[0].cross_attention
    attention.key, attention.value = attention.value, attention.key


def shift_positions(model: Transformer) -> None:
    model.decoder.positions.table.data = model.decoder.positions.table.roll(-1, 0)


def other_eps(model: Transformer) -> None:
    model.encoder.layers[0].norms[0].eps = 1e-2


def other_scale(model: Transformer) -> None:
    model.encoder.scale *= 1.001


def other_heads(model: Transformer) -> None:
    attention = model.encoder.layers[1].self_attention
    attention.n_heads, attention.head_dim = attention.n_heads * 2, attention.head_dim // 2


@pytest.mark.parametrize(
    "fault", [scale_weight, swap_projections, shift_positions, other_eps, other_scale, other_heads]
)
@torch.no_grad()
def test_planted_faults_fail(tiny_bundle: Path, fault: Callable[[Transformer], None]) -> None:
    bundle = open_bundle(tiny_bundle)
    reference = TorchRuntime.from_bundle(bundle)
    fault(reference.model)
    sources = random_sources(bundle.config, 8)
    report = compare(reference, load_runtime("ort-cpu", bundle, threads=1), sources, SearchOptions())
    assert not report.passed


@pytest.mark.thorough
def test_no_input_means_random_ids_and_says_so(tiny_bundle: Path) -> None:
    notes: list[str] = []
    (report,) = check(tiny_bundle, None, ["ort-cpu"], beams=(3,), say=notes.append).reports
    assert report.passed
    assert report.sentences == 32
    assert report.beam == 3
    assert "random ids" in notes[0]


def test_input_without_a_sentence_is_an_error(tiny_bundle: Path) -> None:
    with pytest.raises(TfexportError, match="no line that can be decoded"):
        check(tiny_bundle, [b"", b"\n"], ["ort-cpu"], say=silent)


class Nudged:
    """A runtime whose logits of one token are larger by `more` than they should be."""

    def __init__(self, inner: Any, token: int, more: float):
        self.inner, self.token, self.more = inner, token, more

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, state: Any, tokens: Any) -> Any:
        logits, state = self.inner.step(state, tokens)
        logits[:, self.token] += self.more
        return logits, state

    def best(self, state: Any, tokens: Any, count: int) -> Any:
        logits, state = self.step(state, tokens)
        return best_from_logits(logits, count), state


@pytest.mark.parametrize("beam", [1, 3])
def test_sentences_that_differ_are_told_with_the_margin_of_the_reference(tiny_bundle: Path, beam: int) -> None:
    bundle = open_bundle(tiny_bundle)
    reference = TorchRuntime.from_bundle(bundle)
    sources = random_sources(bundle.config, 12)
    eos = bundle.config.eos_id
    report = compare(reference, Nudged(reference, eos, 3.0), sources, SearchOptions(beam=beam, max_length=20))
    assert not report.passed
    assert report.identical + len(report.divergences) == report.sentences == 12
    assert report.divergences
    assert report.logits.error == pytest.approx(3.0, abs=1e-4)
    assert report.unfounded == []  # it decodes as its own logits say
    for found in report.divergences:
        assert (found.found == eos) or beam > 1
        assert found.found != found.wanted
        assert not report.is_tie(found)
        if beam == 1:
            assert 2e-4 < found.margin <= 3.0  # it was preferred by less than what was added to the other


@pytest.mark.parametrize(
    ("token", "more", "passes"), [(10, 0.0, True), (10, 20.0, False), (10, 1e-3, False), (1, 1e9, False)]
)
def test_a_wrong_logit_beside_a_masked_word_is_found(tiny_bundle: Path, token: int, more: float, passes: bool) -> None:
    """A bias of -1e9 masks word 1. 477 is its allowed rounding error, and no other logit may be off by that."""
    bundle = open_bundle(tiny_bundle)
    reference = TorchRuntime.from_bundle(bundle)
    reference.model.output_bias.data[1] = -1e9  # type: ignore[union-attr, operator]
    for beam in (1, 3):
        options = SearchOptions(beam=beam, max_length=12)
        report = compare(reference, Nudged(reference, token, more), random_sources(bundle.config, 6), options)
        assert report.passed == passes, report.failures
        assert report.tie_of(report.logits) < 1e-3


class Careless:
    """A runtime whose searches are not of its own logits: another best token now and then, or other scores."""

    def __init__(self, inner: Any, more: float):
        self.inner, self.more = inner, more

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def best(self, state: Any, tokens: Any, count: int) -> Any:
        logits, state = self.inner.step(state, tokens)
        found = best_from_logits(logits, count)
        if self.more:
            return Best(found.log_probs + self.more, found.ids), state
        second = best_from_logits(logits, 2).ids[:, 1:]
        return Best(found.log_probs, np.concatenate([second, found.ids[:, 1:]], axis=1)), state


def test_outputs_that_do_not_follow_from_the_logits_fail(tiny_bundle: Path) -> None:
    """A search by other graphs than those that tell the logits: the numbers are right, and the outputs are not."""
    bundle = open_bundle(tiny_bundle)
    reference = TorchRuntime.from_bundle(bundle)
    sources = random_sources(bundle.config, 6)
    greedy = compare(reference, Careless(reference, 0), sources, SearchOptions(max_length=6))
    assert len(greedy.unfounded) == 6
    assert greedy.logits.error < 1e-5
    assert not greedy.passed
    scored = compare(reference, Careless(reference, 0.01), sources, SearchOptions(beam=3, max_length=6))
    assert scored.identical == 6
    assert scored.unfounded == [1, 2, 3, 4, 5, 6]
    assert not scored.passed
    assert "do not follow from the logits" in scored.failures[-1]


def test_a_margin_below_the_allowed_error_is_a_tie(tiny_bundle: Path) -> None:
    """With a tolerance above what was added, the same sentences differ by ties."""
    bundle = open_bundle(tiny_bundle)
    reference = TorchRuntime.from_bundle(bundle)
    runtime = Nudged(reference, bundle.config.eos_id, 3.0)
    report = compare(
        reference, runtime, random_sources(bundle.config, 12), SearchOptions(max_length=20), tolerance=3.001
    )
    assert report.divergences
    assert report.ties == len(report.divergences)


def test_all_runtimes_and_searches_are_compared_at_once_as_one_by_one(half_bundle: Path) -> None:
    bundle = open_bundle(half_bundle)
    reference = TorchRuntime.from_bundle(bundle)
    runtimes = [load_runtime("ort-cpu", bundle, precision=p, threads=1) for p in ("float32", "float16")]  # type: ignore[arg-type]
    searches = [SearchOptions(beam=beam, max_length=12) for beam in (1, 3)]
    sources = random_sources(bundle.config, 10)
    together = compare_all(reference, runtimes, sources, searches, batch_size=4)
    apart = [compare(reference, r, sources, s, batch_size=4) for r in runtimes for s in searches]
    assert [(r.precision, r.beam) for r in together] == [(p, b) for p in ("float32", "float16") for b in (1, 3)]
    assert [report.to_dict() for report in together] == [report.to_dict() for report in apart]


@pytest.mark.thorough
def test_positions_add_up_to_all_steps(tiny_bundle: Path) -> None:
    (report,) = check(tiny_bundle, LINES, ["ort-cpu"], say=silent).reports
    assert sum(position.steps for position in report.positions) == report.steps
    assert [p.steps for p in report.positions] == sorted((p.steps for p in report.positions), reverse=True)
    assert max(position.error for position in report.positions) == report.logits.error
    assert 0 <= report.divergence < 1e-9


@pytest.mark.thorough
def test_all_precisions_of_a_bundle_are_compared_that_run_here(half_bundle: Path, quantized_bundle: Path) -> None:
    comparison = check(half_bundle, LINES, ["ort-cpu"], beams=(1, 2), say=silent)
    assert list(comparison.variants) == [("ort-cpu", p) for p in ("float32", "float16", "bfloat16")]
    assert [len(reports) for reports in comparison.variants.values()] == [2, 2, 2]
    notes: list[str] = []
    comparison = check(quantized_bundle, LINES, ["torch"], say=notes.append)
    assert list(comparison.variants) == [("torch", "float32")]
    assert any("not compared in int8" in note for note in notes)
    with pytest.raises(TfexportError, match="int8"):
        check(quantized_bundle, LINES, ["torch"], precisions=("int8",), say=silent)


@pytest.mark.thorough
def test_what_was_compared_is_told(tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    one, other = check(tiny_bundle, LINES, ["ort-cpu"], say=silent), check(tiny_bundle, None, ["ort-cpu"], say=silent)
    assert (one.inputs["sentences"], one.inputs["random"], one.source) == (4, False, "bundle")
    assert (other.inputs["sentences"], other.inputs["random"]) == (32, True)
    assert one.inputs["sha256"] != other.inputs["sha256"]
    afresh = check(tiny_bundle, LINES, ["ort-cpu"], checkpoint=tiny_checkpoint.path, say=silent)
    assert afresh.source == open_bundle(tiny_bundle).origin.sha256


def model_of(directory: Path) -> Any:
    bundle = open_bundle(directory)
    return build_model(bundle.config, load_file(bundle.weights))


@pytest.mark.thorough
def test_the_gate_of_an_export_passes_clean_bundles(
    half_bundle: Path, quantized_bundle: Path, classifier_bundle: Path
) -> None:
    for bundle in (half_bundle, quantized_bundle, classifier_bundle):
        DecodingGate().check_bundle(bundle, model_of(bundle))


def test_the_gate_refuses_a_bundle_that_decodes_otherwise(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = load_runtime

    def nudged(*arguments: Any, **options: Any) -> Any:
        return Nudged(real(*arguments, **options), 5, 0.01)

    monkeypatch.setattr("tfexport.verification.gate.load_runtime", nudged)
    message = r"in fp32 do not decode as PyTorch does with beam 1: logits of step 1 are off by .* Nothing was exported"
    with pytest.raises(TfexportError, match=message):
        DecodingGate().check_bundle(tiny_bundle, model_of(tiny_bundle))
    DecodingGate(0.011).check_bundle(tiny_bundle, model_of(tiny_bundle))


@pytest.mark.thorough
def test_half_precision_is_compared_with_float32_and_held_to_its_own_limits(half_bundle: Path) -> None:
    (report,) = check(half_bundle, LINES, ["ort-cpu"], precisions=("float16",), say=silent).reports
    assert report.passed
    assert (report.precision, report.limits) == ("float16", LIMITS["float16"])
    assert 1e-5 < report.logits.error < 0.1  # it is not float32 that was compared
    assert 1e-5 < report.cross_max < 0.1
    assert report.allowed(report.logits) == math.inf
    (fixed,) = check(half_bundle, LINES, ["ort-cpu"], precisions=("float16",), tolerance=1e-4, say=silent).reports
    assert fixed.passed  # a fixed limit is for float32, and for the values of graphs
    told = report.to_dict()
    assert told["logits"] == {"max": report.logits.error, "own": report.logits.own}
    assert {position["allowed"] for position in told["positions"]} == {None}


def test_half_precision_of_other_weights_fails(
    half_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    weights = torch.load(tiny_checkpoint.path, weights_only=True)
    weights["decoder.fc_out.bias"][5] += 0.2
    torch.save(weights, tmp_path / "other.pt")
    options: dict[str, Any] = {"checkpoint": tmp_path / "other.pt", "precisions": ("float16",), "say": silent}
    comparison = check(half_bundle, LINES, ["ort-cpu"], **options)
    (report,) = comparison.reports
    assert report.logits.error == pytest.approx(0.2, abs=0.05)
    assert {found.file for found in comparison.mismatches} == {
        f"weights{p}.safetensors" for p in ("", ".fp16", ".bf16")
    }
    assert any(found.first is not None for found in comparison.graphs["float16"])
    assert not comparison.holds("float16")
    assert not comparison.passed


def test_random_sources_are_valid_ids(tiny_bundle: Path) -> None:
    config = open_bundle(tiny_bundle).config
    sources = random_sources(config, 200)
    assert max(map(len, sources)) == config.max_source_length
    assert {index for source in sources for index in source} == set(range(SRC_VOCAB))


@pytest.mark.thorough
def test_targets_give_the_quality_of_both(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    writer = Writer.of(bundle, "text")
    lines = [b"de4 de5 de6", b"de7", b"de9 de10 de11 de12 de13"]
    (clean,) = check(tiny_bundle, lines, ["ort-cpu"], say=silent).reports
    assert clean.quality is None
    own = [writer.text(ids).encode() for ids, _ in clean.outputs]
    (report,) = check(tiny_bundle, lines, ["ort-cpu"], targets=own, say=silent).reports
    perfect = Quality(pytest.approx(100.0), 100.0)  # type: ignore[arg-type]
    assert report.quality == (perfect, perfect)
    report.outputs[1] = (report.outputs[1][0], ())
    reference, found = quality_of(report, writer, [line.decode() for line in own])
    assert reference == perfect
    assert found.bleu < 100
    assert "quality" in report.summary()
    assert "outputs" not in report.to_dict()


def test_targets_stay_beside_their_lines(tiny_bundle: Path) -> None:
    reader = Reader.of(open_bundle(tiny_bundle), None)
    notes: list[str] = []
    sources, targets = read_pairs(LINES, [b"a", b"none", b"b", b"c", "d ö".encode()], reader, notes.append)
    assert targets == ["a", "b", "c", "d ö"]
    assert len(sources) == 4
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("lines", "targets", "message"),
    [
        (LINES, [b"a"] * 4, "there are 4 targets and more lines"),
        (LINES, [b"a"] * 6, "more targets than lines"),
        (LINES, [b"a", b"", b"\xff", b"", b""], "target 3 is not UTF-8"),
        (None, [b"a"], "Give INPUT too"),
    ],
)
def test_targets_that_are_no_translations_are_an_error(
    tiny_bundle: Path, lines: list[bytes] | None, targets: list[bytes], message: str
) -> None:
    with pytest.raises(TfexportError, match=message):
        check(tiny_bundle, lines, ["ort-cpu"], targets=targets, say=silent)


@pytest.mark.thorough
def test_reference_in_float64_tells_whose_rounding_an_error_is(tiny_bundle: Path) -> None:
    (plain,) = check(tiny_bundle, LINES, ["torch"], say=silent).reports
    comparison = check(tiny_bundle, LINES, ["torch", "ort-cpu"], float64=True, say=silent)
    assert plain.reference == "fp32"
    for report in (plain, *comparison.reports):
        assert report.passed
        assert 0 < report.cross_max < 1e-5  # in both cases numbers are held against those in float64
    for report in comparison.reports:
        assert report.reference == "fp64"
    own = comparison.reports[0]
    assert [errors.error for errors in own.cross.values()] == [errors.own for errors in own.cross.values()]
    assert comparison.reference.encode(np.array([[4, 5]]), np.array([2])).cross[0].dtype == np.float64
    assert comparison.reference.teacher_forced(*(np.array([[4]]), np.array([1]), np.array([[2]]))).dtype == np.float64


def test_runtime_that_gives_no_numbers_fails_and_says_so(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(tiny_bundle)
    runtime = load_runtime("ort-cpu", bundle, threads=1)
    step, best = runtime.step, runtime.best
    monkeypatch.setattr(runtime, "step", lambda *given: (np.full_like(step(*given)[0], np.nan), given[0]))
    monkeypatch.setattr(type(runtime), "capabilities", Capabilities())
    monkeypatch.setattr(
        runtime, "best", lambda *given: (Best(best(*given)[0].log_probs * np.nan, best(*given)[0].ids), given[0])
    )
    reference = TorchRuntime.from_bundle(bundle)
    report = compare(reference, runtime, random_sources(bundle.config, 4), SearchOptions(max_length=6))
    assert not report.passed
    assert report.error is not None
    assert "not finite" in report.error
    assert report.sentences == 4
    assert report.identical == 0
    assert len(report.outputs) == 4
    assert np.isnan(report.logits.error)
    told = json.loads(json_text(report.to_dict()), parse_constant=pytest.fail)
    assert told["logits"]["max"] is told["kl"] is None
    assert told["passed"] is False
