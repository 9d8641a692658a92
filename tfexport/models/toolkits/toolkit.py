"""The result of a toolkit's reader: a checkpoint that describes itself, under the names of the toolkit."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError
from tfexport.models.families.family import Family
from tfexport.models.formats.native import Tokenizers
from tfexport.models.toolkits.arguments import Arguments


@dataclass(frozen=True)
class TextOptions:
    """The user's options for texts: a model of many languages needs to know the languages."""

    source_language: str | None = None
    target_language: str | None = None
    prefix: str = ""
    """Text before every source, such as T5's task prefix."""

    def __bool__(self) -> bool:
        return self != TextOptions()


@dataclass(frozen=True)
class ToolkitCheckpoint:
    """A read checkpoint: its own `Family`, the fields from its settings, and the weights under the family's names."""

    family: Family
    fields: dict[str, Any]
    """`ModelConfig` fields."""
    weights: dict[str, Tensor]
    tokenizers: Tokenizers = field(default_factory=lambda: Tokenizers(None, None))
    given: dict[str, Any] = field(default_factory=dict)
    """Fields that follow from the user's languages."""
    assumed: tuple[str, ...] = ()
    """Fields with the toolkit's default values, because the checkpoint lacks them. The user may give others."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Notes for a user who gives no vocabulary, by the side (source or target) whose vocabulary was not found."""
    generation: Mapping[str, Any] | None = None
    """Default search options of the model's library, from `generation_config.json`."""


@dataclass(frozen=True)
class Toolkit:
    """The functions that recognise and read the checkpoints of a toolkit."""

    recognises: Callable[[Path], bool]
    """Whether a file or folder is of this toolkit, complete or not. It never raises."""
    read: Callable[[Path, TextOptions], ToolkitCheckpoint]
    """Reads a checkpoint. It raises CheckpointError, ConfigError or TokenizerError if a part is missing, damaged or not
    supported."""
    files: Callable[[Path], Sequence[Path]]
    """The files that `read` reads the model from. They identify the model."""


SIGMOID_GELU = 1.702
"""Marian's GELU is x * sigmoid(1.702 * x), the second approximation of Hendrycks and Gimpel (2016). It is Swish with its
input multiplied by this number and its output divided by it."""

_NEVER = -100.0
"""The logit of an added token. If the best logit is above -83, its probability is 0 in float32, so it does not change the
log-probabilities of the other tokens."""

LARGEST_TABLE = 2**26
"""Maximum size of a position table that settings may request: 256 MiB, for 16384 tokens of a model of width 4096."""


def check_table(where: str, n_positions: int, d_model: int, least: int = 4) -> None:
    """Refuse to compute a position table [n_positions, d_model] with sizes that no model has.

    Args:
        least: minimum of `d_model`; tensor2tensor needs two frequencies, each with a sine and a cosine.

    Raises:
        ConfigError: the table would be too large, or a size is below the minimum.
    """
    if n_positions < 1 or d_model < least or n_positions * d_model > LARGEST_TABLE:
        raise ConfigError(
            f"{where} needs a table of {n_positions} positions of {d_model} numbers, which no model has. Correct it."
        )


def require_matrices(weights: Mapping[str, Tensor], names: Iterable[str], where: str) -> None:
    """Raise CheckpointError if one of `names` is missing, or is not a matrix."""
    for name in names:
        if name not in weights:
            raise CheckpointError(f"{where} has no {name}. Check that it was saved completely.")
        if weights[name].dim() != 2:
            raise CheckpointError(f"{where} has {name}, which is not a matrix. Check that it was saved completely.")


def self_described(
    *,
    name: str,
    about: str,
    renames: Mapping[str, str | tuple[str, ...]],
    ignored: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Family:
    """The family of a checkpoint that its settings describe, so that names and sizes of weights are not needed for it."""
    return Family(
        name=name,
        about=about,
        renames=renames,
        signature=(),
        read_config=lambda weights: {},
        ignored=ignored,
        notes=notes,
    )


def tie(weights: dict[str, Tensor], source: str, target: str, output: str) -> dict[str, Any]:
    """Keep each different matrix of these once in `weights`, under the name of its first use.

    Args:
        source, target, output: names of the embeddings and of the output projection, each [vocab, d_model].

    Returns:
        The fields of `ModelConfig` for vocabulary sizes and ties.
    """
    sizes = {"src_vocab_size": weights[source].shape[0], "tgt_vocab_size": weights[target].shape[0]}
    same_output = _equal(weights[output], weights[target])
    same_sides = _equal(weights[source], weights[target])
    if same_output:
        del weights[output]
    if same_sides:
        del weights[target]
    return {**sizes, "tie_source_target": same_sides, "tie_output": same_output}


def fill_biases(weights: dict[str, Tensor], layers: str) -> bool:
    """Whether any of the `layers`, a pattern of weight names, has a bias. The other layers then get a bias of zeros.

    Args:
        layers: a regular expression whose first group is the name without `weight`, such as `(.*linear/)weight`.
    """
    names = [match[1] for match in map(re.compile(layers).fullmatch, list(weights)) if match]
    if not any(f"{name}bias" in weights for name in names):
        return False
    for name in names:
        weights.setdefault(f"{name}bias", torch.zeros(weights[f"{name}weight"].shape[:1]))
    return True


def add_first_token(weights: dict[str, Tensor], matrices: Iterable[str], bias: str, sizes: dict[str, Any]) -> int:
    """Add a last target token whose embedding is 0, for a decoder that starts with zeros instead of a token.

    If it is suppressed, it is never generated. Its logit is so low that the other probabilities do not change.

    Args:
        matrices: names of the target embedding and of the output projection, each once, [vocab, d_model].
        bias: name of the output bias [vocab], which must exist.
        sizes: vocabulary sizes and ties, as `tie` returns them; the sizes grow by one.

    Returns:
        The id of the token.
    """
    for name, value in (*((name, 0.0) for name in matrices), (bias, _NEVER)):
        tensor = weights[name]
        weights[name] = torch.cat([tensor, tensor.new_full((1, *tensor.shape[1:]), value)])
    sizes["tgt_vocab_size"] += 1
    sizes["src_vocab_size"] += sizes["tie_source_target"]
    return int(sizes["tgt_vocab_size"]) - 1


def _equal(left: Tensor, right: Tensor) -> bool:
    return left is right or (left.shape == right.shape and torch.equal(left, right))


def split_before(how: str) -> str:
    """The note for a model whose texts other programs split before words are looked up; `how` names the programs."""
    return f"its texts are split by {how} first, and so must be the input of `decode` (codes of subword-nmt: --src-bpe)"


def not_read(arguments: Arguments, beginnings: tuple[str, ...], harmless: Collection[str]) -> tuple[str, ...]:
    """A note about unread options with the prefixes of model options, in files that mix them with training options."""
    names = [name for name in arguments.others(harmless) if name.startswith(beginnings)]
    return (f"{arguments.where} has options that were not read: {', '.join(names)}",) * bool(names)
