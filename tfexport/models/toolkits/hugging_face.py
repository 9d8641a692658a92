"""Folders that the `transformers` library saves: config.json, weights and tokenizer files, read without that library."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError
from tfexport.models.formats.files import other_format, read_file
from tfexport.models.formats.shards import WEIGHTS, json_object, weight_files, weights_in
from tfexport.models.formats.state_dicts import some
from tfexport.models.toolkits.hugging_face_layouts import KINDS, NOT_SUPPORTED, T5, bart_like, t5
from tfexport.models.toolkits.hugging_face_settings import CONFIG, Settings
from tfexport.models.toolkits.hugging_face_text import read_text
from tfexport.models.toolkits.toolkit import TextOptions, Toolkit, ToolkitCheckpoint

_CHECKPOINTS = (".pt", ".pth", ".ckpt", ".npz", ".safetensors")
_NO_WORDS = ("Classification", "QuestionAnswering", "ForCausalLM", "EncoderModel")
"""Suffixes of class names of models that generate no text, or that have no encoder."""
_MODELS = (CONFIG, "model.bin", *WEIGHTS)
"""Files of a folder with a model: of this library, or of CTranslate2."""
_ADAPTER = "adapter_config.json"
_OTHER_WEIGHTS = {"flax_model.msgpack": ("Flax", "from_flax"), "tf_model.h5": ("TensorFlow", "from_tf")}
"""Files of other libraries, with the library and the option that converts them in transformers 4; version 5 has none."""


def read_folder(path: Path, options: TextOptions) -> ToolkitCheckpoint:
    """Read config, weights and tokenizers of a folder that `save_pretrained` wrote.

    Raises:
        CheckpointError: the folder lacks a file, or a file cannot be read.
        ConfigError: the model is of another kind, or a setting is not supported.
    """
    if (path / _ADAPTER).is_file():
        raise CheckpointError(_unmerged(path))
    if not (path / CONFIG).is_file():
        raise CheckpointError(_no_config(path))
    config = json_object(path / CONFIG)
    generation_path = path / "generation_config.json"
    settings = Settings(path, config, json_object(generation_path) if generation_path.is_file() else {})
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in NOT_SUPPORTED:
        raise ConfigError(
            f"{path / CONFIG} has model_type {model_type!r}, which is not supported: {NOT_SUPPORTED[model_type]}."
        )
    if model_type not in (*KINDS, *T5):
        weights = weights_in(path)
        own = (
            ""
            if weights is None
            else f" If the model is of your own code, export its weights: tfexport export {shlex.quote(str(weights))}."
        )
        raise ConfigError(
            f"{path / CONFIG} has model_type {model_type!r}, which is not supported. There are "
            f"{', '.join((*KINDS, *T5))}.{own}"
        )
    _require_words(path, config)
    if config.get("quantization_config"):
        raise ConfigError(
            f"{path / CONFIG} has a quantization_config. Give the folder of the model before quantization."
        )
    tensors = _read_weights(path)
    folder = (t5 if model_type in T5 else bart_like)(model_type, settings, tensors)
    text = read_text(path, model_type, folder.fields, options)
    spoken = {} if text.language is None else _spoken(folder.fields, text.language)
    notes = [*folder.family.notes, *text.notes]
    has_language = folder.fields.keys() & {"forced_first_id"} or "bos_id" in _spoken(folder.fields, 0)
    if text.speaks and not (has_language or spoken):
        notes.append("nothing says which language to write, so the model chooses: give --tgt-lang")
    return replace(
        folder,
        family=replace(folder.family, notes=tuple(notes)),
        fields={**folder.fields, **text.fields, **spoken},
        tokenizers=text.tokenizers,
        given=spoken,
        generation=settings.generation(),
        assumed=tuple(_spoken(folder.fields, 0)),  # a fine-tuned model has a default language, and knows others
    )


def _require_words(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model of the right type that generates no text, such as a classifier."""
    named = config.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if names and all(name.endswith(_NO_WORDS) for name in names):
        raise ConfigError(
            f"{path / CONFIG} is of a {names[0]}, which generates no text. Give the folder of a model for conditional "
            "generation."
        )


def _unmerged(path: Path) -> str:
    """The message for a folder of the library peft, which has only the weights that were added to another model."""
    return (
        f"{path} has an adapter such as LoRA, as peft saves it ({_ADAPTER}), which changes another model. Merge both with "
        f"peft: AutoPeftModelForSeq2SeqLM.from_pretrained('{path}').merge_and_unload().save_pretrained('merged'). Copy the "
        "tokenizer's files of that model to merged too, and export merged."
    )


def _no_config(path: Path) -> str:
    """The message for a folder that is not of this library."""
    files = sorted(file.name for file in path.iterdir()) if path.is_dir() else []
    for name in files:
        if (other := other_format(path / name)) is not None:
            return f"{path / name} is {other}"
    if any(name.endswith(".ckpt") for name in files) and any(name.endswith("_vocab.txt") for name in files):
        return (
            f"{path} looks like a folder of JoeyNMT, and config.yaml is missing in it or has no data, model and training. "
            "Put the model's own there."
        )
    checkpoints = [name for name in files if name.endswith(_CHECKPOINTS)]
    if checkpoints:
        return (
            f"there is no file {path / CONFIG}. It has {some(checkpoints, 5)}: give the path of one, such as "
            f"{path / checkpoints[0]}."
        )
    inside = [path / name for name in files if any((path / name / model).is_file() for model in _MODELS)]
    if inside:
        return f"there is no file {path / CONFIG}. Give the folder inside with the model, {inside[0]}."
    return (
        f"there is no file {path / CONFIG}. Give a folder that save_pretrained wrote, or a checkpoint such as ckpt.pt."
    )


def _spoken(fields: Mapping[str, Any], language: int) -> dict[str, Any]:
    """The field for the target language: the first token of the output, or of the decoder."""
    first = fields.get("bos_id")
    if "forced_first_id" in fields or (first is not None and first in (fields.get("eos_id"), fields.get("pad_id"))):
        return {"forced_first_id": language}
    return {"bos_id": language}


def _no_weights(path: Path) -> str:
    """The message for a folder that has a config.json and no weights of PyTorch."""
    for name, (library, flag) in _OTHER_WEIGHTS.items():
        if (path / name).is_file():
            return (
                f"{path} has only weights of {library}, {name}. Convert them with transformers 4: "
                f"AutoModelForSeq2SeqLM.from_pretrained('{path}', {flag}=True).save_pretrained('{path}')."
            )
    return f"{path} has no weights ({', '.join(WEIGHTS)}). Check that it was copied completely."


def _read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors by name, without the prefix `model.` that most have."""
    if (weights := weights_in(path)) is None:
        raise CheckpointError(_no_weights(path))
    named = read_file(weights, unwrap=False).weights
    return {name.removeprefix("model."): tensor for name, tensor in named.items()}


def _recognises(path: Path) -> bool:
    """Whether a path is a folder. Shards of a folder without config.json are tensors by name like those of a file."""
    is_plain = not (path / CONFIG).exists() and not (path / _ADAPTER).exists() and weights_in(path) is not None
    return path.is_dir() and not is_plain


TOOLKIT = Toolkit(
    recognises=_recognises,
    read=read_folder,
    files=lambda path: sorted([path / CONFIG, *weight_files(path)]),
)
