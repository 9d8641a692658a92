"""What a toolkit's reader gives: a checkpoint that says what it is, under the names of the toolkit."""

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
    """What the user says of texts; a model of many languages cannot know which are meant."""

    source_language: str | None = None
    target_language: str | None = None
    prefix: str = ""
    """Put before every source text, such as T5's name of a task."""

    def __bool__(self) -> bool:
        return self != TextOptions()


@dataclass(frozen=True)
class ToolkitCheckpoint:
    """A checkpoint read: a `Family` of its own, what its settings tell, and the weights under the family's names."""

    family: Family
    fields: dict[str, Any]
    """Of `ModelConfig`."""
    weights: dict[str, Tensor]
    tokenizers: Tokenizers = field(default_factory=lambda: Tokenizers(None, None))
    given: dict[str, Any] = field(default_factory=dict)
    """Fields that the user's languages tell."""
    assumed: tuple[str, ...] = ()
    """Fields that nothing tells, which have the toolkit's usual values; the user may give others."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """By side, source or target, whose vocabulary was not found: the note for a user who gives none."""
    generation: Mapping[str, Any] | None = None
    """How its library searches by itself, as `generation_config.json` has it."""


@dataclass(frozen=True)
class Toolkit:
    """How the checkpoints of a toolkit are known and read."""

    recognises: Callable[[Path], bool]
    """Whether what is at a path is of this toolkit, complete or not. It raises nothing."""
    read: Callable[[Path, TextOptions], ToolkitCheckpoint]
    """Raises CheckpointError, ConfigError or TokenizerError where something is missing, damaged or not supported."""
    files: Callable[[Path], Sequence[Path]]
    """The files that `read` takes the model from, which identify it."""


SIGMOID_GELU = 1.702
"""Marian's GELU is x * sigmoid(1.702 * x), the second approximation of Hendrycks and Gimpel (2016): Swish, if what goes in
is multiplied by this and what comes out divided."""

_NEVER = -100.0
"""The logit of a token that a toolkit does not have. Beside a best logit above -83 its probability is 0 in float32, so the
log-probabilities of all others are as if it were not there."""

LARGEST_TABLE = 2**26
"""Numbers in a table of positions that settings may ask for: 256 MiB, for 16384 tokens of a model of width 4096."""


def check_table(where: str, n_positions: int, d_model: int, least: int = 4) -> None:
    """Refuse to compute a table of positions [n_positions, d_model] of which settings tell sizes that no model has.

    Args:
        least: the smallest `d_model`; tensor2tensor's frequencies take two, of which each has a sine and a cosine.

    Raises:
        ConfigError: it would be too large, or has a size below the smallest.
    """
    if n_positions < 1 or d_model < least or n_positions * d_model > LARGEST_TABLE:
        raise ConfigError(
            f"{where} asks for a table of {n_positions} positions of {d_model} numbers, which no model has. Correct it."
        )


def require_matrices(weights: Mapping[str, Tensor], names: Iterable[str], where: str) -> None:
    """Raises CheckpointError where one of `names` is missing, or is no matrix."""
    for name in names:
        if name not in weights:
            raise CheckpointError(f"{where} has no {name}. Check that it was saved completely.")
        if weights[name].dim() != 2:
            raise CheckpointError(f"{where} has {name}, which is no matrix. Check that it was saved completely.")


def self_described(
    *,
    name: str,
    about: str,
    renames: Mapping[str, str | tuple[str, ...]],
    ignored: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Family:
    """The family of a checkpoint whose settings tell what it is: neither names nor sizes of its weights need to."""
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
    """Leave each different matrix of these once in `weights`, under the name of its first use.

    Args:
        source, target, output: names of the embeddings and of the output projection, each [vocab, d_model].

    Returns:
        The fields of `ModelConfig` that tell the vocabulary sizes and what is tied.
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
    """Whether any of the `layers`, a pattern of names of weights, has a bias; the others then get one of zeros.

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
    """Give the target one more token, the last, whose embedding is 0: for a decoder that begins with no token but zeros.

    It is never the next token, where it is suppressed: its logit is so low that the others' probabilities do not change.

    Args:
        matrices: the names of the target embedding and of the output projection, each once, [vocab, d_model].
        bias: the name of the output's bias [vocab], which there must be.
        sizes: vocabulary sizes and what is tied, as `tie` tells them; they grow too.

    Returns:
        Its id.
    """
    for name, value in (*((name, 0.0) for name in matrices), (bias, _NEVER)):
        tensor = weights[name]
        weights[name] = torch.cat([tensor, tensor.new_full((1, *tensor.shape[1:]), value)])
    sizes["tgt_vocab_size"] += 1
    sizes["src_vocab_size"] += sizes["tie_source_target"]
    return int(sizes["tgt_vocab_size"]) - 1


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and torch.equal(one, other))


def split_before(how: str) -> str:
    """The note of a model whose texts other programs split before words are looked up; `how` tells them."""
    return f"its texts are split by {how} first, and so must be the input of `decode` (codes of subword-nmt: --src-bpe)"


def not_read(arguments: Arguments, beginnings: tuple[str, ...], harmless: Collection[str]) -> tuple[str, ...]:
    """A note of options that begin like those of a model, where they lie among those of a training, and were not read."""
    names = [name for name in arguments.others(harmless) if name.startswith(beginnings)]
    return (f"{arguments.where} has options that were not read: {', '.join(names)}",) * bool(names)
