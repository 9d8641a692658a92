"""A sentence decodes the same whatever lies around it, and what makes it depend on that is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tfexport.bundle.reader import open_bundle
from tfexport.contract import Precision
from tfexport.errors import TfexportError
from tfexport.runtimes import load_runtime
from tfexport.runtimes.ort_cpu.beam_state import BeamState
from tfexport.search.search import SearchOptions
from tfexport.verification import invariance as module
from tfexport.verification.invariance import Invariance, invariance
from tfexport.verification.parity import random_sources


def of(directory: Path, precision: Precision, beam: int, runtime: str = "ort-cpu") -> Invariance:
    bundle = open_bundle(directory)
    sources = random_sources(bundle.config, 12)
    return invariance(bundle, runtime, precision, sources, SearchOptions(beam=beam), batch_size=5)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
def test_clean_bundle_passes(quantized_bundle: Path, precision: Precision, beam: int) -> None:
    found = of(quantized_bundle, precision, beam)
    assert found.passed
    names = [way.name for way in found.arrangements]
    assert names == ["shuffled", "padded", "other cache", "poisoned cache", "2 threads"]
    assert all(way.identical == found.sentences == 12 for way in found.arrangements)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("beam", [1, 3])
def test_portable_graphs_pass(half_bundle: Path, beam: int) -> None:
    found = of(half_bundle, "float16", beam)
    assert found.passed
    assert len(found.arrangements) == 5


def test_other_runtimes_have_batches_only(tiny_bundle: Path) -> None:
    found = of(tiny_bundle, "float32", 1, "torch")
    assert found.passed
    assert [way.name for way in found.arrangements] == ["shuffled", "padded"]


def failing(found: Invariance) -> set[str]:
    assert not found.passed
    return {way.name for way in found.arrangements if way.identical + way.ties < found.sentences}


def test_padding_that_is_seen_is_found(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(*arguments: Any, **options: Any) -> Any:
        runtime = load_runtime(*arguments, **options)
        encode = runtime.encode

        def seeing_all(src_ids: Any, src_len: Any, **options: Any) -> Any:
            src_len = src_len.copy()
            src_len[:] = src_ids.shape[1]
            return encode(src_ids, src_len, **options)

        runtime.encode = seeing_all
        return runtime

    monkeypatch.setattr(module, "load_runtime", leaky)
    assert {"shuffled", "padded", "2 threads"} <= failing(of(tiny_bundle, "float32", 1))


def test_unused_slots_that_are_seen_are_found(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see = BeamState._bind_mask

    def seeing_all(self: BeamState, mask: Any) -> None:
        mask[...] = True
        see(self, mask)

    monkeypatch.setattr(BeamState, "_bind_mask", seeing_all)
    assert {"other cache", "poisoned cache"} <= failing(of(tiny_bundle, "float32", 3))


def test_scores_that_are_no_numbers_are_told(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in the cache of a beam search is beyond what its kernel promises; here it stands for any kernel that reads it."""
    monkeypatch.setattr(module, "STALE", float("nan"))
    found = of(tiny_bundle, "float32", 3)
    assert failing(found) == {"poisoned cache"}
    (poisoned,) = (way for way in found.arrangements if way.name == "poisoned cache")
    assert "not finite" in (poisoned.error or "") or "number" in (poisoned.error or "")


def test_a_model_that_gives_no_numbers_fails_and_says_so(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_numbers(*_: Any) -> Any:
        raise TfexportError("the model gave logits that are not finite numbers")

    monkeypatch.setattr(module, "search", no_numbers)
    found = of(tiny_bundle, "float32", 1)
    assert failing(found) == {"alone"}
    assert "not finite" in (found.arrangements[0].error or "")
