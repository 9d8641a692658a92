"""Kernels for ONNX Runtime's CPU provider. Each computes in one pass what takes several nodes of its own operators.

The graphs of the dialect `ort` call functions of the domain `tfexport`, each defined in ONNX Runtime's operators:

    decoder.layers.0.self_attention ── tfexport.BeamAttention ──> its kernel, if this library is registered
                                                             └──> Split, Reshape, .., MultiHeadAttention, if it is not

So a bundle runs wherever ONNX Runtime does. It runs faster if this package was installed on a machine with a C++ compiler
(GCC 12 or newer, or Clang). `status` returns whether this process can use the kernels, with the reason if it cannot.

The library has the kernels for several instruction sets, and uses the best one of the CPU. Kernels for matrix products need
AVX2, or a 64-bit ARM. In the environment, TFEXPORT_ISA names an instruction set, and TFEXPORT_KERNELS=0 disables the
kernels.

A kernel replaces a definition by its name alone. A function that computes something else needs another name, or another
bundle format.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tfexport.contract import FORMAT
from tfexport.errors import TfexportError

SWITCH = "TFEXPORT_KERNELS"
"""Environment variable; 0 disables the kernels."""
ISA = "TFEXPORT_ISA"
"""Environment variable; the name of an instruction set that the kernels use, for tests and comparisons."""
LIBRARY = "_library.dll" if sys.platform == "win32" else "_library.so"
"""Library that setup.py builds. It has no symbols of Python, so one build serves all versions."""
RECORD = "build.json"
"""Build record that setup.py writes next to the library."""

_noted = False
"""Whether the note of `note_if_missing` was logged in this process."""

State = Literal["ready", "disabled", "no-such-isa", "not-built", "no-onnxruntime", "other-format", "cannot-load"]

AGAIN = "Install tfexport again."
INSTALL_ONNXRUNTIME = "Install it: pip install 'tfexport[cpu]'."


@dataclass(frozen=True)
class Status:
    """Whether sessions of this process can use the kernels, with the reason if they cannot."""

    state: State
    reason: str = ""
    """Why the kernels are not ready, as a clause such as `there was no C++ compiler (g++ was not found)`; else empty."""
    remedy: str = ""
    """What to do if the kernels are not ready, as a sentence; else empty."""
    path: Path | None = None
    """Path of the library, if it exists."""
    build: Mapping[str, Any] = field(default_factory=dict)
    """Build record of setup.py; empty for a source tree that was not built."""


def library() -> Path | None:
    """The path of the kernel library; None if it was not built, cannot be loaded, or is disabled.

    Raises:
        TfexportError: the environment names an instruction set that the kernels or this CPU do not have.
    """
    current = status()
    if current.state == "no-such-isa":
        raise TfexportError(f"{current.reason}. {current.remedy}")
    return current.path if current.state == "ready" else None


def status() -> Status:
    """Whether this process can use the kernels. Only the environment is read again in each call."""
    current = _status_here()
    if os.environ.get(SWITCH) == "0":
        return replace(current, state="disabled", reason=f"{SWITCH}=0 is set", remedy=f"Unset {SWITCH} to use them.")
    if current.state == "ready" and (name := os.environ.get(ISA)):
        assert current.path is not None
        supported = supported_instruction_sets(current.path)
        if name not in supported:
            reason = f"{ISA} is {name!r}, and this CPU and the kernels have {', '.join(supported)}"
            return replace(
                current, state="no-such-isa", reason=reason, remedy=f"Set {ISA} to one of these, or unset it."
            )
    return current


def supported_instruction_sets(library: Path) -> tuple[str, ...]:
    """The names of the instruction sets that both a library of kernels and this CPU have, the best first."""
    names = ctypes.CDLL(str(library)).tfexport_targets
    names.restype = ctypes.c_char_p
    return tuple(names().decode().split(","))


@functools.cache
def _status_here() -> Status:
    return status_of(Path(__file__).parent)


def status_of(folder: Path) -> Status:
    """The status of the library in `folder`, regardless of the environment."""
    build = _build_record(folder)
    path = folder / LIBRARY
    if not path.exists():
        reason = f"they were not built: {build['message']}" if "message" in build else "they were not built"
        return Status("not-built", reason, _remedy_of_build(build), None, build)
    try:
        import onnxruntime
    except ImportError as error:
        return Status("no-onnxruntime", f"onnxruntime cannot be imported: {error}", INSTALL_ONNXRUNTIME, path, build)
    try:
        bundle_format = int(ctypes.CDLL(str(path)).tfexport_bundle_format())
    except (OSError, AttributeError):
        bundle_format = FORMAT  # this is not our library; ONNX Runtime reports the reason below
    if bundle_format != FORMAT:
        reason = f"{path} is of another version: it was built for bundle format {bundle_format}, not {FORMAT}"
        if "message" in build:  # the build failed, and an older library remained
            reason += f", and it could not be built again: {build['message']}"
        return Status("other-format", reason, _remedy_of_build(build), path, build)
    try:
        onnxruntime.SessionOptions().register_custom_ops_library(str(path))
    except Exception as error:  # the library's errors have no common base
        reason = f"{path} cannot be loaded: {str(error).splitlines()[0].rstrip('.')}"
        return Status("cannot-load", reason, AGAIN, path, build)
    return Status("ready", path=path, build=build)


def _build_record(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _remedy_of_build(build: Mapping[str, Any]) -> str:
    if build.get("reason") in ("no-compiler", "compiler-too-old", "other-compiler"):
        return f"Install GCC 12 or newer, or Clang. {AGAIN}"
    if build.get("reason") == "compile-error":
        return "Report it with the output of tfexport version --json, or try another compiler: CC=clang CXX=clang++."
    return AGAIN


def supports_this_machine() -> bool:
    """Whether kernels can be built for this system and CPU: Linux and macOS, on x86-64 and 64-bit ARM."""
    is_unix = platform.system() in ("Linux", "Darwin")
    return is_unix and platform.machine().lower() in ("x86_64", "amd64", "aarch64", "arm64")


def note_if_missing() -> None:
    """Log a note, once per process, if decoding runs without kernels that this machine supports."""
    global _noted
    current = status()
    if _noted or current.state == "ready" or not supports_this_machine():
        return
    _noted = True
    logging.getLogger(__name__).warning(
        "note: decoding without tfexport's kernels, as %s. This is slower, and a few outputs may differ from those "
        "with kernels, in int8 and int4. %s",
        *(current.reason, current.remedy),
    )


def instruction_sets() -> tuple[str, ...]:
    """The CPU's instruction sets that the kernels use, such as `("AVX2", "FMA")`; empty without kernels."""
    path = library()
    if path is None:
        return ()
    names = ctypes.CDLL(str(path)).tfexport_instruction_sets
    names.restype = ctypes.c_char_p
    return tuple(names().decode().split(","))


def has_products() -> bool:
    """Whether sessions compute products by kernels, which read the weights in place."""
    path = library()
    return path is not None and bool(ctypes.CDLL(str(path)).tfexport_has_products())


def digest() -> str:
    """The first 8 digits of the library's sha256; empty without a library."""
    path = library()
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def identity() -> str:
    """Text such as ` with kernels 1a2b3c4d`, with `digest`; empty without a library."""
    return f" with kernels {digest()}" if library() is not None else ""


def register(options: Any) -> None:
    """Register the kernels, if available, for sessions with these options (onnxruntime.SessionOptions)."""
    if (path := library()) is not None:
        options.register_custom_ops_library(str(path))
