"""The result of reading a checkpoint: a complete model, or a description with the settings that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tfexport.config import ModelConfig
from tfexport.confirmation import Confirmation
from tfexport.models.checkpoints.hints import unsplit
from tfexport.models.formats.native import Tokenizers
from tfexport.models.model import Model, build_model


@dataclass(frozen=True)
class Checkpoint:
    """A completely read model."""

    path: Path
    sha256: str
    family: str
    config: ModelConfig
    weights: dict[str, Tensor]
    """Float32 weights by canonical name."""
    tokenizers: Tokenizers
    given: dict[str, Any]
    """Fields that the user gave because the file lacks them. The same hints read the file again with the same result."""
    family_notes: tuple[str, ...] = ()
    """Notes for the user, such as a difference between the exported arithmetic and the family's own, and its size."""
    odd: tuple[str, ...] = ()
    """Notes about unusual vocabularies, which may belong to another model."""
    text: Mapping[str, Any] = field(default_factory=dict)
    """Options of text that the user gave; see `TextSettings` in `options.py`."""
    assumed: tuple[str, ...] = ()
    """Config fields that the user gave and the file lacks."""
    overridden: Mapping[str, Any] = field(default_factory=dict)
    """Config fields for which the user gave another value than the file or its family, with the value of the latter."""
    ignored: tuple[str, ...] = ()
    """Names of tensors that belong to no layer, according to the user."""
    generation: Mapping[str, Any] | None = None
    """Default search options of the model's library, from `generation_config.json`."""
    confirmation: Confirmation = field(default_factory=Confirmation)
    """Who confirms that the settings are those of the owner's code."""

    @property
    def notes(self) -> tuple[str, ...]:
        """All notes for the user."""
        return (*self.family_notes, *self.odd, *unsplit(self.tokenizers))

    def origin(self) -> dict[str, Any]:
        """The entry of a bundle's manifest that `bundle.reader.Origin` reads."""
        return {
            "file": self.path.name,
            "sha256": self.sha256,
            "family": self.family,
            "given": self.given,
            "text": dict(self.text),
            "notes": list(self.notes),
            "ignored": list(self.ignored),
            "confirmation": self.confirmation.to_dict(),
        }

    def build_model(self) -> Model:
        """The canonical model with these weights, in evaluation mode."""
        return build_model(self.config, self.weights)


@dataclass(frozen=True)
class Inspection:
    """The description of a checkpoint, from its file and the hints."""

    path: Path
    family: str
    about: str
    n_parameters: int
    fields: dict[str, Any]
    """Known `ModelConfig` fields."""
    missing: dict[str, str]
    """Unknown fields, each with the flag that gives it."""
    problems: tuple[str, ...]
    """Weights that are missing, unexpected or misshapen."""
    vocabulary: bool
    notes: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    """The names of tensors that the user said belong to no layer."""
    confirmation: Confirmation = field(default_factory=Confirmation)
    """Who confirms the known fields."""
