"""The fields of a checkpoint that a user's own family file describes: from the file, from its names, and from the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from tfexport.models.checkpoints.convert import shown_by_names
from tfexport.models.checkpoints.hints import ARITHMETIC
from tfexport.models.families.family import SOURCE_ENDS, Family
from tfexport.models.families.torch_parts import refuse_positions
from tfexport.models.positions import COMPUTED


def with_computed_positions(family: Family, said: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The family and the user's hints, with positions of a kind that only `--positions` names as a stored table."""
    kind = said.get("positions")
    refuse_positions(kind, ("rotary", "rope", "alibi"))
    if not isinstance(kind, str) or kind == "sinusoidal" or kind not in COMPUTED:
        return family, dict(said)
    return replace(family, computed_positions=COMPUTED[kind]), {**said, "positions": "stored"}


def own_fields(
    family: Family, weights: Mapping[str, Tensor], fields: Mapping[str, Any], said: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of a user's own family, completed by those that its names show, and the fields that nobody says.

    No arithmetic is left to the defaults of `ModelConfig`.
    """
    known = {**fields, **said}
    is_classifier = bool(known.get("n_classes")) or known.get("n_decoder_layers") == 0
    shown = shown_by_names(family, weights, is_classifier=is_classifier)
    return {**shown, **fields}, tuple(name for name in (*ARITHMETIC, *SOURCE_ENDS) if name not in known)
