"""Every GPU runtime on a real GPU, held to PyTorch on the CPU: `make gpu`. Without a GPU all of it is skipped, and says so.

Tests marked `compiles` compile a model, in minutes: compiled PyTorch and TensorRT. `-m "gpu and not compiles"` is quick.

The model is the embedded German-English one, on sentences like those that it was trained on.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch

from benchmarks.peers.pytorch_in_place import InPlaceRuntime
from makers.paths import ROOT
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.commands.demo import embedded_checkpoint
from tfexport.contract import FLOATS, Precision
from tfexport.decoding.line_reader import Reader
from tfexport.errors import RuntimeUnavailable
from tfexport.exporter.pipeline import export
from tfexport.graph_checks.rounding import Rounding
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.runtimes import load_runtime
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, pad, search
from tfexport.system.gpu import find_gpu
from tfexport.verification.parity import compare


def has_gpu() -> bool:
    try:
        find_gpu()
    except RuntimeUnavailable:  # also where cuda-bindings is not installed, of which PyTorch has its own
        return torch.cuda.is_available()
    return True


NOT_RUN = "no NVIDIA GPU here: this was not run"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason=NOT_RUN)]

COMPILE = {"torch-cuda": False, "torch-cuda-compiled": True, "ort-cuda": False, "tensorrt": True}
"""The runtimes, and whether they compile a model."""
LARGEST = {"float16": 0.1, "bfloat16": 1.0}
"""Distance of a logit of the embedded model from float64: rounding moves it by less, another hypothesis' past by more."""
SENTENCES = ROOT / "benchmarks" / "sentences.de"


def build_engines(directory: Path) -> str:
    """Put TensorRT engines for the GPU here into a bundle; what stood in the way, where something did.

    The reason may be anything, also a crash: the other runtimes are to be tested all the same.
    """
    build = [sys.executable, "-m", "tfexport", "build", str(directory), "--precision", ",".join(FLOATS)]
    try:
        done = subprocess.run([*build, "--gpu", "here"], capture_output=True, text=True, timeout=1800)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    print(done.stdout, done.stderr)
    if not done.returncode:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"tfexport build ended with exit code {done.returncode}"


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in all precisions."""
    directory = tmp_path_factory.mktemp("gpu") / "de-en"
    export(load_checkpoint(embedded_checkpoint(), {}), directory, precisions=list(FLOATS.values()))
    return directory


@pytest.fixture(scope="session")
def no_engines(directory: Path) -> str:
    """Why the bundle has no TensorRT engines; empty where it has them."""
    return build_engines(directory)


@pytest.fixture(scope="session")
def bundle(directory: Path) -> Bundle:
    return open_bundle(directory)


@pytest.fixture(scope="session")
def reference(bundle: Bundle) -> TorchRuntime:
    return TorchRuntime.from_bundle(bundle)


@pytest.fixture(scope="session")
def sources(bundle: Bundle) -> list[list[int]]:
    reader = Reader.of(bundle, "text")
    return [reader.ids(line) for line in SENTENCES.read_bytes().splitlines()]


def load(name: str, bundle: Bundle, precision: Precision) -> Runtime:
    if name == "torch-cuda-compiled":
        return InPlaceRuntime.from_bundle(bundle, device="cuda", precision=precision, compiled=True)
    return load_runtime(name, bundle, precision=precision)


def not_here(name: str, error: Exception) -> NoReturn:
    pytest.skip(f"{name} is not here: this was not run ({error})")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, precision), id=f"{name}-{precision}", marks=[pytest.mark.compiles] if compiles else [])
        for name, compiles in COMPILE.items()
        for precision in FLOATS
    ],
)
def runtime(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[Runtime]:
    name, short = request.param
    if name == "tensorrt":
        no_engines = request.getfixturevalue("no_engines")  # not by name: the others need no engines
        if no_engines:
            pytest.skip(f"tensorrt has no engines: this was not run ({no_engines})")
        bundle = open_bundle(bundle.directory)  # again, with its engines
    try:
        yield load(name, bundle, FLOATS[short])
    except RuntimeUnavailable as error:
        not_here(name, error)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def free_memory() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 32])
def test_parity(
    runtime: Runtime, reference: TorchRuntime, sources: list[list[int]], batch_size: int, beam: int
) -> None:
    """In float32 every token, and numbers as close to float64 as PyTorch's own; in half precision the best token at 99.9 %
    (float16) and 99 % (bfloat16) of the steps, and outputs that are as good."""
    some = sources if batch_size > 1 else sources[::8]
    report = compare(reference, runtime, some, SearchOptions(beam=beam, max_length=64), batch_size=batch_size)
    assert report.passed, report.to_dict()
    if runtime.precision == "float32":
        assert report.identical == len(some)
    assert report.top1_agree >= {"float32": 1.0, "float16": 0.999, "bfloat16": 0.99}[runtime.precision] * report.steps


@pytest.mark.parametrize("beam", [1, 4])
def test_rows_follow_their_hypotheses_through_every_cache(
    runtime: Runtime, reference: TorchRuntime, sources: list[list[int]], beam: int
) -> None:
    """70 steps, past the caches of 32 and of 64 slots, with beams reordered and sentences dropped on the way."""
    src_ids, src_len = pad(sources[:5], reference.config.pad_id)
    random = np.random.default_rng(0)
    targets = random.integers(4, reference.config.tgt_vocab_size, (5 * beam, 70))
    targets[:, 0] = reference.config.bos_id
    state = runtime.encode(src_ids, src_len, beam=beam)
    history = np.zeros((5 * beam, 0), dtype=np.int64)
    sentence = np.repeat(np.arange(5), beam)
    drops = {20: [0, 1, 3, 4], 40: [1, 2], 60: [1]}  # of the sentences that are left
    for position in range(70):
        tokens = targets[: state.rows, position]
        logits, state = runtime.step(state, tokens)
        history = np.concatenate([history, tokens[:, None]], axis=1)
        if position % 9 == 8 or position in (0, 31, 32, 63, 64, 69):
            given = src_ids[sentence], src_len[sentence], history
            exact, own = (runs.teacher_forced(*given)[:, -1] for runs in (reference.in_float64(), reference))
            found = Rounding()
            found.add(*(float(np.abs(numbers).max()) for numbers in (logits - exact, own - exact, exact)))
            assert found.error <= LARGEST.get(runtime.precision, found.allowed("float32"))
        groups = np.arange(state.rows).reshape(-1, beam)
        if position in drops:
            groups = groups[drops[position]]
        if position % 3 == 0:  # from time to time two reorders follow each other, and often none
            groups = random.permuted(groups, axis=1)
        rows = groups.ravel()
        if len(rows) != state.rows or (rows != np.arange(len(rows))).any():
            state, history, sentence = state.select(rows), history[rows], sentence[rows]


@pytest.mark.parametrize("beam", [1, 4])
def test_no_step_takes_memory_and_known_shapes_take_none_again(
    runtime: Runtime, sources: list[list[int]], beam: int
) -> None:
    src_ids, src_len = pad(sources[:8], runtime.config.pad_id)
    reordered = np.arange(8 * beam).reshape(8, beam)[:, ::-1].ravel()

    def decode() -> tuple[list[int], list[np.ndarray]]:
        """The free memory after each step, and the best tokens."""
        state = runtime.encode(src_ids, src_len, beam=beam)
        tokens = np.full(8 * beam, runtime.config.bos_id)
        free, found = [], []
        for _ in range(30):
            best, state = runtime.best(state, tokens, 2 * beam)
            tokens = best.ids[:, 0]
            found.append(best.ids)
            state = state.select(reordered)
            free.append(free_memory())
        return free, found

    _, first = decode()
    search(runtime, sources[:3], SearchOptions(beam=beam, max_length=40))  # other shapes in between
    decode()  # both sets of the cache are recorded for both orders by now
    before = free_memory()
    free, again = decode()
    assert set(free[5:]) == {free[5]}
    assert free_memory() == before
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("beam", [1, 4])
def test_steps_made_at_once_find_what_single_steps_find(runtime: Runtime, sources: list[list[int]], beam: int) -> None:
    """Three times: launches are recorded the second time, and replayed the third."""
    capabilities = runtime.capabilities
    if not (capabilities.greedy_ahead if beam == 1 else capabilities.beam_ahead):
        pytest.skip(f"{runtime.name} makes no steps at once")
    from makers.ahead import on_host  # it imports ONNX Runtime, which the others need not have

    options = SearchOptions(beam=beam, nbest=beam, max_length=64)
    wanted = on_host(runtime, sources[:8], options)  # as many as stay in buffers of one size
    for _ in range(3):
        for one, other in zip(search(runtime, sources[:8], options), wanted, strict=True):
            assert [h.ids for h in one] == [h.ids for h in other]
            assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-4)


@pytest.mark.parametrize("precision", FLOATS)
def test_no_node_of_ort_cuda_falls_back_to_the_cpu(
    bundle: Bundle, precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tfexport.runtimes.ort"):
        try:
            load("ort-cuda", bundle, FLOATS[precision])
        except RuntimeUnavailable as error:
            not_here("ort-cuda", error)
    assert [record.getMessage() for record in caplog.records if "do not run in" in record.getMessage()] == []


def test_ort_cuda_decodes_without_pytorch(bundle: Bundle) -> None:
    """In a process of its own: where PyTorch is loaded, so are libraries that ONNX Runtime needs too."""
    try:
        load("ort-cuda", bundle, "float32")
    except RuntimeUnavailable as error:
        not_here("ort-cuda", error)
    outputs = []
    for name in ("ort-cuda", "ort-cpu"):
        decode = ["-m", "tfexport", "decode", str(bundle.directory), str(SENTENCES), "--runtime", name, "--beam", "4"]
        command = [sys.executable, "-X", "importtime", *decode, "--output-format", "ids"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "numpy" in imported
        assert "torch" not in imported
        outputs.append(done.stdout.splitlines())
    assert outputs[0] == outputs[1]


@pytest.mark.compiles
def test_pytorch_compiles_to_cuda_graphs(bundle: Bundle, sources: list[list[int]]) -> None:
    """PyTorch runs code without them, and says nothing, where something stands in their way."""
    from torch._dynamo.utils import counters

    try:
        runtime = load("torch-cuda-compiled", bundle, "float32")
    except RuntimeUnavailable as error:
        not_here("torch-cuda-compiled", error)
    torch._dynamo.reset()
    counters.clear()
    for _ in range(3):
        search(runtime, sources[:4], SearchOptions(beam=4, max_length=20))
    assert counters["inductor"]["cudagraph_skips"] == 0
    # Inputs that a graph would have to copy into memory of its own.
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] == 0


def test_float32_means_float32_in_pytorch(bundle: Bundle) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        load("torch-cuda", bundle, "float32")
    except RuntimeUnavailable as error:
        not_here("torch-cuda", error)
    assert torch.get_float32_matmul_precision() == "highest"
