"""The settings of a checkpoint that its file does not hold: the user, a family's published code or a default gave them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tfexport.config import ModelConfig
from tfexport.confirmation import Confirmation
from tfexport.models.checkpoints.hints import is_same
from tfexport.models.families.family import Family
from tfexport.models.formats.native import Tokenizers

SHAPELESS = (
    *("n_heads", "norm_first", "activation", "embedding_scale", "norm", "norm_eps"),
    *("positions", "source_bos", "source_eos"),
)
"""Settings of the arithmetic that follow from no shape and no name of a weight. A family's code has them, and the code that
trained the checkpoint may have others."""

_SPECIAL = ("pad_id", "bos_id", "eos_id")

_NOT_ARITHMETIC = (
    *("max_source_length", "max_target_length", "dropout"),
    *("forced_first_id", "suppressed_ids", "suppressed_first_ids"),  # a user may choose them
    "unk_id",  # only text has unknown words, and the vocabulary then says their id
)

_LAYERS = ("src_embedding", "tgt_embedding", "output_layer")
"""Hints that say which weights belong to which layer."""


@dataclasses.dataclass(frozen=True)
class SettingSources:
    """The settings of a checkpoint, by source: its file, its family and the user."""

    family: Family | None
    """None for tfexport's own checkpoints."""
    fields: Mapping[str, Any]
    """`ModelConfig` fields from the file or its family."""
    defaults: Collection[str]
    """The fields that are a toolkit's defaults, because the file lacks them."""
    hints: Mapping[str, Any]
    """`ModelConfig` fields from the user."""
    layers: Mapping[str, Any]
    """The user's names of layers."""
    describes_itself: bool
    """Whether the file has settings: a toolkit's or tfexport's own."""

    def confirmation(self, settings: Mapping[str, Any], names: Iterable[str], tokenizers: Tokenizers) -> Confirmation:
        """Who confirms the settings.

        Args:
            settings: the resulting `ModelConfig` fields.
            names: the names of the weights in the file.
            tokenizers: the vocabularies, which confirm special ids.
        """
        config = {field.name for field in dataclasses.fields(ModelConfig)}
        doubted = {name for name in self.hints if name in config and self._is_only_given(name, settings)}
        doubted |= {*self.defaults} - {*_SPECIAL}  # a toolkit always uses the same ids
        if not self.describes_itself:
            doubted |= {name for name in SHAPELESS if not self._is_in_file(name, settings, names)}
        doubted -= {*_NOT_ARITHMETIC, *_confirmed_ids(settings, tokenizers)}
        order = [*SHAPELESS, *sorted(doubted - {*SHAPELESS, *_SPECIAL}), *_SPECIAL]
        unconfirmed = {name: settings[name] for name in order if name in doubted and name in settings}
        unconfirmed |= {name: self.layers[name] for name in _LAYERS if name in self.layers}
        about = "tfexport's own checkpoint" if self.family is None else self.family.about
        if self.describes_itself:
            return Confirmation(by="file", about=about, unconfirmed=unconfirmed)
        return Confirmation(unconfirmed=unconfirmed)

    def _is_only_given(self, name: str, settings: Mapping[str, Any]) -> bool:
        """Whether a field is the user's word alone: the file lacks it, or has another value that the user replaced."""
        return name not in self.fields or not is_same(settings.get(name), self.fields[name])

    def _is_in_file(self, name: str, settings: Mapping[str, Any], names: Iterable[str]) -> bool:
        """Whether a field of `SHAPELESS` follows from the weights of a file without settings."""
        if name == "n_heads":  # a matrix for each head, or a table with a column for each
            return name in self.fields
        if name == "positions" and self.family is not None:
            tables = (name for weight in names for name in self.family.canonical_names(weight))
            return settings.get(name) == "relative" or any(table.endswith(".positions.table") for table in tables)
        return False


def _confirmed_ids(settings: Mapping[str, Any], tokenizers: Tokenizers) -> set[str]:
    """The special ids that a vocabulary also has, and those that the model does not use."""
    sides = [side for side in (tokenizers.source, tokenizers.target) if side is not None]
    return {
        name
        for name in _SPECIAL
        if settings.get(name, -1) in {-1, *(side.special_id(name.removesuffix("_id")) for side in sides)}
    }
