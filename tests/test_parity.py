"""Parity finds what is wrong: planted faults fail it, the clean bundle passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import SRC_VOCAB, TinyCheckpoint

from tfexport.bundle import open_bundle
from tfexport.contract import Precision
from tfexport.errors import TfexportError
from tfexport.models.transformer import Transformer
from tfexport.parity import LIMITS, Errors, Limits, ParityReport, check, compare, random_sources
from tfexport.runtimes import load_runtime
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search import SearchOptions

LINES = [b"de4 de5 de6", b"", b"de7", b"de9 de10 de11 de12 de13", b"de5 nothing de6"]


def silent(_: str) -> None:
    pass


def test_clean_bundle_passes_and_counts_what_it_compared(tiny_bundle: Path) -> None:
    notes: list[str] = []
    (ort, pytorch) = check(tiny_bundle, LINES, ["ort-cpu", "torch"], say=notes.append)
    for report in (ort, pytorch):
        assert report.passed
        assert report.sentences == report.identical == 4
        assert report.top1_agree == report.steps > 4
        assert set(report.cross) == {"cross.0.key", "cross.0.value"}
        assert 0 < report.logits.mean <= report.logits.max <= 1e-5
    assert notes == ["note: 1 lines cannot be decoded (empty, too long, ...) and are not compared"]


def test_checkpoint_read_afresh_is_the_reference(tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    (report,) = check(tiny_bundle, LINES, ["ort-cpu"], checkpoint=tiny_checkpoint.path, say=silent)
    assert report.passed


def test_other_checkpoint_fails_and_is_named(
    tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    weights = torch.load(tiny_checkpoint.path, weights_only=True)
    weights["decoder.fc_out.bias"] += 0.01
    torch.save(weights, tmp_path / "other.pt")
    notes: list[str] = []
    (report,) = check(tiny_bundle, LINES, ["ort-cpu"], checkpoint=tmp_path / "other.pt", say=notes.append)
    assert not report.passed
    assert report.logits.max == pytest.approx(0.01, abs=1e-4)
    assert report.cross_max < 1e-5  # the encoder is the same
    assert "not the file that" in notes[0]


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
    fault(reference._model)
    sources = random_sources(bundle.config, 8)
    report = compare(reference, load_runtime("ort-cpu", bundle, threads=1), sources, SearchOptions())
    assert not report.passed


def test_no_input_means_random_ids_and_says_so(tiny_bundle: Path) -> None:
    notes: list[str] = []
    (report,) = check(tiny_bundle, None, ["ort-cpu"], beam=3, say=notes.append)
    assert report.passed
    assert report.sentences == 32
    assert report.beam == 3
    assert "random ids" in notes[0]


def test_input_without_a_sentence_is_an_error(tiny_bundle: Path) -> None:
    with pytest.raises(TfexportError, match="no line that can be decoded"):
        check(tiny_bundle, [b"", b"\n"], ["ort-cpu"], say=silent)


def test_errors_do_not_pass_over_nan() -> None:
    errors = Errors()
    errors.add(np.zeros(3, np.float32), np.array([0.0, np.nan, 0.0], np.float32))
    errors.add(np.zeros(3, np.float32), np.ones(3, np.float32))
    report = report_of("float32", sentences=1, identical=1, logits=errors, limits=Limits(10.0, 1.0, 1.0))
    assert np.isnan(errors.max)
    assert not report.passed


def report_of(precision: Precision, *, limits: Limits | None = None, **found: Any) -> ParityReport:
    """A report that passes but for what was `found`."""
    perfect = {"sentences": 10, "identical": 10, "steps": 10_000, "top1_agree": 10_000}
    return ParityReport("x", precision, limits or LIMITS[precision], 1, **{**perfect, **found})


def test_report_of_nothing_does_not_pass() -> None:
    for precision in LIMITS:
        assert not ParityReport("x", precision, LIMITS[precision], 1).passed
        assert not report_of(precision, sentences=0, identical=0, steps=0, top1_agree=0).passed


@pytest.mark.parametrize(
    ("precision", "most", "fewest"),
    [
        *(("float32", 1e-4, 10_000), ("float16", 0.1, 9_990), ("bfloat16", 1.0, 9_900)),
        *(("int8", 2.0, 9_850), ("int4", 8.0, 9_000)),
    ],
)
def test_limits_of_each_precision(precision: Precision, most: float, fewest: int) -> None:
    """All of float32's best tokens must be the same, and of float16's 99.9 %, of bfloat16's 99 %, and so on."""
    above = most * 1.001
    assert report_of(precision, logits=Errors(most), cross={"cross.0.key": Errors(most)}).passed
    assert not report_of(precision, logits=Errors(above)).passed
    assert not report_of(precision, cross={"cross.0.key": Errors(0.0), "cross.0.value": Errors(above)}).passed
    assert not report_of(precision, logits=Errors(math.nan)).passed
    assert not report_of(precision, cross={"cross.0.key": Errors(math.nan), "cross.0.value": Errors(0.0)}).passed
    assert report_of(precision, top1_agree=fewest).passed
    assert not report_of(precision, top1_agree=fewest - 1).passed


def test_a_float16_report_with_998_of_1000_best_tokens_fails() -> None:
    assert not report_of("float16", top1_agree=9_980).passed
    assert report_of("float16", top1_agree=9_995).passed


def test_a_float32_sentence_that_differs_fails_and_one_in_half_precision_is_only_told() -> None:
    for precision in LIMITS:
        report = report_of(precision, identical=9, different=[4])
        assert report.passed == (precision != "float32")
        assert report.to_dict()["different"] == [4]
        assert report.to_dict()["precision"] == precision


def test_half_precision_is_compared_with_float32_and_held_to_its_own_limits(half_bundle: Path) -> None:
    (report,) = check(half_bundle, LINES, ["ort-cpu"], precision="float16", say=silent)
    assert report.passed
    assert (report.precision, report.limits) == ("float16", LIMITS["float16"])
    assert 1e-5 < report.logits.max < 0.1  # it is not float32 that was compared
    assert 1e-5 < report.cross_max < 0.1
    (strict,) = check(half_bundle, LINES, ["ort-cpu"], precision="float16", tolerance=1e-4, say=silent)
    assert not strict.passed
    assert strict.limits == replace(LIMITS["float16"], error=1e-4)
    assert strict.to_dict()["limits"] == {"error": 1e-4, "top1": 0.999, "identical": 0.0}


def test_half_precision_of_other_weights_fails(
    half_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    weights = torch.load(tiny_checkpoint.path, weights_only=True)
    weights["decoder.fc_out.bias"][5] += 0.2
    torch.save(weights, tmp_path / "other.pt")
    options: dict[str, Any] = {"checkpoint": tmp_path / "other.pt", "precision": "float16", "say": silent}
    (report,) = check(half_bundle, LINES, ["ort-cpu"], **options)
    assert not report.passed
    assert report.logits.max == pytest.approx(0.2, abs=0.05)


def test_random_sources_are_valid_ids(tiny_bundle: Path) -> None:
    config = open_bundle(tiny_bundle).config
    sources = random_sources(config, 200)
    assert max(map(len, sources)) == config.max_source_length
    assert {index for source in sources for index in source} == set(range(SRC_VOCAB))
