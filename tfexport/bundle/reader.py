"""The bundle: the folder that export writes and every runtime reads.

`manifest.json` lists each file with its sha256, so that a changed or truncated file is never used; see
`bundle/verified_files.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tfexport import contract
from tfexport.bundle.graph_files import check_graph_file
from tfexport.bundle.verified_files import VerifiedFiles
from tfexport.config import ModelConfig
from tfexport.confirmation import Confirmation
from tfexport.contract import ATTENTION_ROLES, FORMAT, Dialect, Precision, Role
from tfexport.errors import BundleError
from tfexport.system.regular_files import open_regular, read_text
from tfexport.text.tokenizers import TextTokenizer

PORTABLE = "portable"
"""In place of a GPU generation: an engine for all generations that TensorRT for RTX names, from Ampere on."""
MANIFEST = "manifest.json"
CERTIFICATES = "certificates.json"
"""The comparisons with PyTorch that the bundle passed, next to the manifest; see `verification/certificates.py`."""
GENERATION_CONFIG = "generation_config.json"
"""The search options of the checkpoint's library, if the checkpoint has such a file."""
TOKENIZER_FILES = {"source": "source_tokenizer.json", "target": "target_tokenizer.json"}


Library = Literal["tensorrt", "tensorrt_rtx"]
"""The libraries that build and run engines: TensorRT, and TensorRT for RTX."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a bundle was exported from."""

    sha256: str
    family: str
    given: Mapping[str, Any]
    """Config fields that the user gave because the checkpoint does not contain them."""
    notes: tuple[str, ...] = ()
    """Notes of the export about the checkpoint."""
    text: Mapping[str, Any] = field(default_factory=dict)
    """Options of the text that the user gave at the export, such as vocabulary files and languages, by the names of their
    flags. Paths are relative to the checkpoint's folder."""
    file: str = "the checkpoint"
    """The name of the checkpoint's file or folder."""
    confirmation: Confirmation = field(default_factory=Confirmation)
    """Who confirms that the settings are those of the owner's code."""


@dataclass(frozen=True)
class Graph:
    """One ONNX graph in a bundle."""

    file: str
    role: Role
    precision: Precision
    dialect: Dialect


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One TensorRT engine in a bundle, with the GPU, library and shapes that it was built for."""

    file: str
    role: Role
    precision: Precision
    library: Library
    version: str
    """Version of the library. Other versions cannot read the engine."""
    gpu: str
    """GPU generation such as `sm89`, or `portable`."""
    cache: int
    """Cache slots of a `decoder_step`; 0 for the other roles."""
    profile: Mapping[str, list[list[int]]]
    """Smallest, usual and largest shape of each input."""
    seconds: float
    """Build time."""

    @property
    def about(self) -> str:
        """A short description, such as `decoder_step fp16 sm89 cache 64`."""
        cache = f" cache {self.cache}" if self.cache else ""
        return f"{self.role} {contract.short_name(self.precision)} {self.gpu}{cache}"


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files match its manifest.

    Open a bundle once, and pass this object on. Then all that is loaded and judged belongs to the manifest of this object.
    """

    directory: Path
    """Without symbolic links: a link that is set to another bundle later has no effect."""
    config: ModelConfig
    origin: Origin
    graphs: tuple[Graph, ...]
    engines: tuple[Engine, ...]
    dialects: Mapping[str, Mapping[str, Dialect]]
    """The dialect that each runtime uses, by precision."""
    tokenizers: Mapping[str, str]
    """Tokenizer file of each side."""
    files: Mapping[str, str]
    """The sha256 of each file, by name."""
    in_float32: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules that stay in float32 for a budget, by precision."""
    generation_config: Mapping[str, Any] | None = None
    """Default search options of the checkpoint's library; see `decoding/generation_config.py`."""
    _tokenizers: dict[str, TextTokenizer] = field(default_factory=dict, compare=False, repr=False)
    """Tokenizers by side, as first read; later changes of the files have no effect."""
    _checked_graphs: set[str] = field(default_factory=set, compare=False, repr=False)
    """Graph files that were checked."""
    _verified: VerifiedFiles = field(default_factory=VerifiedFiles, compare=False, repr=False)
    """None of a bundle that is being written."""

    @property
    def precisions(self) -> list[Precision]:
        """The precisions of its graphs."""
        return list(dict.fromkeys(graph.precision for graph in self.graphs))

    def dialect(self, runtime: str, precision: Precision) -> Dialect:
        """The dialect of the graphs that a runtime uses; the portable one if the bundle does not record any."""
        return self.dialects.get(runtime, {}).get(precision, "onnx24")

    def has_graph(self, role: Role, precision: Precision, dialect: Dialect) -> bool:
        return any((graph.role, graph.precision, graph.dialect) == (role, precision, dialect) for graph in self.graphs)

    def graph(self, role: Role, precision: Precision = "float32", dialect: Dialect = "onnx24") -> Path:
        """The path of a graph, checked to be one that the exporter writes; see `bundle/graph_files.py`.

        Raises:
            BundleError: the bundle has no graph of this role, precision and dialect, or the graph fails the check.
        """
        roles = {graph.role for graph in self.graphs}
        if role in ATTENTION_ROLES.values() and not self.has_graph(role, precision, dialect):
            raise BundleError(
                f"{self.directory} has no graphs that return attention. Export again with --alignments, or "
                "decode with --runtime torch."
            )
        if role not in roles:
            if "encoder_classifier" in roles:
                raise BundleError(
                    f"{self.directory} is an encoder classifier, which has nothing to decode. Use "
                    "`tfexport classify`, or give the bundle of a translation model."
                )
            if role == "encoder_classifier":
                raise BundleError(
                    f"{self.directory} is a translation model, which has no classes. Use `tfexport decode`."
                )
            has = ", ".join(sorted(roles))
            raise BundleError(f"{self.directory} has no {role} graph, only {has}. Give a bundle of the other kind.")
        for graph in self.graphs:
            if (graph.role, graph.precision, graph.dialect) == (role, precision, dialect):
                self._check_graph(graph.file)
                return self.directory / graph.file
        short = contract.short_name(precision)
        raise BundleError(
            f"{self.directory} has no {short} {role} graph for this runtime. Export again with --precision {short}."
        )

    def _check_graph(self, name: str) -> None:
        if name in self._checked_graphs or not self.files:  # a bundle that is being written lists no files yet
            return
        listed = [self.directory / file for file in self.files if file.endswith(".safetensors")]
        with self.loading():
            check_graph_file(self.directory / name, {path.name: path.stat().st_size for path in listed})
        self._checked_graphs.add(name)

    def engine(self, engine: Engine) -> Path:
        """The path of an engine, after its checksum is verified. Load it within `loading`.

        Raises:
            BundleError: the engine is missing or altered.
        """
        self._verified.verify(engine.file, f"Build again: tfexport build {self.directory}.")
        return self.directory / engine.file

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load graphs, weights or engines in this block. What is loaded has the sums in `files`.

        Raises:
            ReplacedBundleError: a file was replaced or written to after the bundle was opened, or during the block.
        """
        with self._verified.loading():
            yield

    @property
    def weights(self) -> Path:
        """The path of the canonical float32 weights (safetensors)."""
        return self.directory / contract.WEIGHTS_FILE

    def tokenizer(self, side: str) -> TextTokenizer | None:
        """The tokenizer of `source` or `target`; None if the bundle reads or writes ids.

        Raises:
            BundleError, TokenizerError: the tokenizer's file cannot be read.
        """
        name = self.tokenizers.get(side)
        if name is None or side in self._tokenizers:
            return self._tokenizers.get(side)
        path = self.directory / name
        try:
            with self.loading():
                fields = json.loads(read_text(path))
        except (OSError, ValueError, RecursionError) as error:
            raise BundleError(f"{path} cannot be read: {error}. Export the checkpoint again.") from error
        self._tokenizers[side] = TextTokenizer.from_dict(fields, where=str(path))
        return self._tokenizers[side]


def open_bundle(directory: Path) -> Bundle:
    """Open a bundle and verify its files against the manifest, except engines, which `Bundle.engine` verifies.

    The manifest is read once. A path with symbolic links is resolved once, so it may be set to another bundle at any time.

    Raises:
        BundleError: the bundle is missing, incomplete, altered, or of another format.
    """
    if not (directory / MANIFEST).is_file():
        raise BundleError(f"{directory} is not a bundle: it has no {MANIFEST}. Make one with `tfexport export CKPT`.")
    if (real := os.path.realpath(directory)) != os.path.abspath(directory):  # messages keep a path without links
        directory = Path(real)
    require_utf8(directory)
    path = directory / MANIFEST
    try:
        manifest = json.loads(read_text(path))
        version = manifest["format"]
        if type(version) is not int or version != FORMAT:
            raise BundleError(
                f"{directory} has bundle format {version!r}, this version reads {FORMAT}. Export the checkpoint again, "
                "or use the version of tfexport that wrote it."
            )
        files = {str(name): str(entry["sha256"]) for name, entry in manifest["files"].items()}
        source = manifest["source"]
        bundle = Bundle(
            directory,
            ModelConfig.from_dict(manifest["config"], where=str(path)),
            Origin(
                str(source["sha256"]),
                str(source["family"]),
                dict(source["given"]),
                tuple(map(str, source.get("notes", ()))),
                dict(source.get("text", {})),
                str(source.get("file") or "the checkpoint"),
                Confirmation.from_dict(source.get("confirmation")),
            ),
            tuple(map(_read_graph, manifest["graphs"])),
            tuple(map(_read_engine, manifest["engines"])),
            {name: _read_dialects(dialects) for name, dialects in manifest["runtimes"].items()},
            {str(side): str(name) for side, name in manifest["tokenizers"].items()},
            files,
            {
                contract.PRECISIONS[short]: tuple(map(str, budget["float32"]))
                for short, budget in manifest.get("budgets", {}).items()
            },
            _verified=VerifiedFiles(directory, files),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read: {error!r}. Export the checkpoint again.") from error
    named = {graph.file for graph in bundle.graphs} | {engine.file for engine in bundle.engines}
    weights = {contract.weights_file(precision) for precision in bundle.precisions}
    weights |= {path.name for path in directory.glob("*.safetensors")}  # graphs may refer to them
    generation = {GENERATION_CONFIG} if (directory / GENERATION_CONFIG).exists() else set()
    unlisted = sorted({contract.WEIGHTS_FILE, *weights, *named, *generation, *bundle.tokenizers.values()} - set(files))
    if unlisted:
        raise BundleError(f"{path} does not list {', '.join(unlisted)}. Export the checkpoint again.")
    _require_size(bundle)
    engines = {engine.file for engine in bundle.engines}
    for name in files:
        if name not in engines:  # verified before use: a damaged engine can be built again
            bundle._verified.verify(name, "Export the checkpoint again.")
    if GENERATION_CONFIG not in files:
        return bundle
    with bundle.loading():
        return replace(bundle, generation_config=_read_generation_config(directory))


def _read_generation_config(directory: Path) -> dict[str, Any]:
    """Raises BundleError if the file is no JSON object."""
    path = directory / GENERATION_CONFIG
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read: {error}. Export the checkpoint again.") from error
    if not isinstance(content, dict):
        raise BundleError(f"{path} is not a JSON object. Export the checkpoint again.")
    return content


def _require_size(bundle: Bundle) -> None:
    """Raise BundleError if the weights file is too small for the config: its sizes determine the allocated memory."""
    try:
        n_bytes = bundle.weights.stat().st_size
    except OSError:  # its verification raises the error
        return
    least = 4 * bundle.config.least_parameters
    if least > n_bytes:
        raise BundleError(
            f"{bundle.directory / MANIFEST} describes a model of {least} bytes or more, and {contract.WEIGHTS_FILE} has "
            f"{n_bytes}. Export the checkpoint again."
        )


def require_utf8(directory: Path) -> None:
    """Raise BundleError if the libraries that read bundles do not support the path."""
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        raise BundleError(
            f"the path {directory} is not UTF-8, which ONNX Runtime requires. Rename it, or give another folder."
        ) from None


def _read_graph(fields: Mapping[str, Any]) -> Graph:
    """Read a graph's entry; raises KeyError, TypeError or ValueError if the manifest is not valid."""
    if fields["dialect"] not in get_args(Dialect):
        raise ValueError(f"{fields['dialect']!r} is not a dialect")
    return Graph(str(fields["file"]), _role(fields), _precision(fields), fields["dialect"])


def _read_engine(fields: Mapping[str, Any]) -> Engine:
    """Read an engine's entry; raises KeyError, TypeError or ValueError if the manifest is not valid."""
    if fields["library"] not in get_args(Library):
        raise ValueError(f"{fields['library']!r} is not a library of engines")
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


def _read_dialects(fields: Mapping[str, Any]) -> dict[str, Dialect]:
    """Read the dialects of a runtime; raises TypeError or ValueError if the manifest is not valid."""
    unknown = set(fields.values()) - set(get_args(Dialect))
    if unknown:
        raise ValueError(f"{unknown} are not dialects")
    return dict(fields)


def _role(fields: Mapping[str, Any]) -> Role:
    if fields["role"] not in get_args(Role):
        raise ValueError(f"{fields['role']!r} is not a role of a graph")
    return fields["role"]


def _precision(fields: Mapping[str, Any]) -> Precision:
    if fields["precision"] not in get_args(Precision):
        raise ValueError(f"{fields['precision']!r} is not a precision")
    return fields["precision"]


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
