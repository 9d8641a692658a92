"""`--write-family`: what was read from the user's module, as a family file that needs the module no longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfexport.config import ModelConfig
from tfexport.errors import CheckpointError, TfexportError
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.checkpoints.user_family import read_family_file
from tfexport.models.formats.state_dicts import some
from tfexport.models.live.read import LiveModel
from tfexport.models.pieces import Made
from tfexport.models.positions import COMPUTED

_NOT_OF_A_FAMILY = ("source_bos", "source_eos", "dropout", "tie_source_target", "tie_output")
"""Fields that the user gives for each checkpoint, or that follow from the weights."""

_TEXT = '''"""How tfexport reads checkpoints of {about}, without its code: tfexport export ckpt.pt --family {file}

Written by `tfexport export --write-family`, from a module that was compared with this reading.
"""

from tfexport import pieced_family

CONFIG = {{
{config}
}}

# By tfexport's name: shape, factor, and the pieces of your weights: name, first element, (rows, columns), and the elements
# from (one row, one column) to the next.
TENSORS = {{
{tensors}
}}

FAMILY = pieced_family(
    name={name!r},
    about={about!r},
    config=CONFIG,
    tensors=TENSORS,
    same={same},
    ignored={ignored},
    computed_positions={positions!r},
)
'''


def write_family(
    file: Path,
    live: LiveModel,
    names: Mapping[str, Sequence[str]],
    checkpoint: Path,
    about: str,
    hints: Mapping[str, Any],
) -> None:
    """Write a family file, and check that it reads the same model.

    Args:
        names: the names of each parameter and buffer of the module in the checkpoint.
        about: the name of the module.
        hints: special ids and lengths, to read the checkpoint again.

    Raises:
        CheckpointError: the module computes a weight, or the file reads another model.
    """
    missing = [name for name, made in live.made.items() if made is None or _lacks(made, names)]
    tables = [name for name in missing if name.endswith(".positions.table")]
    kind = _kind_of([live.weights[name] for name in tables])
    if computed := [name for name in missing if kind is None or name not in tables]:
        raise CheckpointError(
            f"no family file can describe {about}: its code computes {some(computed)}, which {checkpoint} does not hold. "
            "Leave out --write-family, and keep the code beside the checkpoint."
        )
    tensors = {
        name: (made.shape, made.factor, [(names[p.name][0], p.start, p.size, p.strides) for p in made.pieces])
        for name, made in live.made.items()
        if made is not None and name not in tables
    }
    used = {row[0] for _, _, rows in tensors.values() for row in rows}
    groups = [group for group in names.values() if group]
    config = {
        field.name: getattr(live.config, field.name)
        for field in fields(ModelConfig)
        if not field.name.endswith(("_id", "_ids")) and field.name not in _NOT_OF_A_FAMILY
    }
    text = _TEXT.format(
        about=about,
        file=file.name,
        name=Path(about.partition(":")[0]).stem,
        config=_lines(config),
        tensors=_lines(tensors),
        same={other: group[0] for group in groups if group[0] in used for other in group[1:]},
        ignored=sorted({name for group in groups if group[0] not in used for name in group}),
        positions=kind,
    )
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error}. Give another path with --write-family.") from error
    try:
        again = load_checkpoint(checkpoint, hints, family=read_family_file(file)).weights
    except TfexportError as error:
        file.unlink()
        raise CheckpointError(
            f"a family file does not read {checkpoint}: {error} Leave out --write-family, and report this."
        ) from error
    wrong = [
        name
        for name, tensor in again.items()
        if not torch.equal(tensor, live.weights[name])
        and not (name in tables and _is_rounded(tensor, live.weights[name]))
    ]
    if wrong:
        file.unlink()
        raise CheckpointError(
            f"a family file reads another {wrong[0]} from {checkpoint}. Leave out --write-family, and report this with the "
            "module's code."
        )


def _kind_of(tables: Sequence[Tensor]) -> str | None:
    """The kind of computed positions that all these tables [positions, d_model] are; None if they are of none."""
    for kind, compute in COMPUTED.items():
        if tables and all(_is_rounded(compute(*table.shape), table) for table in tables):
            return kind
    return None


def _is_rounded(table: Tensor, other: Tensor) -> bool:
    """Whether position tables differ by no more than rounding of their numbers, which are at most 1."""
    return torch.allclose(table, other, rtol=0, atol=2.0**-22)


def _lines(entries: Mapping[str, Any]) -> str:
    return "\n".join(f"    {name!r}: {value!r}," for name, value in entries.items())


def _lacks(made: Made, names: Mapping[str, Sequence[str]]) -> bool:
    """Whether a piece is of a tensor that the checkpoint does not have, such as a buffer that is not saved."""
    return any(not names.get(piece.name) for piece in made.pieces)
