"""tfexport's own checkpoints: a safetensors file whose metadata contain the config and the tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tfexport.config import ModelConfig
from tfexport.errors import CheckpointError
from tfexport.models.formats.files import save_weights
from tfexport.text.tokenizers import TextTokenizer

REVISION = 1
_KEY = "tfexport"


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of both sides. A side without a tokenizer is read and written as ids."""

    source: TextTokenizer | None
    target: TextTokenizer | None

    def replaced_by(self, others: Tokenizers | None) -> Tokenizers:
        """These tokenizers, replaced by those of `others` on the sides that it has."""
        if others is None:
            return self
        return Tokenizers(others.source or self.source, others.target or self.target)


def save(
    path: Path, weights: Mapping[str, Tensor], config: ModelConfig, tokenizers: Tokenizers, dtype: torch.dtype
) -> None:
    """Write canonical `weights`, stored as `dtype`, with everything that an export needs."""
    content = {"revision": REVISION, "config": config.to_dict(), "tokenizers": _to_dict(tokenizers)}
    tensors = {name: tensor.detach().to(dtype).contiguous().cpu() for name, tensor in weights.items()}
    save_weights(tensors, path, {_KEY: json.dumps(content)})


def read_description(path: Path, metadata: Mapping[str, str]) -> tuple[ModelConfig, Tokenizers]:
    """Read the config and tokenizers in the `metadata` of a file.

    Raises:
        CheckpointError: the metadata are of a newer revision or cannot be read.
        ConfigError, TokenizerError: the metadata contradict themselves.
    """
    try:
        content = json.loads(metadata[_KEY])
        revision = content["revision"]
        if revision != REVISION:
            raise CheckpointError(f"{path} is of revision {revision}, this version reads {REVISION}. Upgrade tfexport.")
        config, tokenizers = dict(content["config"]), dict(content["tokenizers"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"the description in {path} cannot be read: {error!r}. Train or save it again."
        ) from error
    joint = tokenizers.get("joint")
    sides = [tokenizers.get(side, joint) for side in ("source", "target")]
    read = [None if side is None else TextTokenizer.from_dict(side, where=str(path)) for side in sides]
    return ModelConfig.from_dict(config, where=str(path)), Tokenizers(*read)


def is_native(metadata: Mapping[str, str] | None) -> bool:
    """Whether a safetensors file with this metadata is tfexport's own."""
    return metadata is not None and _KEY in metadata


def _to_dict(tokenizers: Tokenizers) -> dict[str, object]:
    sides = {"source": tokenizers.source, "target": tokenizers.target}
    described = {side: tokenizer.to_dict() for side, tokenizer in sides.items() if tokenizer is not None}
    if len(described) == 2 and described["source"] == described["target"]:
        return {"joint": described["source"]}  # stored once: it is often most of a small file
    return dict(described)
