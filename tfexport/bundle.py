"""The bundle: the folder that export writes and every runtime reads.

`manifest.json` names each file with its sha256, so that a changed or cut file is never decoded from. A bundle is written
into a temporary folder beside its place and moved there when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.contract import Dialect, Precision, Role
from tfexport.errors import BundleError
from tfexport.tokenizers import TextTokenizer

FORMAT = 2
PORTABLE = "portable"
"""In place of a GPU generation: an engine for all generations that TensorRT for RTX knows."""
MANIFEST = "manifest.json"
TOKENIZER_FILES = {"source": "source_tokenizer.json", "target": "target_tokenizer.json"}


Library = Literal["tensorrt", "tensorrt_rtx"]
"""What builds and runs engines: TensorRT, and TensorRT for RTX."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a bundle was exported from."""

    sha256: str
    family: str
    given: Mapping[str, Any]
    """The config fields that it does not tell itself."""


@dataclass(frozen=True)
class Graph:
    """One ONNX graph in a bundle."""

    file: str
    role: Role
    precision: Precision
    dialect: Dialect


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One TensorRT engine in a bundle, and what it can be run on and with."""

    file: str
    role: Role
    precision: Precision
    library: Library
    version: str
    """Of the library: engines are not read by another one."""
    gpu: str
    """`sm89` and the like, or `portable`."""
    cache: int
    """Slots of the cache of a `decoder_step`, 0 for the other roles."""
    profile: Mapping[str, list[list[int]]]
    """For every input its smallest, usual and largest shape."""
    seconds: float
    """How long the build took."""

    @property
    def about(self) -> str:
        """`decoder_step fp16 sm89 cache 64`."""
        cache = f" cache {self.cache}" if self.cache else ""
        return f"{self.role} {contract.short_name(self.precision)} {self.gpu}{cache}"


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files were all found as its manifest says."""

    directory: Path
    config: ModelConfig
    origin: Origin
    graphs: tuple[Graph, ...]
    engines: tuple[Engine, ...]
    tokenizers: Mapping[str, str]
    """File names by side."""
    files: Mapping[str, str]
    """The sha256 of each file by its name."""

    @property
    def precisions(self) -> list[Precision]:
        """The precisions that its graphs come in."""
        return list(dict.fromkeys(graph.precision for graph in self.graphs))

    def graph(self, role: Role, precision: Precision = "float32", dialect: Dialect = "onnx24") -> Path:
        """The path of a graph.

        Raises:
            BundleError: this bundle has none of this role, precision and dialect.
        """
        roles = {graph.role for graph in self.graphs}
        if role not in roles:
            if "encoder_classifier" in roles:
                raise BundleError(
                    f"{self.directory} is an encoder classifier, which has nothing to decode. Run its "
                    "encoder_classifier.onnx, or give the bundle of a translation model."
                )
            has = ", ".join(sorted(roles))
            raise BundleError(f"{self.directory} has no {role} graph, only {has}. Give a bundle of the other kind.")
        for graph in self.graphs:
            if (graph.role, graph.precision, graph.dialect) == (role, precision, dialect):
                return self.directory / graph.file
        short = contract.short_name(precision)
        raise BundleError(
            f"{self.directory} has no {short} {role} graph for this runtime. Export again with --precision {short}."
        )

    @property
    def weights(self) -> Path:
        """The canonical float32 weights, safetensors."""
        return self.directory / contract.WEIGHTS_FILE

    def tokenizer(self, side: str) -> TextTokenizer | None:
        """The tokenizer of `source` or `target`; None where this bundle reads or writes ids.

        Raises:
            BundleError, TokenizerError: its file cannot be read.
        """
        name = self.tokenizers.get(side)
        if name is None:
            return None
        path = self.directory / name
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BundleError(f"{path} cannot be read: {error}. Export the checkpoint again.") from error
        return TextTokenizer.from_dict(fields, where=str(path))


def open_bundle(directory: Path) -> Bundle:
    """Open a bundle and verify every file against the manifest.

    Raises:
        BundleError: it is missing, incomplete, altered, or of a newer format.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise BundleError(f"{directory} is not a bundle: it has no {MANIFEST}. Make one with `tfexport export CKPT`.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found = manifest["format"]
        if type(found) is not int or found != FORMAT:
            raise BundleError(
                f"{directory} is of bundle format {found!r}, this version reads {FORMAT}. Export the checkpoint again, "
                "or use the version of tfexport that wrote it."
            )
        files = {str(name): str(entry["sha256"]) for name, entry in manifest["files"].items()}
        source = manifest["source"]
        bundle = Bundle(
            directory,
            ModelConfig.from_dict(manifest["config"], where=str(path)),
            Origin(str(source["sha256"]), str(source["family"]), dict(source["given"])),
            tuple(map(_read_graph, manifest["graphs"])),
            tuple(map(_read_engine, manifest["engines"])),
            {str(side): str(name) for side, name in manifest["tokenizers"].items()},
            files,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read: {error!r}. Export the checkpoint again.") from error
    named = {graph.file for graph in bundle.graphs} | {engine.file for engine in bundle.engines}
    unlisted = sorted({contract.WEIGHTS_FILE, *named, *bundle.tokenizers.values()} - set(files))
    if unlisted:
        raise BundleError(f"{path} does not list {', '.join(unlisted)}. Export the checkpoint again.")
    for name, sha256 in files.items():
        _verify(directory, name, sha256)
    return bundle


def _read_graph(fields: Mapping[str, Any]) -> Graph:
    """Raises KeyError, TypeError or ValueError where the manifest has something else."""
    names = {key: str(fields[key]) for key in ("file", "role", "dialect")}
    return Graph(names["file"], _role(fields), _precision(fields), names["dialect"])  # type: ignore[arg-type]


def _read_engine(fields: Mapping[str, Any]) -> Engine:
    """Raises KeyError, TypeError or ValueError where the manifest has something else."""
    if fields["library"] not in get_args(Library):
        raise ValueError(f"{fields['library']!r} is no library of engines")
    return Engine(
        file=str(fields["file"]),
        role=_role(fields),
        precision=_precision(fields),
        library=fields["library"],
        version=str(fields["version"]),
        gpu=str(fields["gpu"]),
        cache=int(fields["cache"]),
        profile={
            str(name): [[int(size) for size in shape] for shape in shapes] for name, shapes in fields["profile"].items()
        },
        seconds=float(fields["seconds"]),
    )


def _role(fields: Mapping[str, Any]) -> Role:
    if fields["role"] not in get_args(Role):
        raise ValueError(f"{fields['role']!r} is no role of a graph")
    return fields["role"]


def _precision(fields: Mapping[str, Any]) -> Precision:
    if fields["precision"] not in get_args(Precision):
        raise ValueError(f"{fields['precision']!r} is no precision")
    return fields["precision"]


def _verify(directory: Path, name: str, sha256: str) -> None:
    pure = PurePosixPath(name)
    if pure.name != name or name in ("", ".", ".."):
        raise BundleError(
            f"{directory / MANIFEST} names {name!r}, which is outside the bundle. Do not use this bundle."
        )
    path = directory / name
    try:
        found = file_sha256(path)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise BundleError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}. Export the checkpoint again."
        ) from error
    if found != sha256:
        raise BundleError(f"{path} is not what was exported (its sha256 differs). Export the checkpoint again.")


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(
    folder: Path, config: ModelConfig, graphs: Sequence[contract.GraphSpec], facts: Mapping[str, Any]
) -> None:
    """Write the manifest of the files that lie in `folder`; `facts` are added to it."""
    entries = [
        {
            "role": graph.role,
            "file": graph.file,
            "precision": graph.precision,
            "dialect": graph.dialect,
            "float32_islands": contract.float32_islands(graph),
            **contract.describe(graph, config),
        }
        for graph in graphs
    ]
    tokenizers = {side: name for side, name in TOKENIZER_FILES.items() if (folder / name).exists()}
    _write(folder, {**facts, "config": config.to_dict(), "graphs": entries, "engines": [], "tokenizers": tokenizers})


def _write(folder: Path, manifest: Mapping[str, Any]) -> None:
    files = {
        path.name: {"sha256": file_sha256(path), "bytes": path.stat().st_size}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    complete = {"format": FORMAT, **manifest, "files": files}
    (folder / MANIFEST).write_text(json.dumps(complete, indent=1) + "\n", encoding="utf-8")


@contextmanager
def with_engines(bundle: Bundle, engines: list[Engine]) -> Iterator[Path]:
    """A folder to write engine files into; when the block ends well, `engines` are those that the bundle has.

    The block fills `engines`, and may keep some that the bundle has already. The bundle is replaced as a whole.

    Raises:
        BundleError: the files cannot be written.
    """
    manifest = json.loads((bundle.directory / MANIFEST).read_text(encoding="utf-8"))
    with new_bundle(bundle.directory, force=True) as folder:
        for name in bundle.files:
            link_or_copy(bundle.directory / name, folder / name)
        yield folder
        kept = {engine.file for engine in engines}
        for engine in bundle.engines:
            if engine.file not in kept:
                (folder / engine.file).unlink()
        _write(folder, {**manifest, "engines": [asdict(engine) for engine in engines]})


def link_or_copy(source: Path, target: Path) -> None:
    """Give `source` a second name, or copy it."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


@contextmanager
def new_bundle(directory: Path, *, force: bool = False) -> Iterator[Path]:
    """A folder to write a bundle into, moved to `directory` when the block ends well and removed when it does not.

    Raises:
        BundleError: there is something at `directory` already (`force` replaces a bundle, nothing else), or the
            files cannot be written.
    """
    directory = directory.resolve()  # a link to a bundle stays a link
    _refuse_to_overwrite(directory, force)
    folder: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".partial", dir=directory.parent))
        yield folder
        _make_durable(folder)
        _refuse_to_overwrite(directory, force)  # again: an export takes long enough for something to come there
        move_into_place(folder, directory)
    except OSError as error:
        raise BundleError(
            f"cannot write the bundle {directory}: {error.strerror or error}. Nothing was changed there: make room, or "
            "give another folder with -o."
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _refuse_to_overwrite(directory: Path, force: bool) -> None:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not _is_bundle(directory):
        raise BundleError(
            f"{directory} exists and is not a bundle, so it is not replaced. Give another folder with -o."
        )
    if not force:
        raise BundleError(f"{directory} exists. Replace it with --force, or give another folder with -o.")


def _is_bundle(directory: Path) -> bool:
    """Whether a folder looks like a bundle of any format: other programs, too, have a manifest.json."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and {"format", "graphs", "files"} <= set(manifest)


def _make_durable(folder: Path) -> None:
    """Flush to the disk before the move says that the bundle is whole, and give it ordinary permissions."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~umask)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    folder.chmod(0o777 & ~umask)


def move_into_place(folder: Path, directory: Path) -> None:
    """Rename `folder` to `directory`, in the place of what is there.

    Raises:
        OSError: that is not possible; then everything is as it was, as far as it can be.
    """
    if not (directory.exists() and any(directory.iterdir())):
        folder.rename(directory)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".old", dir=directory.parent))
    try:
        directory.rename(old)  # onto the empty folder just made, which holds the name
        try:
            folder.rename(directory)
        except BaseException:
            with suppress(OSError):
                old.rename(directory)
            raise
    finally:
        # Only what is no longer needed: after a failure that could not be undone, the old bundle is all there is.
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
