"""Kernels for ONNX Runtime's CPU provider, which compute in one pass what its own operators take several nodes for.

The graphs of the dialect `ort` call functions of the domain `tfexport`, each defined in ONNX Runtime's operators:

    decoder.layers.0.self_attention ── tfexport.BeamAttention ──> its kernel, where this library is registered
                                                             └──> Split, Reshape, .., MultiHeadAttention, where it is not

So a bundle runs wherever ONNX Runtime does, and faster where this package was installed on a machine with a C++ compiler
(GCC 12 or newer, or Clang). TFEXPORT_KERNELS=0 in the environment leaves the kernels out. Those of matrix products are for
CPUs with AVX-512 and VNNI.

A kernel takes the place of a definition by its name alone: a function that is to compute something else gets another name,
or bundles another format.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from tfexport.bundle.reader import FORMAT
from tfexport.config import ModelConfig

LARGEST_HEAD = 128


def take_attention(config: ModelConfig) -> bool:
    """Whether graphs call the kernels' attention: with heads of some sizes (`has_kernel` in attention.h), and not with
    relative positions, as what they add to the scores is no part of it."""
    return config.head_dim % 16 == 0 and config.head_dim <= LARGEST_HEAD and config.positions != "relative"


def library() -> Path | None:
    """The library of the kernels; None where it was not built, cannot be taken, or is not wanted."""
    if os.environ.get("TFEXPORT_KERNELS") == "0":
        return None
    return _built()


@functools.cache
def _built() -> Path | None:
    """The library if it was built, for bundles of this version, and can be loaded, which is said once if not."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_library{suffix}"
        if path.exists():
            return path if _loads(path) else None
    return None


def _loads(path: Path) -> bool:
    try:
        import onnxruntime
    except ImportError:
        return False
    try:
        is_ours = bool(ctypes.CDLL(str(path)).tfexport_bundle_format() == FORMAT)
    except AttributeError:  # before there was such a number
        is_ours = False
    except OSError:
        is_ours = True  # it is no library at all, which ONNX Runtime says
    if not is_ours:
        logging.getLogger(__name__).warning(
            "warning: the kernels in %s are another version's. Decoding is slower without them; install tfexport again.",
            path,
        )
        return False
    try:
        onnxruntime.SessionOptions().register_custom_ops_library(str(path))
    except Exception as error:  # the library's errors have no common base
        logging.getLogger(__name__).warning(
            "warning: the kernels in %s cannot be loaded: %s. Decoding is slower without them; install tfexport again.",
            path,
            str(error).splitlines()[0],
        )
        return False
    return True


def has_products() -> bool:
    """Whether sessions compute products by kernels, which read weights as they lie."""
    path = library()
    return path is not None and _has_products(path)


@functools.cache
def _has_products(path: Path) -> bool:
    return bool(ctypes.CDLL(str(path)).tfexport_has_products())


def identity() -> str:
    """` with kernels 1a2b3c4d`, the first digits of the library's sha256; empty where there is none."""
    path = library()
    return "" if path is None else f" with kernels {hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"


def register(options: Any) -> None:
    """Let sessions of these options (onnxruntime.SessionOptions) use the kernels, where there are any."""
    if (path := library()) is not None:
        options.register_custom_ops_library(str(path))
