"""The TensorRT runtime over engines that are the graphs themselves: only the engine call is not the real one."""

from __future__ import annotations

import dataclasses
import gc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from makers import ort_bundles
from makers.tiny import SRC_VOCAB
from tests.support import fake_tensorrt
from tests.support.fake_cuda import FakeCudart, use
from tfexport.bundle.reader import PORTABLE, Bundle, open_bundle
from tfexport.errors import EngineError, ReplacedBundleError, RuntimeUnavailable, TfexportError
from tfexport.exporter.engine_plan import LengthPlan
from tfexport.runtimes import load_runtime, tensorrt
from tfexport.runtimes.base import Capacity
from tfexport.runtimes.ort import ort_cpu_portable
from tfexport.runtimes.tensorrt import usable_engines
from tfexport.search.search import SearchOptions, search
from tfexport.system import disk_cache

RANDOM = np.random.default_rng(4)
SOURCES = [RANDOM.integers(4, SRC_VOCAB, length).tolist() for length in (7, 1, 16, 3, 12, 5, 9, 2, 15, 4)]
PLAN = LengthPlan(max_batch=10, max_beam=3, max_source=16, cache=(8, 16, 24))
LIBRARIES = {"tensorrt_rtx": fake_tensorrt.module(lambda work: None, rtx=True)}


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    return use(FakeCudart(), monkeypatch)


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    directory = tmp_path_factory.mktemp("engines") / "tiny"
    shutil.copytree(tiny_bundle, directory)
    for library in ("tensorrt", "tensorrt_rtx"):
        made = fake_tensorrt.add_engines(directory, PLAN, library=library)
    return made


@pytest.fixture(params=["tensorrt", "tensorrt_rtx"])
def library(request: pytest.FixtureRequest, gpu: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of the two libraries is installed."""
    stand_in = fake_tensorrt.module(gpu.enqueue, rtx=request.param == "tensorrt_rtx")
    monkeypatch.setattr("tfexport.runtimes.tensorrt.installed_libraries", lambda: {request.param: stand_in})
    return stand_in


def runs_of(library: Any) -> int:
    return sum(context().runs for context in library.contexts)


@pytest.mark.parametrize("beam", [1, 3])
def test_searches_find_what_they_find_on_the_cpu(bundle: Bundle, library: Any, gpu: FakeCudart, beam: int) -> None:
    options = SearchOptions(beam=beam, nbest=beam, min_length=4)
    wanted = search(ort_cpu_portable(bundle, threads=1), SOURCES, options)
    runtime = load_runtime("tensorrt", bundle)
    for _ in range(2):
        found = search(runtime, SOURCES, options)
        assert [[h.ids for h in hypotheses] for hypotheses in found] == [
            [h.ids for h in hypotheses] for hypotheses in wanted
        ]


def test_sources_are_padded_beyond_the_positions_of_the_model(library: Any, gpu: FakeCudart, tmp_path: Path) -> None:
    """d_model 66 needs sources of 32 ids to be aligned; this model reads 9."""
    config = ort_bundles.CONFIG.replace(
        d_model=66, max_source_length=9, max_target_length=20, positions="learned", position_offset=2
    )
    made = ort_bundles.write_bundle(ort_bundles.random_model(config), tmp_path / "bundle")
    name = next(iter(tensorrt.installed_libraries()))
    made = fake_tensorrt.add_engines(made.directory, LengthPlan(max_batch=4, cache=(16,)), library=name)
    runtime = load_runtime("tensorrt", made)
    assert runtime.capacity.source == 9
    sources = [source[:9] for source in SOURCES[:4]]
    wanted, found = (
        search(each, sources, SearchOptions(max_length=12)) for each in (ort_cpu_portable(made, threads=1), runtime)
    )
    assert [[h.ids for h in hypotheses] for hypotheses in found] == [
        [h.ids for h in hypotheses] for hypotheses in wanted
    ]


def test_steps_are_recorded_once_for_each_shape_and_replayed(bundle: Bundle, library: Any, gpu: FakeCudart) -> None:
    runtime = load_runtime("tensorrt", bundle)
    for _ in range(2):
        search(runtime, SOURCES, SearchOptions(beam=3))
    contexts, captures = len(library.contexts), gpu.counts["capture"]
    launches, runs = gpu.counts["launch"], runs_of(library)
    search(runtime, SOURCES, SearchOptions(beam=3))
    assert (len(library.contexts), gpu.counts["capture"]) == (contexts, captures), "known shapes are not bound again"
    ran = runs_of(library) - runs
    if hasattr(library, "CudaGraphStrategy"):  # records by itself
        assert (captures, gpu.counts["launch"]) == (0, 0)
    else:
        assert captures == contexts
        assert gpu.counts["launch"] - launches == ran > 0, "all that ran was a replay"


def test_compiled_kernels_are_kept_for_the_next_process(bundle: Bundle, library: Any) -> None:
    runtime = load_runtime("tensorrt", bundle)
    search(runtime, SOURCES, SearchOptions(beam=3))
    del runtime
    gc.collect()
    names = [path.name for path in disk_cache.folder().glob("kernels-*")] if disk_cache.folder().exists() else []
    assert len(names) == (5 if hasattr(library, "CudaGraphStrategy") else 0)  # of every engine
    assert all(disk_cache.load(name) == b"kernels" for name in names)


def test_attention_is_not_told(bundle: Bundle, library: Any) -> None:
    with pytest.raises(RuntimeUnavailable, match=r"tensorrt has no cross-attention weights.* Use --runtime ort-cpu"):
        search(load_runtime("tensorrt", bundle), SOURCES, SearchOptions(attention=True))


def test_more_than_the_plan_is_refused(bundle: Bundle, library: Any) -> None:
    runtime = load_runtime("tensorrt", bundle)
    for sources, options, message in (
        ([[4] * 17], SearchOptions(), "a source of 17 ids is more than the 16 planned for"),
        ([[4]] * 11, SearchOptions(), "a batch of 11 sentences is more than the 10 planned for"),
        ([[4]] * 10, SearchOptions(beam=4), "10 sentences with beam 4 are more than 30 rows"),
    ):
        with pytest.raises(TfexportError, match=rf"{message}\. Build for larger sizes: tfexport build .* --max-batch"):
            search(runtime, sources, options)


@pytest.mark.parametrize("library", ["tensorrt_rtx"], indirect=True)
def test_a_wide_beam_may_take_the_rows_of_a_narrow_one(bundle: Bundle, library: Any) -> None:
    """30 rows are 10 sentences with beam 3, or 3 with beam 9, whatever buckets batches come in."""
    options = SearchOptions(beam=9)
    wanted = search(ort_cpu_portable(bundle, threads=1), SOURCES[:3], options)
    assert [h[0].ids for h in search(load_runtime("tensorrt", bundle), SOURCES[:3], options)] == [
        h[0].ids for h in wanted
    ]


@pytest.mark.parametrize("library", ["tensorrt_rtx"], indirect=True)
def test_an_engine_that_copies_its_cache_is_refused(
    bundle: Bundle, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_tensorrt.FakeEngine, "aliases", False)
    with pytest.raises(EngineError, match=r"decoder_step.* does not write past\.0\.key in place\. Build again"):
        load_runtime("tensorrt", bundle)


@pytest.mark.parametrize("library", ["tensorrt_rtx"], indirect=True)
def test_an_engine_that_cannot_be_loaded_names_what_built_it(
    bundle: Bundle, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        library, "Runtime", lambda logger: type("R", (), {"deserialize_cuda_engine": lambda s, c: None})()
    )
    with pytest.raises(EngineError, match=r"cannot load .*engine, built by tensorrt_rtx 99\.1 for sm89\. Build again"):
        load_runtime("tensorrt", bundle)


@pytest.mark.parametrize("library", ["tensorrt_rtx"], indirect=True)
def test_a_missing_role_is_refused(bundle: Bundle, library: Any) -> None:
    for role in ("encoder", "select_rows", "decoder_step"):
        rest = tuple(e for e in bundle.engines if e.role != role)
        with pytest.raises(EngineError, match=rf"has no {role} engine\. Build again"):
            load_runtime("tensorrt", dataclasses.replace(bundle, engines=rest))


def changed(bundle: Bundle, **fields: Any) -> Bundle:
    engines = (e for e in bundle.engines if e.library == "tensorrt_rtx")
    return dataclasses.replace(bundle, engines=tuple(dataclasses.replace(e, **fields) for e in engines))


def test_engines_for_this_gpu_are_taken_and_portable_ones_after_them(bundle: Bundle) -> None:
    own, portable = changed(bundle), changed(bundle, gpu=PORTABLE)
    both = dataclasses.replace(bundle, engines=portable.engines + own.engines)
    assert {e.gpu for e in usable_engines(both, None, LIBRARIES, "sm89")} == {"sm89"}
    assert {e.gpu for e in usable_engines(both, None, LIBRARIES, "sm120")} == {PORTABLE}
    assert len(usable_engines(both, None, LIBRARIES, "sm120")) == 5


def test_portable_engines_are_for_what_the_library_knows_from_ampere_on(bundle: Bundle) -> None:
    portable = changed(bundle, gpu=PORTABLE)
    for generation in ("sm80", "sm89", "sm120"):
        assert usable_engines(portable, None, LIBRARIES, generation)
    for generation in ("sm75", "sm90"):
        with pytest.raises(EngineError, match=rf"are for portable, this GPU is {generation}\. Rebuild"):
            usable_engines(portable, None, LIBRARIES, generation)


@pytest.mark.parametrize("library", ["tensorrt_rtx"], indirect=True)
def test_a_damaged_engine_says_build_and_leaves_the_other_runtimes_alone(
    bundle: Bundle, library: Any, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundle.directory, tmp_path / "copy"))
    damaged = next(engine for engine in bundle.engines if engine.library == "tensorrt_rtx")
    (copy / damaged.file).write_bytes(b"cut")
    opened = open_bundle(copy)
    assert search(load_runtime("ort-cpu", opened, threads=1), SOURCES, SearchOptions())
    with pytest.raises(TfexportError, match=r"is not what was exported .*Build again: tfexport build"):
        load_runtime("tensorrt", opened)


@pytest.mark.parametrize("library", ["tensorrt_rtx"], indirect=True)
def test_an_engine_that_is_another_while_it_is_read_is_an_error(
    bundle: Bundle, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, read = open_bundle(Path(shutil.copytree(bundle.directory, tmp_path / "copy"))), tensorrt.read_bytes

    def replaced(path: Path) -> bytes:
        new = shutil.copy2(path, tmp_path / "new")
        new.replace(path)
        return read(path)

    monkeypatch.setattr(tensorrt, "read_bytes", replaced)
    with pytest.raises(ReplacedBundleError):
        load_runtime("tensorrt", opened)


@pytest.mark.parametrize("library", ["tensorrt_rtx"], indirect=True)
@pytest.mark.parametrize(
    "profile", [{}, {"src_ids": [[1, 1]]}, {"src_ids": [[1], [1], [1]], "src_len": [[1], [1], [1]]}]
)
def test_a_profile_that_says_too_little_is_refused(bundle: Bundle, library: Any, profile: Any) -> None:
    with pytest.raises(EngineError, match=r"does not say what .* was built for\. Build again"):
        load_runtime("tensorrt", changed(bundle, profile=profile))


@pytest.mark.parametrize("library", ["tensorrt_rtx"], indirect=True)
def test_capacity_is_what_the_engines_were_built_for(bundle: Bundle, library: Any) -> None:
    assert load_runtime("tensorrt", bundle).capacity == Capacity(source=16, target=20, batch=10, rows=30)


def test_half_precision_comes_first_where_none_is_asked_for(bundle: Bundle) -> None:
    half = changed(bundle, precision="float16")
    both = dataclasses.replace(bundle, engines=bundle.engines + half.engines)
    assert {e.precision for e in usable_engines(both, None, LIBRARIES, "sm89")} == {"float16"}
    assert {e.precision for e in usable_engines(both, "float32", LIBRARIES, "sm89")} == {"float32"}


def test_engines_for_something_else_are_one_line_that_names_what_to_rebuild(bundle: Bundle) -> None:
    build = rf"tfexport build {bundle.directory} --gpu sm120"
    cases: list[tuple[Bundle, Any, str]] = [
        (changed(bundle), None, rf"are for sm89, this GPU is sm120\. Rebuild: {build}\.$"),
        (changed(bundle, gpu="sm120", version="98.0"), None,
         rf"built by tensorrt_rtx 98\.0, installed is tensorrt_rtx 99\.1\. Install that version, or rebuild: {build}\.$"),
        (changed(bundle), "bfloat16", rf"has no TensorRT bf16 engines, only fp32\. Build them: {build} --precision bf16\.$"),
        (dataclasses.replace(bundle, engines=()), None, rf"has no TensorRT engines\. Build them: {build}\.$"),
    ]  # fmt: skip
    for given, precision, message in cases:
        with pytest.raises(EngineError, match=message):
            usable_engines(given, precision, LIBRARIES, "sm120")


def test_without_a_library_the_extra_is_named(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfexport.runtimes.tensorrt.installed_libraries", dict)
    with pytest.raises(
        RuntimeUnavailable, match=r"neither of which is installed: pip install 'tfexport\[tensorrt-rtx\]'"
    ):
        load_runtime("tensorrt", open_bundle(tiny_bundle))


def test_without_a_gpu_that_is_said(bundle: Bundle, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeCudart(devices=0), monkeypatch)
    with pytest.raises(RuntimeUnavailable, match="no NVIDIA GPU can be used here"):
        load_runtime("tensorrt", bundle)
