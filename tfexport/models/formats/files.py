"""Reading of checkpoint files: tensors by name, without wrappers. No code from a file is executed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tfexport.errors import CheckpointError
from tfexport.models.formats.pickled_options import read_inert
from tfexport.models.formats.reparametrised import require_floats
from tfexport.models.formats.shards import weight_files
from tfexport.models.formats.state_dicts import Picked, find_state_dict, tensors_of, what_is, without_prefix
from tfexport.system.atomic_files import move
from tfexport.system.regular_files import open_regular


@dataclass(frozen=True)
class RawCheckpoint:
    """A file's tensors under their own names, without wrappers."""

    weights: dict[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    """Names of tensors that belong to no layer, according to the user."""


EVERYTHING = Picked()
"""Selects all tensors of the only state_dict of a file."""


def read_file(path: Path, *, unwrap: bool = True, picked: Picked = EVERYTHING) -> RawCheckpoint:
    """Read a file of tensors by name, from torch.save or safetensors. Other objects become records, which run no code.

    Args:
        path: a file, or the index or the folder of several; see `weight_files`.
        unwrap: remove wrappers of training scripts around a state_dict, and prefixes of its names.
        picked: selection of the model's tensors.

    Raises:
        CheckpointError: the file is missing or cut, declares more than it contains, or has no tensors by name.
    """
    if not os.path.exists(path):  # unlike pathlib, it reports a name that is too long as a missing file
        raise CheckpointError(_missing(path))
    content: Any = {}
    metadata: dict[str, str] = {}
    files = weight_files(path)
    for file in files:
        part, about = _content(file)
        content = part if len(files) == 1 else {**content, **_bare(file, part)}
        metadata |= about
    if not unwrap:
        return RawCheckpoint(_copied(_bare(path, content)), metadata)
    entries, ignored = picked.without_ignored(find_state_dict(path, content, picked.key))
    require_floats(path, entries)
    weights, also_ignored = picked.without_ignored(without_prefix(_copied(tensors_of(path, entries))))
    picked.require_used(path, (*ignored, *also_ignored))
    return RawCheckpoint(weights, metadata, (*ignored, *also_ignored))


def _missing(path: Path) -> str:
    if _HUB_NAME.fullmatch(str(path)) and not path.parent.exists():
        folder = path.name
        return (
            f"there is no file or folder {path}. If it is a model of the Hugging Face Hub, download it with the command hf "
            f"of the library huggingface_hub: hf download {path} --local-dir {folder}. Then export the folder: tfexport "
            f"export {folder}."
        )
    return f"there is no file {path}. Give the path of a checkpoint such as ckpt.pt."


def _content(path: Path) -> tuple[Any, dict[str, str]]:
    """The content of one file, and its metadata.

    Raises:
        CheckpointError: it is no file of torch.save or safetensors, or it is cut or damaged.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} is a pipe or a device. Copy its content to a file, and give that.")
    try:
        with open_regular(path) as file:
            head = file.read(16)
        if (other := other_format(path, head)) is not None:
            raise CheckpointError(f"{path} is {other}")
        if head[8:9] == b"{":  # after the length of the header, 8 bytes
            with safe_open(path, framework="pt") as tensors:
                content = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
                metadata = tensors.metadata() or {}
            return _with_dropped(content, metadata), metadata
        if head.startswith((b"PK", b"\x80")):
            return read_inert(path), {}
        raise CheckpointError(
            f"{path} was written by neither torch.save nor safetensors: it begins with {head!r}. Check that it was "
            "copied completely; a download can leave a web page or a Git LFS pointer in place of a file."
        )
    except CheckpointError:
        raise
    except Exception as error:  # for a damaged file, the parser of safetensors may raise any error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: {reason}. Check that it was copied completely."
        ) from error


_HUB_NAME = re.compile(r"[\w.-]+/(?!.*\.[A-Za-z]\w*$)[\w.-]+")
"""A name without the suffix of a file."""
MARIAN_BINARY = b"\1\0\0\0\0\0\0\0"
"""The first 8 bytes of Marian's binary models: version 1 in 64 bits."""
_LOAD_AND_SAVE = (
    "Load it into your PyTorch module, save that with torch.save(model.state_dict(), 'ckpt.pt'), and export ckpt.pt."
)
_FORMATS = {
    b"\x89HDF": f"an HDF5 file, as Keras writes it. {_LOAD_AND_SAVE}",
    b"GGUF": "a GGUF file for llama.cpp. Give the checkpoint that it was converted from.",
    MARIAN_BINARY: "a binary model of Marian, as for its own int8 products. Give the model.npz that it was converted from.",
    b"\x1f\x8b": "compressed by gzip. Extract it with gunzip, or tar -xzf, and give the checkpoint inside.",
}
_SUFFIXES = {
    ".onnx": "an ONNX graph. Give the checkpoint that it was exported from.",
    ".msgpack": f"a checkpoint of Flax. {_LOAD_AND_SAVE}",
    ".argosmodel": "a package of Argos Translate, a zip. Extract it with unzip, and export the folder `model` inside.",
    ".h5": f"an HDF5 file, as Keras writes it. {_LOAD_AND_SAVE}",
    ".gguf": "a GGUF file for llama.cpp. Give the checkpoint that it was converted from.",
    ".tflite": "a TensorFlow Lite graph. Give the checkpoint that it was exported from.",
}


def other_format(path: Path, head: bytes = b"") -> str | None:
    """The name of a foreign format, by a file's first bytes or its name, and the way out; None for other files."""
    by_content = (about for magic, about in _FORMATS.items() if head.startswith(magic))
    by_name = (about for suffix, about in _SUFFIXES.items() if path.name.endswith(suffix))
    return next(by_content, None) or next(by_name, None)


def _with_dropped(content: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors under all names, also those that `safetensors.torch.save_model` dropped.

    It stores a shared tensor under one name, and maps the others to it in the metadata. Other metadata name no tensors.
    """
    dropped = {name: kept for name, kept in metadata.items() if kept in content and name not in content}
    return {**content, **{name: content[kept] for name, kept in dropped.items()}}


def _bare(path: Path, content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"{path} contains no state_dict, but {what_is(content)}. Check that it is the model's own file."
        )
    return {str(name): tensor for name, tensor in content.items()}


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to memory: tensors of `read_inert` change with their file. Equal views of a storage stay one tensor."""
    copies: dict[Any, Tensor] = {}
    made = {}
    for name, tensor in weights.items():
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if same not in copies:
            copies[same] = tensor.clone()
        made[name] = copies[same]
    return made


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
        move(partial, path)  # so that `path` is never a half-written file
    except SafetensorError as error:  # wraps errors such as a full disk
        raise OSError(str(error)) from error
    finally:
        partial.unlink(missing_ok=True)
