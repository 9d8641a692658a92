"""Arrays of the runtime `ort-cpu` in memory that is used again."""

from __future__ import annotations

from pathlib import Path

import pytest

from makers.ort_bundles import CONFIG, random_model, random_sources, with_end, write_bundle
from tfexport.runtimes.ort_cpu import buffers
from tfexport.runtimes.ort_cpu.runtime import OrtCpuRuntime
from tfexport.search.search import SearchOptions, search

MODEL = CONFIG.replace(output_bias=True)


@pytest.mark.parametrize("beam", [1, 3])
def test_batches_like_those_before_take_no_new_memory(
    beam: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "SMALLEST", 1)  # all arrays of a small model count
    runtime = OrtCpuRuntime(write_bundle(with_end(random_model(MODEL, seed=3), -30.0), tmp_path / "bundle"), threads=1)
    sources, options = random_sources(MODEL, [20, 7, 12, 3]), SearchOptions(beam=beam, max_length=60)

    def outputs() -> list[list[tuple[int, ...]]]:
        return [[found.ids for found in hypotheses] for hypotheses in search(runtime, sources, options)]

    first = outputs()
    pieces = runtime.context.buffers.free
    # Keys and values of the sentences, a cache, and one more tensor of it while it grows, with beams also what moves into
    # it; no second cache.
    assert len(pieces) == 1 + 2 * MODEL.n_decoder_layers + (1 if beam == 1 else 2)
    for _ in range(3):
        assert outputs() == first
        assert len(runtime.context.buffers.free) == len(pieces)
