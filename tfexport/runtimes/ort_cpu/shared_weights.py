"""Packed weights in files, so that all processes over one bundle share them in memory.

ONNX Runtime maps the weights of a bundle into memory, but matrix products read packed copies of them, which each process and
graph has for itself. ONNX Runtime can also write a graph together with its packed matrices, and map those later:

    ~/.cache/tfexport/packed/KEY/   graph.onnx     the graph as ONNX Runtime optimised it
                                    weights.bin    its weights, plain and packed; only the packed ones are read
                                    checksums.json of these two, against full and damaged disks

KEY is a digest of the bundle's files, ONNX Runtime and the CPU: each CPU packs in its own way. ONNX Runtime trusts the
content of these files, so they are read only if nobody but this user could have written them. They can be deleted at any
time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnxruntime

from tfexport import kernels
from tfexport.bundle.reader import Bundle, file_sha256
from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.errors import BundleError, RuntimeUnavailable
from tfexport.runtimes.ort import cpu_session
from tfexport.system import disk_cache
from tfexport.system.file_locks import fcntl
from tfexport.system.processes import cpu_identity

GRAPH = "graph.onnx"
WEIGHTS = "weights.bin"
CHECKSUMS = "checksums.json"
FORMAT = 1
"""The format of the folders. Raise it when they, or the options of the sessions that write them, change."""

PRECISIONS: tuple[Precision, ...] = ("float32", "int8")
"""The precisions whose packed weights can be kept. With int4, ONNX Runtime 1.31 gives other tokens after reading them."""

ALIGNMENT = 64
"""Kernels need packed weights at multiples of so many bytes; unaligned reads end the process. ONNX Runtime aligns tensors
above 1 MiB only."""

PACKED = re.compile(rb"prepacked_\d+\x12[^|]{1,99}((?:\|\d+;\d+;\d+)+)", re.DOTALL)
"""The places of packed weights as a graph has them: |offset;length;checksum of each part."""


class NotShared(Exception):
    """Weights cannot be shared, for this reason. Never leaves this module."""


def shared_session(bundle: Bundle, graph: Path, threads: int | None) -> onnxruntime.InferenceSession:
    """A session of a graph of `bundle` whose packed weights are mapped from a file. The file is written if it is missing.

    If that is not possible (a full disk, a folder that others may write to), a warning is logged, and the session has its
    own packed weights. The results are the same.

    Raises:
        RuntimeUnavailable: this system cannot lock and map files in this way.
        BundleError: ONNX Runtime cannot load the graph.
    """
    if fcntl is None:
        raise RuntimeUnavailable("--share-weights is for Linux and macOS. Leave it out.")
    try:
        place = _folder() / _key(bundle, graph)
        with _lock(place) as lock:
            if not _is_whole(place):
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_whole(place):  # while this process waited, another may have written it
                    return _pack(graph, bundle, place, threads)
            return _mapped(place, threads)
    except (OSError, NotShared, BundleError) as error:
        logging.getLogger(__name__).warning(
            "warning: the weights of %s are not shared: %s. This process has a copy of its own.", graph.name, error
        )
        return cpu_session(graph, threads)


def _key(bundle: Bundle, graph: Path) -> str:
    """A digest of everything on which packed weights depend."""
    library = kernels.library()
    # The stored graph calls the kernels that the library has for the instruction set, or none.
    computes = None if library is None else [file_sha256(library), kernels.instruction_sets()]
    facts = [FORMAT, graph.name, sorted(bundle.files.items()), onnxruntime.__version__, cpu_identity(), computes]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _folder() -> Path:
    """The folder of all packed weights, which only this user may write to.

    Raises:
        OSError: it cannot be made.
        NotShared: others can write to it.
    """
    try:
        return disk_cache.own_folder("packed")
    except disk_cache.NotOwned as error:
        raise NotShared(str(error)) from error


@contextmanager
def _lock(place: Path) -> Iterator[int]:
    """A lock on `place`, shared with other readers. It ends with the process."""
    assert fcntl is not None  # `shared_session` raises without it
    lock = os.open(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield lock
    finally:
        os.close(lock)


def _is_whole(place: Path) -> bool:
    """Whether both files are as they were written."""
    try:
        wanted = json.loads((place / CHECKSUMS).read_text(encoding="utf-8"))
        return bool(wanted == _checksums(place))
    except (OSError, ValueError, RecursionError):
        return False


def _checksums(place: Path) -> dict[str, str]:
    return {name: file_sha256(place / name) for name in (GRAPH, WEIGHTS)}


def _longest_vector(config: ModelConfig) -> int:
    """Bytes of the longest vector of a model, such as a bias. In the file, their odd lengths would misalign the weights."""
    joined = 2 * config.n_decoder_layers * config.d_attention  # the bias of the cross keys and values of all layers
    widths = (config.d_model, config.d_ff, 3 * config.d_attention, joined)
    return 4 * max(config.src_vocab_size, config.tgt_vocab_size, *widths)


def _pack(graph: Path, bundle: Bundle, place: Path, threads: int | None) -> onnxruntime.InferenceSession:
    """Write the packed form of `graph` to `place`, and load it from there.

    Raises:
        OSError, NotShared: it cannot be written.
        BundleError: what was written cannot be loaded, or the bundle was replaced meanwhile.
    """
    smallest = _longest_vector(bundle.config)
    for left in place.parent.glob(f".{place.name}.*"):  # left by killed processes
        shutil.rmtree(left, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        with bundle.loading():  # later processes trust what is written here
            try:
                cpu_session(graph, threads, lambda options: _write_to(partial, options, smallest + 1))
            except BundleError as error:  # or it cannot load the graph at all; then the session of its own raises that
                raise NotShared("ONNX Runtime could not write them: make room on the disk") from error
        _require_aligned(partial / GRAPH)
        checksums = json.dumps(_checksums(partial))
        session = _mapped(partial, threads)  # before other processes find it
        (partial / CHECKSUMS).write_text(checksums, encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)  # damaged files; processes that map them keep them
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    size = (place / WEIGHTS).stat().st_size / 1e6
    logging.getLogger(__name__).warning("note: packed weights (%.0f MB) are kept in %s", size, place)
    return session


def _require_aligned(graph: Path) -> None:
    """Raises NotShared if packed weights are not aligned, or if there are none."""
    content = graph.read_bytes()
    packed = PACKED.findall(content)
    offsets = [int(offset) for parts in packed for offset in re.findall(rb"\|(\d+);", parts)]
    if len(packed) != content.count(b"prepacked_"):
        raise NotShared("this version of ONNX Runtime writes packed weights in another way")
    if any(offset % ALIGNMENT for offset in offsets) or not (offsets or kernels.has_products()):
        raise NotShared("the sizes of this model's layers are no multiples of 16, or too small to be worth it")


def _write_to(folder: Path, options: onnxruntime.SessionOptions, smallest: int) -> None:
    """Args:
    smallest: bytes above which a tensor is stored in the file and not in the graph, and its packed form is kept.
    """
    options.optimized_model_filepath = str(folder / GRAPH)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", WEIGHTS)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", str(smallest))
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")


def _mapped(place: Path, threads: int | None) -> onnxruntime.InferenceSession:
    return cpu_session(place / GRAPH, threads, _without_optimization)


def _without_optimization(options: onnxruntime.SessionOptions) -> None:
    """The graph was optimized when it was written, and packed weights belong to these nodes."""
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
