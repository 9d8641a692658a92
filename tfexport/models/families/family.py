"""The description of a checkpoint family: a table of names, and the config fields that follow from its files.

A new family needs one file with a `FAMILY` and one line in the list of `models/checkpoints/recognise.py`. A user's own
family is the same file, given with `--family` (see `models/checkpoints/user_family.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.errors import CheckpointError
from tfexport.models.families.names import NameTemplate, has_leading_zero

SOURCE_ENDS = ("source_bos", "source_eos")
"""Fields that only sources of text need. If a family asks for them, a tokenizer with a template of its own answers."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A layout of checkpoints. Names contain `{i}` for the layer, `{p}` for `weight` or `bias`, `{h}` for the head, and
    `{3i+1}` if several modules of a layer follow each other in one list (see `NameTemplate`).

    If the foreign name has `{h}`, the tensors of all heads are joined along their first axis, in order. If a foreign name
    stands for several canonical names, such as a query, key and value in one matrix, its tensor is split into equal parts
    along its first axis.
    """

    name: str
    about: str
    """Description of the family, one line."""
    renames: Mapping[str, str | tuple[str, ...]]
    """Canonical name, or names, of each foreign name."""
    signature: tuple[str, ...]
    """Names that every checkpoint of the family has. No other family has all of them."""
    read_config: Callable[[Mapping[str, Tensor]], dict[str, Any]]
    """Function that returns the `ModelConfig` fields that follow from the weights, which have their foreign names."""
    ignored: tuple[str, ...] = ()
    """Foreign names that are not exported, such as buffers that are computed again; `*` stands for any text."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Canonical names that share the tensor of another canonical name. A key with `{i}` whose value has none stands for the
    names of all layers."""
    absent: tuple[str, ...] = ()
    """Prefixes of names that belong to a similar family. No checkpoint of this family has such names."""
    adjust: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda weights: weights
    """Arithmetic on the canonical weights, if new names alone do not make the models equal."""
    notes: tuple[str, ...] = ()
    """Changes of the result by `adjust`, for `inspect` and the manifest."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """Values of the family's own code for fields that no file contains. Messages suggest them; they are never assumed."""
    asked: tuple[str, ...] = ()
    """Fields that the files of this family lack, other than heads and special ids."""
    computed_positions: Callable[[int, int], Tensor] | None = None
    """Function that computes a position table [positions, d_model], if `positions` are `stored` and the file has none."""
    told_by_user: tuple[str, ...] = ()
    """Hints of the user that `fit` needs, other than the fields of `ModelConfig`."""
    reference: Callable[[Mapping[str, Tensor], ModelConfig], nn.Module] | None = None
    """Function that loads the weights, under their foreign names, into the module that they were trained in, for `tfexport
    probe`. The module maps `src_ids` [batch, src] and `tgt_ids` [batch, tgt], int64, padded with `pad_id`, to logits
    [batch, tgt, vocab]."""
    is_own: bool = False
    """Whether the family is of a user's family file. It may leave no arithmetic to the defaults of `ModelConfig`; set by
    `read_family_file`."""
    reference_as_told: bool = False
    """Whether `reference` uses the user's hints about the file, so that it cannot detect wrong hints."""

    def check_names(self) -> None:
        """Raise ValueError if a name has a placeholder that does not exist, or one twice."""
        templates = [*(template for pair in (*self._backward, *self._shared) for template in pair), *self._ignored]
        for template in templates:
            _ = template.placeholders
        canonical = [*(name for name, _ in self._backward), *(name for pair in self._shared for name in pair)]
        for template in canonical:
            if has_leading_zero(template.fill({"i": "1", "h": "1", "p": "weight"})):
                raise ValueError(
                    f"{template.text!r} has a number that begins with 0, and tfexport's own names have none"
                )

    def matches(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether these weights are of this family, complete or not."""
        return not self.lacking(weights) and not any(
            name.startswith(prefix) for name in weights for prefix in self.absent
        )

    def lacking(self, weights: Mapping[str, Tensor]) -> list[str]:
        """The names of the signature that these weights lack."""
        return [name for name in self.signature if name not in weights]

    def fit(self, weights: Mapping[str, Tensor], hints: Mapping[str, Any]) -> tuple[Family, dict[str, str]]:
        """The family fitted to weights with the user's own names, and the missing hints, each with its flag.

        `hints` has all hints of the user.
        """
        return self, {}

    def known(self, name: str) -> bool:
        """Whether a foreign name is in the family's table."""
        return bool(self.canonical_names(name)) or self.ignores(name)

    def ignores(self, name: str) -> bool:
        """Whether a foreign name is not exported."""
        return any(template.match(name) is not None for template in self._ignored)

    def canonical_names(self, name: str) -> tuple[str, ...]:
        """The canonical names of a foreign name, one per part; empty if the table does not contain it."""
        for template, targets in self._forward:
            if (values := template.match(name)) is not None:
                return tuple(target.fill(values) for target in targets)
        return ()

    def foreign_name(self, canonical: str) -> str:
        """The foreign name of a canonical name, for messages; `{h}` stays for the head."""
        canonical = self.shared_name(canonical) or canonical
        for template, source in self._backward:
            if (values := template.match(canonical)) is not None:
                return source.fill(values)
        return canonical

    def shared_name(self, canonical: str) -> str | None:
        """The canonical name whose tensor this name shares; None if it has its own tensor."""
        for template, other in self._shared:
            if (values := template.match(canonical)) is not None and (name := other.fill(values)) != canonical:
                return name
        return None

    def part(self, canonical: str) -> str:
        """The part of the foreign tensor that a canonical name stands for, for messages; empty for the whole tensor."""
        names = self.canonical_names(self.foreign_name(canonical))
        return f" (part {names.index(canonical) + 1} of {len(names)})" if canonical in names[len(names) == 1 :] else ""

    def convert(self, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """The weights under canonical names, with heads joined and parts split, and the names that the table lacks.

        Raises:
            CheckpointError: two foreign names have the same canonical name, and their numbers differ.
        """
        parts: dict[str, dict[int, tuple[str, Tensor]]] = defaultdict(dict)
        unexpected = []
        for name, tensor in weights.items():
            canonical_names = self.canonical_names(name)
            # A tensor that cannot be split stays whole; its shape is reported with all other problems.
            can_be_cut = tensor.dim() > 0 and len(tensor) >= len(canonical_names)
            cut = tensor.tensor_split(len(canonical_names)) if canonical_names and can_be_cut else [tensor]
            for canonical, piece in zip(canonical_names, cut, strict=False):
                other, same = parts[canonical].setdefault(self._head(name), (name, piece))
                if same is not piece and not torch.equal(same, piece):
                    raise CheckpointError(
                        f"{other} and {name} both are {canonical}, and their numbers differ. Name one of them in `ignored`."
                    )
            if not self.known(name):
                unexpected.append(name)
        joined = {}
        for canonical, heads in parts.items():
            tensors = [tensor for _, (_, tensor) in sorted(heads.items())]
            # If heads do not fit together, one of them is kept; its shape is reported with all other problems.
            alike = len({tensor.shape for tensor in tensors}) == 1
            joined[canonical] = torch.cat(tensors) if alike and len(tensors) > 1 else tensors[0]
        return joined, unexpected

    def _head(self, name: str) -> int:
        matches = (template.match(name) for template, _ in self._forward)
        values = next(values for values in matches if values is not None)
        return int(values.get("h", 0))

    @cached_property
    def _forward(self) -> list[tuple[NameTemplate, tuple[NameTemplate, ...]]]:
        return [
            (NameTemplate(foreign), tuple(map(NameTemplate, (names,) if isinstance(names, str) else names)))
            for foreign, names in self.renames.items()
        ]

    @cached_property
    def _backward(self) -> list[tuple[NameTemplate, NameTemplate]]:
        return [(canonical, foreign) for foreign, names in self._forward for canonical in names]

    @cached_property
    def _ignored(self) -> list[NameTemplate]:
        return [NameTemplate(name, wildcards=True) for name in self.ignored]

    @cached_property
    def _shared(self) -> list[tuple[NameTemplate, NameTemplate]]:
        return [(NameTemplate(name), NameTemplate(other)) for name, other in self.shared.items()]


def count_indices(weights: Mapping[str, Tensor], template: str) -> int:
    """Count the different numbers at the last placeholder of `template` in the names of `weights`.

    `count_indices(weights, "encoder.{i}.norm.weight")` is the number of layers.
    """
    parsed = NameTemplate(template)
    kind = list(parsed.placeholders)[-1]
    return len({values[kind] for name in weights if (values := parsed.match(name)) is not None})
