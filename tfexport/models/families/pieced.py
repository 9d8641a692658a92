"""Families whose tensors are given piece by piece, as `export --write-family` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tfexport.models.families.family import Family
from tfexport.models.pieces import Made, Piece
from tfexport.models.positions import COMPUTED

Row = tuple[str, int, tuple[int, int], tuple[int, int]]
"""The fields of a `Piece`."""


def pieced_family(
    *,
    name: str,
    about: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], float, Sequence[Row]]],
    same: Mapping[str, str],
    ignored: Sequence[str],
    computed_positions: str | None = None,
) -> Family:
    """A family of checkpoints with these very sizes.

    Args:
        config: all `ModelConfig` fields but special ids.
        tensors: for each canonical name the shape, a factor, and the pieces: the name of a weight in the file, the number
            of its first element, rows and columns, and the elements from one row and one column to the next.
        same: further names of weights that the file stores under several names.
        ignored: names that the model does not use.
        computed_positions: the kind of position tables (`--positions`) that no weight holds.
    """
    made = {
        canonical: Made(shape, factor, tuple(Piece(*row) for row in rows))
        for canonical, (shape, factor, rows) in tensors.items()
    }
    used = tuple(dict.fromkeys(piece.name for tensor in made.values() for piece in tensor.pieces))

    def adjust(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {canonical: tensor.of(weights).float() for canonical, tensor in made.items()}

    return Family(
        name=name,
        about=about,
        renames={**{weight: weight for weight in used}, **same},
        signature=used,
        read_config=lambda weights: dict(config),
        ignored=tuple(ignored),
        adjust=adjust,
        computed_positions=None if computed_positions is None else COMPUTED[computed_positions],
    )
