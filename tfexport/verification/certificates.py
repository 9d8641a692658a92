"""Certificates: the runtimes and precisions of a bundle that were compared with PyTorch, with the input and the result.

They are next to the manifest, in `certificates.json`. A certificate holds only for the compared files, the version of the
library and the processor, because anything else may round differently.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from tfexport import kernels
from tfexport.bundle.reader import CERTIFICATES, GENERATION_CONFIG, PORTABLE, Bundle, Engine
from tfexport.confirmation import Confirmation
from tfexport.contract import Precision, short_name
from tfexport.errors import BundleError, RuntimeUnavailable
from tfexport.graph_checks.rounding import RULE
from tfexport.graph_contract import SEARCH_GRAPHS
from tfexport.runtimes.known import RUNTIMES
from tfexport.system.atomic_files import whole_file
from tfexport.system.gpu import find_gpu
from tfexport.system.processes import cpu_name
from tfexport.system.regular_files import read_text


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A certificate that one runtime in one precision passed its comparison with PyTorch."""

    runtime: str
    precision: Precision
    files: Mapping[str, str]
    """The sha256 of each file that the runtime reads, by name. All of them were compared."""
    settings: str = ""
    """The sha256 of settings in the manifest: the model's config, its graphs, and the dialects of the runtimes."""
    rule: int
    """The rule of the comparison (`rounding.RULE`)."""
    library: str
    """The library and its version, such as `onnxruntime 1.31.1`."""
    device: str
    """The name of the processor or GPU."""
    date: str
    reference: str
    """The source of PyTorch's weights: `bundle`, or the sha256 of a checkpoint that was read again."""
    inputs: Mapping[str, Any]
    """The compared input: its sha256, the number of sentences, and whether they were random ids."""
    reports: Sequence[Mapping[str, Any]]
    """The numbers and limits of the comparison, for each beam."""
    checkpoint: str = "the checkpoint"
    """The name of the file that the bundle was exported from."""
    confirmation: Mapping[str, Any] = field(default_factory=dict)
    """Who confirms that this file was read as its owner's code computes it (`Confirmation.to_dict`). Without it, the
    comparison proves only that the bundle equals what tfexport read."""

    @property
    def about(self) -> str:
        """The claim of the certificate, such as `fp32 on ort-cpu equals our reading of ckpt.pt (unconfirmed: n_heads 8)`."""
        claim = Confirmation.from_dict(self.confirmation).claim(self.checkpoint)
        return f"{short_name(self.precision)} on {self.runtime} {claim}"


def files_of(bundle: Bundle, runtime: str, precision: Precision, *, longest: int | None = None) -> dict[str, str]:
    """The files of a bundle that decide outputs of a runtime, tokenizers and defaults included, with their sha256.

    Args:
        longest: the number of tokens of the longest output, which determines the engines that run; None for all engines.
    """
    names = {name for name in bundle.files if name.endswith(".safetensors")} | set(bundle.tokenizers.values())
    names |= {GENERATION_CONFIG} & bundle.files.keys()
    if runtime == "tensorrt":
        names |= {engine.file for engine in _engines_of(bundle, precision, longest)}
    elif not runtime.startswith("torch"):
        dialect = bundle.dialect(runtime, precision)
        searches = {graph.role for graph in SEARCH_GRAPHS}
        # Dialects share the graph that selects rows, and GPU runtimes share the graphs that choose tokens.
        shared = {"select_rows"} if dialect != "ort" else set()
        shared |= searches if runtime == "ort-cuda" else set()
        names |= {
            graph.file
            for graph in bundle.graphs
            if graph.precision == precision
            and (graph.role in shared or (graph.dialect == dialect and graph.role not in searches))
        }
    return {name: bundle.files[name] for name in sorted(names)}


def _engines_of(bundle: Bundle, precision: Precision, longest: int | None) -> list[Engine]:
    """The engines for this machine's GPU; of engines with a cache, those that outputs of this length reach."""
    engines = [engine for engine in bundle.engines if engine.precision == precision]
    with suppress(RuntimeUnavailable):
        generation = find_gpu().generation
        own = [engine for engine in engines if engine.gpu == generation]
        engines = own or [engine for engine in engines if engine.gpu == PORTABLE]
    caches = [0, *sorted({engine.cache for engine in engines if engine.cache})]
    reached = {0, *(cache for smaller, cache in pairwise(caches) if longest is None or smaller < longest)}
    return [engine for engine in engines if engine.cache in reached]


def settings_of(bundle: Bundle) -> str:
    """The sha256 of a bundle's manifest without files, engines and facts about the export."""
    graphs = sorted([graph.role, graph.precision, graph.dialect, graph.file] for graph in bundle.graphs)
    dialects = {runtime: dict(sorted(chosen.items())) for runtime, chosen in sorted(bundle.dialects.items())}
    said = [bundle.config.to_dict(), graphs, dialects, dict(sorted(bundle.tokenizers.items()))]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def library_of(runtime: str) -> str:
    """The name and version of the package that computes for a runtime, and its kernels."""
    with_kernels = kernels.identity() if runtime == "ort-cpu" else ""
    packages = RUNTIMES[runtime].packages
    for package in packages:
        with suppress(PackageNotFoundError):
            return f"{package} {version(package)}{with_kernels}"
    return f"{packages[0]} of unknown version"


def device_of(runtime: str) -> str:
    """The name of the device of a runtime."""
    if not RUNTIMES[runtime].gpu:
        return cpu_name()
    try:
        return find_gpu().name
    except RuntimeUnavailable:
        return "no GPU"


def certify(
    bundle: Bundle,
    runtime: str,
    precision: Precision,
    reports: Sequence[Mapping[str, Any]],
    inputs: Mapping[str, Any],
    reference: str,
) -> Certificate:
    """The certificate of a comparison that passed now on this machine."""
    return Certificate(
        runtime=runtime,
        precision=precision,
        files=files_of(bundle, runtime, precision, longest=max(int(report.get("longest", 0)) for report in reports)),
        settings=settings_of(bundle),
        rule=RULE,
        library=library_of(runtime),
        device=device_of(runtime),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        reference=reference,
        inputs=inputs,
        reports=reports,
        checkpoint=bundle.origin.file,
        confirmation=bundle.origin.confirmation.to_dict(),
    )


def read_certificates(bundle: Bundle) -> list[Certificate]:
    """The certificates of a bundle, including those that no longer hold; empty if there is no file.

    Raises:
        BundleError: the file cannot be read.
    """
    path = bundle.directory / CERTIFICATES
    try:
        entries = json.loads(read_text(path))
        known = {field.name for field in fields(Certificate)}
        certificates = [
            Certificate(**{name: value for name, value in entry.items() if name in known}) for entry in entries
        ]
        return [certificate for certificate in certificates if _is_whole(certificate)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read: {error}. Remove it, and run tfexport parity again.") from error


def _is_whole(certificate: Certificate) -> bool:
    """Whether all fields have their types: a file may contain anything."""
    texts = (
        *(
            certificate.runtime,
            certificate.precision,
            certificate.settings,
            certificate.library,
            certificate.device,
            certificate.date,
            certificate.reference,
        ),
        certificate.checkpoint,
    )
    dicts = (
        certificate.files,
        certificate.inputs,
        certificate.confirmation,
        *(certificate.reports if isinstance(certificate.reports, list) else (None,)),
    )
    return (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(value, dict) for value in dicts)
        and all(isinstance(sha256, str) for sha256 in certificate.files.values())
        and type(certificate.rule) is int
    )


def write_certificates(
    bundle: Bundle, passed: Sequence[Certificate], failed: Sequence[tuple[str, Precision]] = ()
) -> Path:
    """Add certificates to a bundle. They replace earlier ones for the same variant; those of `failed` variants are removed.

    Raises:
        BundleError: the file cannot be written.
    """
    replaced = {(c.runtime, c.precision, c.device, c.library) for c in passed}
    refuted = {(runtime, precision, device_of(runtime), library_of(runtime)) for runtime, precision in failed}
    kept = [
        c for c in read_certificates(bundle) if (c.runtime, c.precision, c.device, c.library) not in replaced | refuted
    ]
    path = bundle.directory / CERTIFICATES
    partial = path.with_name(f".{CERTIFICATES}.{os.getpid()}.partial")
    try:
        text = json.dumps([asdict(certificate) for certificate in [*kept, *passed]], indent=1, allow_nan=False)
        with whole_file(path, partial) as file:
            file.write(f"{text}\n".encode())
    except (OSError, ValueError) as error:  # ValueError: an earlier certificate has NaN
        reason = getattr(error, "strerror", None) or error
        raise BundleError(
            f"cannot write {path}: {reason}. Make the folder writable, or compare with --no-certify."
        ) from error
    return path


def parity_command(directory: Path, runtime: str) -> str:
    """The command that compares a runtime with PyTorch."""
    flag = "" if runtime == "ort-cpu" else f" --runtime {runtime}"
    return f"tfexport parity {directory} INPUT{flag}"


def missing(bundle: Bundle, runtime: str, precision: Precision) -> str | None:
    """The reason why no certificate of a bundle holds for a runtime and precision on this machine; None if one holds.

    The reference itself, `torch` in float32, needs no certificate.
    """
    if (runtime, precision) == ("torch", "float32"):
        return None
    mine = [c for c in read_certificates(bundle) if (c.runtime, c.precision) == (runtime, precision)]
    what = f"{short_name(precision)} on {runtime}"
    if not mine:
        return f"{what} was not compared with our reading on real text"
    mine = [c for c in mine if c.rule == RULE and c.reports]
    if not mine:
        return f"{what} was compared under the rule of another version of tfexport, whose certificates are not trusted"
    settings = settings_of(bundle)
    files = files_of(bundle, runtime, precision)
    mine = [c for c in mine if c.files.items() <= files.items() and c.settings == settings]
    lost = [files.keys() - c.files.keys() for c in mine]
    engines = {engine.file for engine in bundle.engines}
    if mine and all(lost) and all(names <= engines for names in lost):
        return f"{what} was compared on outputs that are too short for {min(lost[-1])}: compare longer text"
    mine = [c for c, names in zip(mine, lost, strict=True) if not names]
    if not mine:
        return f"{what} was compared before the bundle was changed"
    library, device = library_of(runtime), device_of(runtime)
    if not any(c.library == library for c in mine):
        return f"{what} was compared in {mine[-1].library}, this is {library}"
    if not any((c.library, c.device) == (library, device) for c in mine):
        return f"{what} was compared on {mine[-1].device}, this is {device}"
    return None
