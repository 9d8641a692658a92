"""Checkpoint files in, canonical weights and a complete `ModelConfig` out. Nothing from a file is ever executed."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfexport.bundle import file_sha256
from tfexport.config import ModelConfig
from tfexport.errors import CheckpointError, ConfigError
from tfexport.models import annotated, fairseq, hugging_face, joeynmt, marian, native, per_head, tutorial
from tfexport.models.classifier import EncoderClassifier
from tfexport.models.family import Family
from tfexport.models.files import RawCheckpoint, read_file, some
from tfexport.models.native import Tokenizers
from tfexport.models.toolkit import TextOptions, Toolkit
from tfexport.models.transformer import Transformer

FAMILIES = (*tutorial.FAMILIES, annotated.FAMILY, per_head.FAMILY)
TOOLKITS = (marian.TOOLKIT, joeynmt.TOOLKIT, hugging_face.TOOLKIT, fairseq.TOOLKIT)
"""Whose checkpoints say themselves what they are; asked in this order."""
NATIVE = "native"

_FLAGS = {
    "n_heads": "--heads",
    "pad_id": "--pad",
    "bos_id": "--bos",
    "eos_id": "--eos",
}
"""The flag that gives a field which a file may not tell."""


@dataclass(frozen=True)
class Checkpoint:
    """A model read completely."""

    path: Path
    sha256: str
    family: str
    config: ModelConfig
    weights: dict[str, Tensor]
    """Canonical names, float32."""
    tokenizers: Tokenizers
    given: dict[str, Any]
    """The fields that the file did not tell: with them as hints it is read again as it was."""
    notes: tuple[str, ...] = ()
    """What its owner should know: where the exported arithmetic differs from the family's own, and by how much; and
    vocabularies that may be those of another model."""

    def build_model(self) -> Transformer | EncoderClassifier:
        """The canonical model with these weights, in evaluation mode."""
        return build_model(self.config, self.weights)


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint is, as far as its file and the hints tell."""

    path: Path
    family: str
    about: str
    n_parameters: int
    fields: dict[str, Any]
    """`ModelConfig` fields that are known."""
    missing: dict[str, str]
    """Fields that are not known, each with the flag that gives it."""
    problems: tuple[str, ...]
    """Weights that are missing, unexpected or misshapen."""
    vocabulary: bool
    notes: tuple[str, ...]


def load_checkpoint(
    path: Path,
    hints: Mapping[str, Any],
    *,
    tokenizers: Tokenizers | None = None,
    family: str | None = None,
    text: TextOptions | None = None,
) -> Checkpoint:
    """Read, recognise and convert a checkpoint.

    Args:
        path: a `.pt`/`.pth`/`.ckpt` file of plain tensors, or safetensors, or a folder of the transformers library.
        hints: `ModelConfig` fields that the user gives; they win over what the file tells.
        tokenizers: the user's vocabularies; a native checkpoint has its own.
        family: a family's name, where recognising it is not wanted.
        text: the languages and the prefix of sources and targets, of folders that know languages.

    Raises:
        CheckpointError: the file cannot be read, is of no known family, or its weights are not those of its config.
        ConfigError: what the file cannot tell has not been given, or contradicts the file.
    """
    raw, found, told, own_tokenizers, spoken = _read(path, family, text)
    _check_lengths(path, told, hints)
    hints = {**spoken, **hints}
    fields, missing = _complete(told, hints, _telling(path, own_tokenizers, tokenizers))
    tokenizers = own_tokenizers.replaced_by(tokenizers)
    if missing:
        usual = {} if found is None else found.usual
        known = ", ".join(f"{_FLAGS[name]} {usual[name]}" for name in missing if name in usual)
        raise ConfigError(
            f"{path} does not tell {', '.join(missing)}. Give {' '.join(missing.values())}, or the same fields in a JSON "
            f"file with --config{f' (the original code of this family uses {known})' if known else ''}."
        )
    config = ModelConfig.from_dict(fields, where=str(path))
    given = {name: fields[name] for name in (*_FLAGS, "unk_id")} | dict(hints)
    weights, problems = _convert(found, raw.weights, config)
    if problems:
        raise CheckpointError(
            f"the weights in {path} are not those of its configuration: {'; '.join(problems)}. Check --family, --config "
            "and that the file was saved completely."
        )
    odd = _check_vocabularies(tokenizers, config)
    notes = (*(found.notes if found else ()), *(odd if _toolkit(path) is None else ()))
    config, weights = _tie(config, weights)
    return Checkpoint(
        path=path,
        sha256=_sha256(path),
        family=NATIVE if found is None else found.name,
        config=config,
        weights=weights,
        tokenizers=tokenizers,
        given=given,
        notes=notes,
    )


def inspect_checkpoint(
    path: Path, hints: Mapping[str, Any], *, tokenizers: Tokenizers | None = None, family: str | None = None
) -> Inspection:
    """Tell what a checkpoint is without needing to know all of it.

    Raises:
        CheckpointError: the file cannot be read or is of no known family.
    """
    raw, found, told, own_tokenizers, _ = _read(path, family)
    fields, missing = _complete(told, hints, _telling(path, own_tokenizers, tokenizers))
    tokenizers = own_tokenizers.replaced_by(tokenizers)
    # The shapes of the weights depend on none of the fields that a file cannot tell, so any value serves to check them.
    stand_ins = {"n_heads": 1, "pad_id": 0, "bos_id": 0, "eos_id": 0}
    config = ModelConfig.from_dict({**fields, **{name: stand_ins[name] for name in missing}}, where=str(path))
    return Inspection(
        path=path,
        family=NATIVE if found is None else found.name,
        about="tfexport's own training checkpoint" if found is None else found.about,
        n_parameters=sum(tensor.numel() for tensor in raw.weights.values()),
        fields=fields,
        missing=missing,
        problems=tuple(_convert(found, raw.weights, config)[1]),
        vocabulary=tokenizers.source is not None or tokenizers.target is not None,
        notes=() if found is None else found.notes,
    )


def build_model(config: ModelConfig, weights: Mapping[str, Tensor]) -> Transformer | EncoderClassifier:
    """The canonical model with canonical `weights`, in evaluation mode."""
    with torch.device("meta"):  # no time on random numbers that the weights replace
        model = EncoderClassifier(config) if config.is_classifier else Transformer(config)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    return model.eval()


def _telling(path: Path, own: Tokenizers, given: Tokenizers | None) -> Tokenizers:
    """The tokenizers whose special tokens are the model's. Those of a folder need not be: its config says what is what."""
    return own.replaced_by(given) if _toolkit(path) is None else (given or Tokenizers(None, None))


def _read(
    path: Path, family: str | None, text: TextOptions | None = None
) -> tuple[RawCheckpoint, Family | None, dict[str, Any], Tokenizers, dict[str, Any]]:
    """The weights of a file or folder, and what it tells: see `_describe`. The last are fields that `text` tells."""
    toolkit = _toolkit(path)
    if toolkit is None:
        if text:
            raise ConfigError(
                f"{path} is not of a toolkit that knows languages: --src-lang, --tgt-lang and --prefix mean nothing. "
                "Leave them out."
            )
        raw = read_file(path)
        return raw, *_describe(path, raw, family), {}
    found = toolkit.read(path, text or TextOptions())
    if family not in (None, found.family.name):
        raise CheckpointError(f"{path} is of the family {found.family.name}, not {family}. Leave out --family.")
    return RawCheckpoint(found.weights), found.family, found.fields, found.tokenizers, found.given


def _toolkit(path: Path) -> Toolkit | None:
    return next((toolkit for toolkit in TOOLKITS if toolkit.recognises(path)), None)


def _sha256(path: Path) -> str:
    """Of a file, or of the sums, in hexadecimal, of the files that a toolkit's checkpoint lies in."""
    toolkit = _toolkit(path)
    if toolkit is None or list(files := toolkit.files(path)) == [path]:
        return file_sha256(path)
    return hashlib.sha256("".join(map(file_sha256, files)).encode()).hexdigest()


def _describe(path: Path, raw: RawCheckpoint, family: str | None) -> tuple[Family | None, dict[str, Any], Tokenizers]:
    """What the file tells: its foreign family (None when native), config fields and tokenizers."""
    if native.is_native(raw.metadata):
        if family not in (None, NATIVE):
            raise CheckpointError(f"{path} is of the family {NATIVE}, not {family}. Leave out --family.")
        config, tokenizers = native.read_description(path, raw.metadata)
        return None, config.to_dict(), tokenizers
    found = _named_family(path, raw, family) if family else next((f for f in FAMILIES if f.matches(raw.weights)), None)
    if found is None:
        raise CheckpointError(_no_family(path, raw.weights))
    try:
        return found, found.read_config(raw.weights), Tokenizers(None, None)
    except (KeyError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"a weight of {path} from which the sizes are read is missing or misshapen: {error}. Check that the file is "
            "complete."
        ) from error


def _named_family(path: Path, raw: RawCheckpoint, name: str) -> Family:
    versions = [known for known in FAMILIES if known.name == name]
    if not versions:
        raise CheckpointError(f"{path} cannot be read as {name!r}. Give --family one of: {_family_names()}.")
    named = next((version for version in versions if version.matches(raw.weights)), versions[-1])
    absent = [weight for weight in named.signature if weight not in raw.weights]
    if absent:
        raise CheckpointError(f"{path} is not of the family {name}: it has no {some(absent)}. Leave out --family.")
    return named


def _no_family(path: Path, weights: Mapping[str, Tensor]) -> str:
    def likeness(family: Family) -> tuple[int, float]:
        """Names that the family knows; among families that know none, how many words their names share."""
        theirs, ours = (_words(names) for names in (family.renames, weights))
        return sum(map(family.known, weights)), len(theirs & ours) / len(theirs | ours)

    nearest = max(FAMILIES, key=likeness)
    other = [name for name in weights if not nearest.known(name)]
    absent = [name for name in nearest.signature if name not in weights]
    advice = "Rename the weights to that family's names."
    if any(name.endswith("self_attn.in_proj_weight") for name in weights):
        advice = "These are layers of torch.nn.Transformer, which are not read yet: split in_proj into q, k and v."
    differs = [f"it has no {some(absent)}"] * bool(absent) + [f"the family has no {some(other, 6)}"] * bool(other)
    return (
        f"{path} is of no known family ({_family_names()}). Nearest is {nearest.name}, "
        f"{nearest.about}, which knows {len(weights) - len(other)} of its {len(weights)} names: {'; '.join(differs)}. "
        f"{advice}"
    )


def _family_names() -> str:
    return ", ".join(dict.fromkeys([*(family.name for family in FAMILIES), NATIVE]))


def _words(names: Iterable[str]) -> set[str]:
    return {word for name in names for word in name.split(".") if not word.isdecimal() and "{" not in word}


def _complete(
    told: Mapping[str, Any], hints: Mapping[str, Any], tokenizers: Tokenizers
) -> tuple[dict[str, Any], dict[str, str]]:
    """Config fields from the file, from the vocabularies and from the user, the later winning; flags for the missing."""
    # An unknown token is met only in text, which a vocabulary reads, and it then tells the id itself.
    fields: dict[str, Any] = {"unk_id": -1}
    sides = [side for side in (tokenizers.source, tokenizers.target) if side is not None]
    for kind in ("unk", "pad", "bos", "eos"):
        ids = {side.special_id(kind) for side in sides} - {None}
        if len(ids) == 1:
            fields[f"{kind}_id"] = ids.pop()
    fields = {**fields, **told, **hints}
    needed = ["n_heads", "pad_id", "bos_id", "eos_id"]
    if fields.get("n_classes"):  # a classifier needs bos and eos only where its input has them
        unused = {name for name in ("bos", "eos") if not fields[f"source_{name}"]}
        fields = {**{f"{name}_id": -1 for name in unused}, **fields}
    return fields, {name: f"{_FLAGS[name]} N" for name in needed if name not in fields}


def _convert(
    family: Family | None, weights: Mapping[str, Tensor], config: ModelConfig
) -> tuple[dict[str, Tensor], list[str]]:
    """Canonical float32 weights and all that is wrong with them, in the names of the file."""
    odd = [name for name, tensor in weights.items() if not _has_plain_numbers(tensor)]
    unexpected: list[str] = []
    # What is no number is told below, with all else that is wrong; until then its shape stands for it.
    converted = {
        name: torch.zeros(()).expand(tensor.shape) if name in odd else tensor.float()
        for name, tensor in weights.items()
    }
    if family is not None:
        converted, unexpected = family.convert(converted)
        converted = family.adjust(converted)
    for side, most in (("encoder", config.max_source_length), ("decoder", config.max_target_length)):
        name = f"{side}.positions.table"
        if (
            name in converted and converted[name].dim() and config.positions != "relative"
        ):  # the user may limit the lengths of a model with a longer table
            converted[name] = converted[name][: most + config.position_offset]
    with torch.device("meta"):
        model = EncoderClassifier(config) if config.is_classifier else Transformer(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def theirs(name: str) -> str:
        return name if family is None else family.foreign_name(name)

    missing = [theirs(name) for name in expected if name not in converted]
    unexpected += [theirs(name) for name in converted if name not in expected]
    shapes = [
        f"{theirs(name)} is {list(tensor.shape)}, not {list(expected[name])}"
        for name, tensor in converted.items()
        if name in expected and tuple(tensor.shape) != expected[name]
    ]
    bad = [theirs(name) for name, tensor in converted.items() if not tensor.isfinite().all()]
    problems = [
        f"{what}: {some(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshapen", shapes),
            ("not plain floating-point numbers", odd),
            ("NaN or infinite", bad),
        )
        if names
    ]
    return {} if problems else _unshared({name: converted[name].contiguous() for name in expected}), problems


def _has_plain_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout == torch.strided and not tensor.is_meta


def _unshared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors that share memory, such as a layer used twice: safetensors stores each name by itself."""
    seen: set[int] = set()
    for name, tensor in weights.items():
        address = tensor.untyped_storage().data_ptr()
        if address in seen:
            weights[name] = tensor.clone()
        seen.add(address)
    return weights


def _check_lengths(path: Path, told: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    if told.get("positions") == "relative":  # which go on for ever
        return
    for name in ("max_source_length", "max_target_length"):
        if name in hints and told["n_decoder_layers"] and hints[name] > told[name]:
            raise ConfigError(
                f"{path} has positions for a {name} of {told[name]}, not {hints[name]}. Give at most that."
            )


def _check_vocabularies(tokenizers: Tokenizers, config: ModelConfig) -> list[str]:
    """What is odd about the vocabularies of this model.

    Raises:
        ConfigError: a vocabulary has ids that the model lacks.
    """
    odd = []
    for side, tokenizer, size in (
        ("source", tokenizers.source, config.src_vocab_size),
        ("target", tokenizers.target, config.tgt_vocab_size),
    ):
        if tokenizer is not None and tokenizer.size > size:
            raise ConfigError(
                f"the {side} vocabulary has ids up to {tokenizer.size - 1}, the model's embedding has {size} rows. "
                "Give the vocabulary that this model was trained with."
            )
        if tokenizer is not None and tokenizer.size < size:
            odd.append(f"the {side} vocabulary has {tokenizer.size} words, the model's embedding {size} rows")
        for kind in ("unk", "pad", "bos", "eos"):
            theirs, ours = tokenizer and tokenizer.special_id(kind), getattr(config, f"{kind}_id")
            if theirs is not None and ours not in (theirs, -1):
                odd.append(f"{kind}_id is {ours}, the {side} vocabulary's own is {theirs}")
    return odd


def _tie(config: ModelConfig, weights: dict[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Store equal embedding matrices once. Only storage changes: the arithmetic reads the same numbers."""
    weights = dict(weights)
    source = weights["encoder.tokens.weight"]
    target = source if config.tie_source_target else weights.get("decoder.tokens.weight")
    if target is not None and not config.tie_source_target and torch.equal(source, target):
        del weights["decoder.tokens.weight"]
        config = config.replace(tie_source_target=True)
        target = source
    output = weights.get("output_weight")
    if output is not None and target is not None and torch.equal(output, target):
        del weights["output_weight"]
        config = config.replace(tie_output=True)
    return config, weights


def read_hints(path: Path) -> dict[str, Any]:
    """The `ModelConfig` fields of a JSON file.

    Raises:
        ConfigError: it is not a JSON object of such fields.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}. Give a JSON object.") from error
    known = [field.name for field in dataclasses.fields(ModelConfig)]
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} is not a configuration. Give a JSON object.")
    for name in fields:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=5, cutoff=0.4) or known
            raise ConfigError(f"{path} has an unknown field {name}. Use fields such as {', '.join(nearest)}.")
    return fields
