"""Packed weights in files: written once, mapped by all, never trusted where they may be wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from makers.ort_bundles import CONFIG, random_model, random_sources, write_bundle
from tfexport import kernels
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.contract import Precision
from tfexport.errors import ReplacedBundleError, RuntimeUnavailable
from tfexport.runtimes import load_runtime
from tfexport.runtimes.ort_cpu import shared_weights
from tfexport.search.search import Hypothesis, SearchOptions, search
from tfexport.system import disk_cache

LARGER = CONFIG.replace(d_model=64, n_heads=4, d_ff=128, tgt_vocab_size=1100, output_bias=True)
"""Matrices larger than the longest vector, as in any model that is of use; a bias of an odd length."""

SOURCES = random_sources(CONFIG, [7, 1, 19, 3, 12])
SEARCHES = [SearchOptions(), SearchOptions(beam=3, nbest=3)]

pytestmark = pytest.mark.skipif(shared_weights.fcntl is None, reason="this system has no such locks")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed weights, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return disk_cache.folder() / "packed"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The graphs that are packed from now on."""
    graphs: list[str] = []
    pack = shared_weights._pack

    def watched(graph: Path, *arguments: Any) -> Any:
        graphs.append(graph.name)
        return pack(graph, *arguments)

    monkeypatch.setattr(shared_weights, "_pack", watched)
    return graphs


def found(
    bundle: Bundle, *, share_weights: bool = True, precision: Precision = "float32"
) -> list[list[list[Hypothesis]]]:
    runtime = load_runtime("ort-cpu", bundle, precision=precision, threads=1, share_weights=share_weights)
    scored = [search(runtime, SOURCES, options) for options in SEARCHES]
    unscored = search(runtime, SOURCES, SearchOptions(scores=False))  # by a graph of its own
    return [*scored, [[replace(one, score=0.0, log_prob=0.0) for one in found] for found in unscored]]


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose weights can be shared. Not to be changed."""
    folder = tmp_path_factory.mktemp("larger") / "bundle"
    return write_bundle(random_model(LARGER), folder, ["float32", "int8"]).directory


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("with_kernels", ["0", "1"])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_tokens_and_scores_are_those_of_weights_of_its_own(
    larger: Path, precision: Precision, with_kernels: str, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFEXPORT_KERNELS", with_kernels)
    bundle = open_bundle(larger)
    wanted = found(bundle, share_weights=False, precision=precision)
    assert not written
    assert found(bundle, precision=precision) == wanted  # written
    assert len(written) == 4
    assert not list(disk_cache.folder().glob("packed/.*"))
    assert found(bundle, precision=precision) == wanted  # read
    assert len(written) == 4


def test_weights_that_change_while_they_are_packed_are_not_kept(
    larger: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(Path(shutil.copytree(larger, tmp_path / "own")))
    weights = bundle.directory / "weights.safetensors"

    def changed(*given: Any) -> Any:
        weights.replace(weights.with_name("before"))
        shutil.copy(weights.with_name("before"), weights)
        return cpu_session(*given)

    cpu_session = shared_weights.cpu_session
    monkeypatch.setattr(shared_weights, "cpu_session", changed)
    with pytest.raises(ReplacedBundleError):
        load_runtime("ort-cpu", bundle, threads=1, share_weights=True)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


COPIED = """
import sys
from pathlib import Path

import tfexport.runtimes.ort_cpu.runtime
from tfexport.bundle.reader import open_bundle
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, search

def copied():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

bundle = open_bundle(Path(sys.argv[1]))
before = copied()
runtime = load_runtime("ort-cpu", bundle, threads=1, share_weights=sys.argv[2] == "shared")
search(runtime, [[4, 5, 6]], SearchOptions(max_length=4))
print(copied() - before)
"""
"""Prints the KiB that are in no file, after a bundle is loaded and used: a page of a file is one of them once it is
written to."""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_are_mapped_and_not_copied(tmp_path: Path) -> None:
    config = CONFIG.replace(d_model=256, n_heads=4, d_ff=1024, src_vocab_size=2000, tgt_vocab_size=12_000)
    bundle = write_bundle(random_model(config), tmp_path / "bundle")

    def copied(how: str) -> int:
        command = [sys.executable, "-c", COPIED, str(bundle.directory), how]
        return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)

    copied("shared")  # packs
    assert copied("shared") < 0.25 * copied("own")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a byte": lambda place: flip(place / shared_weights.WEIGHTS),
    "a byte of the graph": lambda place: flip(place / shared_weights.GRAPH),
    "cut": lambda place: os.truncate(place / shared_weights.WEIGHTS, 5000),
    "no weights": lambda place: (place / shared_weights.WEIGHTS).unlink(),
    "no checksums": lambda place: (place / shared_weights.CHECKSUMS).unlink(),
    "other checksums": lambda place: (place / shared_weights.CHECKSUMS).write_text("[" * 9),
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 64
    path.write_bytes(content)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_written_again(larger: Path, cache: Path, damage: str, written: list[str]) -> None:
    bundle = open_bundle(larger)
    wanted = found(bundle)
    for place in cache.glob("*/"):
        DAMAGE[damage](place)
    assert found(bundle) == wanted
    assert len(written) == 8
    assert found(bundle) == wanted
    assert len(written) == 8
    assert not list(cache.glob(".*"))


def test_what_a_killed_process_left_is_removed(larger: Path, cache: Path) -> None:
    bundle = open_bundle(larger)
    found(bundle)
    for place in cache.glob("*/"):
        place.rename(place.with_name(f".{place.name}.killed"))
    found(bundle)
    assert not list(cache.glob(".*"))


def test_of_processes_that_begin_together_one_writes(
    larger: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads with runtimes of their own: the locks are on files, whoever opened them."""
    is_whole = shared_weights._is_whole

    def slow(place: Path) -> bool:
        found = is_whole(place)
        time.sleep(0.05)  # so that all of them have looked before one begins
        return found

    monkeypatch.setattr(shared_weights, "_is_whole", slow)
    bundle = open_bundle(larger)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: found(bundle), range(4)))
    assert sorted(written) == [
        "beam_step.ort.onnx",
        "decoder_step.ort.onnx",
        "encoder.ort.onnx",
        "greedy_step.ort.onnx",
    ]
    assert all(one == together[0] for one in together)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("what", ["cpu", "instruction set", "onnxruntime", "bundle"])
def test_another_cpu_library_or_bundle_has_weights_of_its_own(
    larger: Path, tmp_path: Path, what: str, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found(open_bundle(larger))
    own_bundle = Path(shutil.copytree(larger, tmp_path / "own"))
    bundle = open_bundle(own_bundle)
    found(bundle)
    assert len(written) == 4  # a copy is the same bundle
    if what == "cpu":
        monkeypatch.setattr(shared_weights, "cpu_identity", lambda: "one without AVX")
    elif what == "instruction set":
        path = kernels.library()
        if path is None or len(names := kernels.supported_instruction_sets(path)) == 1:
            pytest.skip("there are kernels for one instruction set here, or none")
        monkeypatch.setenv(kernels.ISA, names[-1])
    elif what == "onnxruntime":
        monkeypatch.setattr(shared_weights.onnxruntime, "__version__", "2.0.0")
    else:
        manifest = json.loads((own_bundle / "manifest.json").read_text(encoding="utf-8"))
        manifest["files"]["more"] = {"sha256": shared_weights.file_sha256(own_bundle / "weights.safetensors")}
        (own_bundle / "more").write_bytes((own_bundle / "weights.safetensors").read_bytes())
        (own_bundle / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        bundle = open_bundle(own_bundle)
    found(bundle)
    assert len(written) == 8


def no_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime cannot write; it says so as it does when a disk is full."""
    write_to = shared_weights._write_to
    monkeypatch.setattr(shared_weights, "_write_to", lambda folder, *others: write_to(folder / "not there", *others))


def a_file_in_its_place(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_bytes(b"")


def open_to_others(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)


def parent_open_to_others(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    cache.parent.chmod(0o770)


def of_another_user(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    monkeypatch.setattr(shared_weights.os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (no_room, "make room on the disk"),
        (a_file_in_its_place, "(Not a directory|File exists)"),
        (open_to_others, "other users may write to"),
        (parent_open_to_others, "other users may write to"),
        (of_another_user, "other users may write to"),
    ],
)
def test_where_weights_cannot_be_shared_it_is_told_and_decoding_goes_on(
    larger: Path,
    cache: Path,
    trouble: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bundle = open_bundle(larger)
    wanted = found(bundle, share_weights=False)
    trouble(cache, monkeypatch)
    assert found(bundle) == wanted
    told = caplog.records[0].getMessage()
    assert re.match(f"warning: the weights of encoder.ort.onnx are not shared: .*{reason}.* a copy of its own", told)
    assert not cache.is_dir() or not list(cache.glob("*/"))


def test_the_folder_is_the_user_s_alone(larger: Path, cache: Path) -> None:
    found(open_bundle(larger))
    assert cache.stat().st_mode & 0o777 == 0o700


def test_vectors_longer_than_d_model_shift_no_weights(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 120 numbers together, so that the bias of query, key and value has 360: their 1440 bytes are no multiple of
    64, and d_model says nothing of them. Without our kernels, which read weights from wherever they lie."""
    monkeypatch.setenv("TFEXPORT_KERNELS", "0")
    config = LARGER.replace(d_model=16, n_heads=5, d_head=24, d_ff=64, tgt_vocab_size=48)
    bundle = write_bundle(random_model(config), tmp_path / "bundle")
    assert found(bundle) == found(bundle, share_weights=False)
    assert len(list(cache.glob("*/"))) == 4


@pytest.mark.parametrize("runtime", ["torch", "ort-cpu"])
def test_what_cannot_share_weights_says_so(quantized_bundle: Path, runtime: str) -> None:
    precision: Precision = "int4" if runtime == "ort-cpu" else "float32"
    with pytest.raises(RuntimeUnavailable, match=r"share.weights"):
        load_runtime(runtime, open_bundle(quantized_bundle), precision=precision, share_weights=True)


@pytest.mark.parametrize("aligned", [True, False])
def test_packed_weights_between_whole_addresses_are_not_used(
    tmp_path: Path, cache: Path, aligned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a d_model of 72 the matrices have odd sizes. Loaded nevertheless, they may end the process: without our kernels,
    which read weights from wherever they lie."""
    monkeypatch.setenv("TFEXPORT_KERNELS", "0")
    config = LARGER if aligned else LARGER.replace(d_model=72, n_heads=9, d_ff=132)
    bundle = write_bundle(random_model(config), tmp_path / "bundle")
    assert found(bundle) == found(bundle, share_weights=False)
    assert (len(list(cache.glob("*/"))) == 4) == aligned
    assert ("no multiples of 16" in caplog.text) != aligned


@pytest.mark.thorough
def test_the_command_shares_weights(larger: Path, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "input.txt").write_text("4 5\n9\n")
    command = [sys.executable, "-m", "tfexport", "decode", str(larger), str(tmp_path / "input.txt")]
    outputs = []
    for flags in ([], ["--share-weights"], ["--share-weights"]):
        done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60, check=True)
        outputs.append(done.stdout)
        assert ("packed weights" in done.stderr) == (len(outputs) == 2)
    assert outputs[0] == outputs[1] == outputs[2] != ""
    assert len(list(cache.glob("*/"))) == 2  # encoder and greedy step
