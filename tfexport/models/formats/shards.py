"""Checkpoints of several files: an index lists the shard of each tensor, as Hugging Face's libraries write them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfexport.bundle.reader import file_sha256
from tfexport.errors import CheckpointError, TfexportError
from tfexport.system.regular_files import read_text

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Usual names of weights in a folder. The index of their shards has the same name and `.index.json`."""
_INDEX = ".index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)")


def weights_in(folder: Path) -> Path | None:
    """The weights of a folder under their usual name, or the index of their shards; None if there are none."""
    paths = (folder / f"{name}{suffix}" for name in WEIGHTS for suffix in ("", _INDEX))
    return next((path for path in paths if path.is_file()), None)


def weight_files(path: Path) -> list[Path]:
    """The files that hold the tensors of a checkpoint: a file itself, or the shards that an index lists.

    Args:
        path: a file, the index of shards, or a folder that has one of them under its usual name.

    Raises:
        CheckpointError: an index is damaged, or a shard is missing, or `path` is one of several shards.
    """
    if path.is_dir():
        weights = weights_in(path)
        if weights is None:
            raise CheckpointError(f"{path} is a folder without {' or '.join(WEIGHTS)}. Give the path of a checkpoint.")
        path = weights
    if not path.name.endswith(_INDEX):
        _refuse_shard(path)
        return [path]
    shards = json_object(path).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(_is_name(shard, path) for shard in shards.values()):
        raise CheckpointError(f"{path} has no weight_map of file names. Check that it was copied completely.")
    files = [path.with_name(name) for name in sorted(set(shards.values()))]
    if absent := [file.name for file in files if not os.path.isfile(file)]:
        raise CheckpointError(f"{path} lists {absent[0]}, which is missing. Put it beside the index.")
    return files


def _is_name(shard: Any, index: Path) -> bool:
    """Whether this is the name of another file beside the index."""
    return isinstance(shard, str) and shard not in ("", index.name) and shard == Path(shard).name


def _refuse_shard(path: Path) -> None:
    match = _SHARD.fullmatch(path.name)
    if match is not None and int(match["count"]) > 1:
        index = path.with_name(f"{match['stem']}{match['suffix']}{_INDEX}")
        where = "" if index.is_file() else ", which is missing: copy it to this folder"
        raise CheckpointError(f"{path} is one of {int(match['count'])} shards. Give their index, {index}{where}.")


def json_object(path: Path, kind: type[TfexportError] = CheckpointError) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint's folder.

    Args:
        kind: the class of errors.

    Raises:
        TfexportError: the file cannot be read, or has another value. It is of this class.
    """
    advice = "Check that it was copied completely."
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise kind(f"cannot read {path}: {error}. {advice}") from error
    if not isinstance(content, dict):
        raise kind(f"{path} is not a JSON object. {advice}")
    return content


def sha256_of(path: Path, files: Sequence[Path]) -> str:
    """The sha256 of a checkpoint that consists of one file, or of the hexadecimal sums of its files."""
    if list(files) == [path]:
        return file_sha256(path)
    return hashlib.sha256("".join(map(file_sha256, files)).encode()).hexdigest()
