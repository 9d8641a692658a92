"""Checkpoint files to tensors by name, whatever was put around them. Nothing from a file is ever executed."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tfexport.errors import CheckpointError
from tfexport.system.atomic_files import move
from tfexport.system.regular_files import open_regular

_WRAPPERS = ("model_state_dict", "state_dict", "model_state", "model")
"""Keys under which training scripts save the weights, beside the optimizer's and the epoch."""


@dataclass(frozen=True)
class RawCheckpoint:
    """A file's tensors under their own names, wrappers taken off."""

    weights: dict[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


def read_file(path: Path, *, unwrap: bool = True) -> RawCheckpoint:
    """Read a file of plain tensors.

    Args:
        unwrap: take off what training scripts put around a state_dict and before its names.

    Raises:
        CheckpointError: the file is missing, cut, holds anything but tensors by name, or would run code.
    """
    if not os.path.isfile(path):  # unlike pathlib, it takes a name that is too long for one of no file
        raise CheckpointError(f"there is no file {path}. Give the path of a checkpoint such as ckpt.pt.")
    try:
        with open_regular(path) as file:
            head = file.read(16)
        if head[8:9] == b"{":  # after the header's length in 8 bytes
            with safe_open(path, framework="pt") as tensors:
                weights = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
                return RawCheckpoint(_unwrap(path, weights) if unwrap else weights, tensors.metadata() or {})
        if not head.startswith((b"PK", b"\x80")):
            raise CheckpointError(
                f"{path} was written by neither torch.save nor safetensors: it begins with {head!r}. Check that it was "
                "copied completely; a download can leave a web page or a Git LFS pointer in place of a file."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is wrong with a file is told below, once
            content = torch.load(path, map_location="cpu", weights_only=True)
            return RawCheckpoint(_unwrap(path, content) if unwrap else _bare(path, content))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is not a file of plain tensors: {_first_line(error)} Nothing in it was run. Save the weights alone, "
            "torch.save(model.state_dict(), 'ckpt.pt'), where the model's code is at hand."
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # torch and safetensors meet a damaged file with whatever their parsers run into
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path} is a TorchScript archive. Save the weights alone: torch.save(model.state_dict(), 'ckpt.pt')."
            ) from error
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: {_first_line(error)} Check that it was copied completely."
        ) from error


_TELLING = ("GLOBAL", "Unsupported")


def _first_line(error: Exception) -> str:
    """The sentence of a library's message that says what is wrong, not torch's advice to switch its protection off."""
    lines = [line.split("WeightsUnpickler error:")[-1].strip() for line in str(error).splitlines()]
    telling = [line for line in lines if any(word in line for word in _TELLING)] or [line for line in lines if line]
    sentence = (telling or [type(error).__name__])[0]
    for advice in (" In PyTorch 2.6", " Please use ", " was not an allowed global"):
        sentence = sentence.split(advice)[0]
    return sentence if sentence.endswith(".") else f"{sentence}."


def _bare(path: Path, content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"{path} holds no state_dict, but {_what(content)}. Check that it is the model's own file."
        )
    return {str(name): tensor for name, tensor in content.items()}


def _unwrap(path: Path, content: Any) -> dict[str, Tensor]:
    """Take off the wrappers that training scripts put around a state_dict."""
    for _ in range(4):  # more is no checkpoint, and a file may hold itself
        if not isinstance(content, Mapping):
            break
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"{path} holds no weights by name, but {_what(content)}. Save them with torch.save(model.state_dict(), "
            f"'ckpt.pt'), bare or under one of {', '.join(_WRAPPERS)}."
        )
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others:
        raise CheckpointError(
            f"{path} has entries beside its weights that are not tensors: {some(others)}. Save model.state_dict() alone."
        )
    weights = {str(name): tensor for name, tensor in content.items()}
    # DataParallel, torch.compile, Lightning and a user's own class put a module's name before every name.
    while len(tops := {name.partition(".")[0] for name in weights}) == 1 and not tops & {"encoder", "decoder"}:
        if not all("." in name for name in weights):
            break
        weights = {name.partition(".")[2]: tensor for name, tensor in weights.items()}
    return weights


def _what(content: Any) -> str:
    return f"the keys {some([str(key) for key in content])}" if isinstance(content, Mapping) else type(content).__name__


def some(names: list[str], most: int = 12) -> str:
    """The first of many names, for a message."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def save_weights(weights: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write safetensors.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # left by a killed process, or a link
        save_file(dict(weights), partial, metadata)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        move(partial, path)  # so that no half-written file has the name
    except SafetensorError as error:  # its wrapping of a full disk and the like
        raise OSError(str(error)) from error
    finally:
        partial.unlink(missing_ok=True)
