"""Writing of bundles: into a temporary folder next to the target, which is moved into place when it is complete."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tfexport import contract
from tfexport.bundle.reader import CERTIFICATES, MANIFEST, TOKENIZER_FILES, Bundle, Engine, file_sha256, require_utf8
from tfexport.config import ModelConfig
from tfexport.contract import FORMAT
from tfexport.dialects import runtime_dialects
from tfexport.errors import BundleError
from tfexport.system.atomic_files import exchange, make_folder, partial_folder, sync_folder, sync_tree
from tfexport.system.ending import end_if_asked
from tfexport.system.regular_files import read_bytes, read_text

FLOAT32_ISLANDS = {
    "output projection": "half-precision logits tie: on 13,928 teacher-forced steps of a tutorial model on Multi30k the "
    "best token was PyTorch's at 99.89 % of the steps in float16, with this projection in float32 at 99.97 %; in "
    "bfloat16 99.57 % and 99.74 %",
}
"""The parts of a half-precision graph with logits that stay in float32, with the reason. (LayerNorm also computes mean and
variance in float32, by its definition in ONNX.)"""


def float32_islands(graph: contract.GraphSpec) -> dict[str, str]:
    """The parts of a half-precision `graph` that are in float32, with the reason."""
    has_logits = any(tensor.name == "logits" for tensor in graph.outputs)
    return FLOAT32_ISLANDS if has_logits and graph.precision in ("float16", "bfloat16") else {}


def graph_entry(graph: contract.GraphSpec, config: ModelConfig) -> dict[str, Any]:
    """The entry of an expanded graph in the manifest."""
    return {
        "role": graph.role,
        "file": graph.file,
        "precision": graph.precision,
        "dialect": graph.dialect,
        "float32_islands": float32_islands(graph),
        **contract.describe(graph, config),
    }


def write_manifest(
    folder: Path, config: ModelConfig, graphs: Sequence[contract.GraphSpec], facts: Mapping[str, Any]
) -> None:
    """Write the manifest of the files in `folder`, with the additional entries `facts`."""
    manifest = {
        **facts,
        "graphs": [graph_entry(graph, config) for graph in graphs],
        "config": config.to_dict(),
        "engines": [],
        "runtimes": runtime_dialects(graphs),
        "tokenizers": {side: name for side, name in TOKENIZER_FILES.items() if (folder / name).exists()},
    }
    _write(folder, manifest, {})


def _write(folder: Path, manifest: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Write the manifest of the files in `folder`. Files in `known` keep their entries."""
    files = {
        path.name: known.get(path.name) or {"sha256": file_sha256(path), "bytes": path.stat().st_size}
        for path in sorted(folder.iterdir())
        if path.name not in (MANIFEST, CERTIFICATES)
    }
    complete = {"format": FORMAT, **manifest, "files": files}
    (folder / MANIFEST).write_text(json.dumps(complete, indent=1) + "\n", encoding="utf-8")


@contextmanager
def with_engines(bundle: Bundle, engines: list[Engine]) -> Iterator[Path]:
    """A folder to write engine files into. When the block ends without an error, `engines` become the bundle's engines.

    The block fills `engines`; it may include some of `bundle.engines`, unchanged. The bundle is replaced as a whole.

    Raises:
        BundleError: the files cannot be written, the folder has foreign files, or another program changed the bundle.
    """
    path = bundle.directory / MANIFEST
    before = read_bytes(path)
    manifest = json.loads(before)
    others = sorted({path.name for path in bundle.directory.iterdir()} - {*bundle.files, MANIFEST, CERTIFICATES})
    if others:  # the folder is replaced as a whole
        raise BundleError(
            f"{bundle.directory} contains files that are not the bundle's: {', '.join(others[:5])}. Move them elsewhere."
        )
    with new_bundle(bundle.directory, force=True, remedy="make room there") as folder:
        for name in (*bundle.files, CERTIFICATES):
            with suppress(FileNotFoundError):  # a lost engine; all other files were just verified
                # Not a hard link: if this process is killed, ONNX refuses the weights, whose file then has two links.
                shutil.copyfile(bundle.directory / name, folder / name)
        yield folder
        kept = {engine.file for engine in engines}
        for engine in bundle.engines:
            if engine.file not in kept:
                (folder / engine.file).unlink(missing_ok=True)
        # Files that were not written now keep their checksum, so that damage stays detectable.
        old = {id(engine) for engine in bundle.engines}
        new = {engine.file for engine in engines if id(engine) not in old}
        known = {name: entry for name, entry in manifest["files"].items() if name not in new}
        there = [asdict(engine) for engine in engines if (folder / engine.file).exists()]
        _write(folder, {**manifest, "engines": there}, known)
        if read_bytes(path) != before:
            raise BundleError(f"{bundle.directory} was changed by another program during the build. Build again.")


@contextmanager
def new_bundle(
    directory: Path, *, force: bool = False, remedy: str = "make room, or give another folder with -o"
) -> Iterator[Path]:
    """A folder to write a bundle into. It is moved to `directory` when the block ends, and removed after an error.

    Raises:
        BundleError: `directory` exists already (`force` replaces a bundle, nothing else), or the files cannot be
            written.
    """
    directory = directory.resolve()  # a link to a bundle stays a link
    require_utf8(directory)
    refuse_to_overwrite(directory, force)
    try:
        make_folder(directory.parent)
        with partial_folder(directory) as folder:
            yield folder
            _make_durable(folder)
            move_into_place(folder, directory, lambda: refuse_to_overwrite(directory, force))
    except OSError as error:
        raise BundleError(
            f"cannot write the bundle {directory}: {error.strerror or error}. Nothing was changed there: {remedy}."
        ) from error


def refuse_to_overwrite(directory: Path, force: bool) -> None:
    """Raise BundleError if `directory` exists. `force` replaces bundles, and nothing else."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not _is_bundle(directory):
        raise BundleError(
            f"{directory} exists and is not a bundle, so it is not replaced. Give another folder with -o."
        )
    if not force:
        raise BundleError(f"{directory} exists. Replace it with --force, or give another folder with -o.")


def _is_bundle(directory: Path) -> bool:
    """Whether a folder looks like a bundle of any format; other programs also write a manifest.json."""
    try:
        manifest = json.loads(read_text(directory / MANIFEST))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and {"format", "graphs", "files"} <= set(manifest)


def _make_durable(folder: Path) -> None:
    """Flush the files to the disk before the move makes them a bundle, and set ordinary permissions."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~umask)
    folder.chmod(0o777 & ~umask)
    sync_tree(folder)


def move_into_place(folder: Path, directory: Path, refuse: Callable[[], None]) -> None:
    """Rename `folder` to `directory`. The former `directory` is then at `folder`, or removed.

    If the file system can exchange two names, `directory` has a complete bundle at every moment. Otherwise a process that
    is killed between two renames leaves the old bundle in `.NAME.*.old`. The names are on the disk when this function
    returns, so the old bundle may be removed.

    Args:
        refuse: function that raises if `directory` must not be replaced.

    Raises:
        OSError: the move failed. The former state is restored, as far as possible.
        KeyboardInterrupt, SystemExit: a signal arrived and its exception was lost.
    """
    end_if_asked()
    refuse()  # again: writing the folder took long, and `directory` may have appeared meanwhile
    try:
        folder.rename(directory)  # replaces nothing, or an empty folder
        sync_folder(directory.parent)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    refuse()  # `directory` may have appeared since the last check
    if exchange(folder, directory):
        sync_folder(directory.parent)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".old", dir=directory.parent))
    try:
        directory.rename(old)  # replaces the empty folder that reserves the name
        try:
            folder.rename(directory)
        except BaseException:
            with suppress(OSError):
                old.rename(directory)
            raise
        sync_folder(directory.parent)
    finally:
        # Remove only what is no longer needed: after a failure that could not be undone, the old bundle is the only one.
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
