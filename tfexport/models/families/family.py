"""What a checkpoint family is: a table of names, and what its files say of the config.

Adding a family is one file with a `FAMILY` and one line in the list of `models/checkpoints/recognise.py`. A user's own
family is the same file, given with `--family` (see `models/checkpoints/user_family.py`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tfexport.config import ModelConfig

_PLACEHOLDERS = {"{i}": r"(?P<i>\d+)", "{h}": r"(?P<h>\d+)", "{p}": r"(?P<p>weight|bias)"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A layout of checkpoints. Names hold `{i}` for the layer, `{p}` for `weight` or `bias`, `{h}` for the head.

    Where the foreign name has `{h}`, the parts of all heads are joined along their first axis, in order. Where a foreign
    name stands for several canonical ones, such as a query, key and value in one matrix, it is cut into as many equal parts
    along its first axis.
    """

    name: str
    about: str
    """One line for people."""
    renames: Mapping[str, str | tuple[str, ...]]
    """Foreign name to canonical name, or names."""
    signature: tuple[str, ...]
    """Names that every checkpoint of the family has and no other family's has together."""
    read_config: Callable[[Mapping[str, Tensor]], dict[str, Any]]
    """The `ModelConfig` fields that the weights, under their foreign names, tell; what they cannot tell is left out."""
    ignored: tuple[str, ...] = ()
    """Foreign names that hold nothing to export, such as buffers computed again."""
    absent: tuple[str, ...] = ()
    """Beginnings of names that no checkpoint of this family has; they belong to a sibling."""
    adjust: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda weights: weights
    """Arithmetic on the canonical weights, where names alone do not make the models equal."""
    notes: tuple[str, ...] = ()
    """What `adjust` changes in the result, for `inspect` and the manifest."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """What the family's own code uses for fields that are in no file: told to the user, never assumed."""
    asked: tuple[str, ...] = ()
    """Fields that other families' files tell and these do not, beside heads and special ids."""
    computed_positions: Callable[[int, int], Tensor] | None = None
    """Computes a position table [positions, d_model] from its sizes, where `positions` are `stored` and a file has none."""
    told_by_user: tuple[str, ...] = ()
    """What `fit` takes from the user beside the fields of `ModelConfig`."""
    reference: Callable[[Mapping[str, Tensor], ModelConfig], nn.Module] | None = None
    """The weights, under their foreign names, in the module that they were trained in: for `tfexport probe`. Its forward
    takes `src_ids` [batch, src] and `tgt_ids` [batch, tgt], int64, padded with `pad_id`, to logits [batch, tgt, vocab]."""
    reference_as_told: bool = False
    """`reference` is made of what the user tells of the file, and so cannot find that wrong."""

    def matches(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether these weights are of this family, complete or not."""
        return not self.lacking(weights) and not any(
            name.startswith(prefix) for name in weights for prefix in self.absent
        )

    def lacking(self, weights: Mapping[str, Tensor]) -> list[str]:
        """The names of the signature that these weights do not have."""
        return [name for name in self.signature if name not in weights]

    def fit(self, weights: Mapping[str, Tensor], told: Mapping[str, Any]) -> tuple[Family, dict[str, str]]:
        """The family of just these weights, where names are the user's own; and what to ask for, each with its flag.

        `told` is what the user said of `told_by_user`.
        """
        return self, {}

    def known(self, name: str) -> bool:
        """Whether a foreign name is in the family's table."""
        return bool(self.canonical_names(name)) or self.ignores(name)

    def ignores(self, name: str) -> bool:
        """Whether a foreign name holds nothing to export."""
        return any(regex.fullmatch(name) for regex in self._ignored)

    def canonical_names(self, name: str) -> tuple[str, ...]:
        """The canonical names of a foreign one, one for each part; none where the table does not know it."""
        for regex, targets in self._forward:
            if match := regex.fullmatch(name):
                return tuple(_fill(target, match) for target in targets)
        return ()

    def foreign_name(self, canonical: str) -> str:
        """How the family writes a canonical name, for messages; `{h}` stays for the head."""
        for regex, source in self._backward:
            if match := regex.fullmatch(canonical):
                return _fill(source, match)
        return canonical

    def part(self, canonical: str) -> str:
        """Which part of its foreign tensor a canonical one is, for messages; nothing where it is all of it."""
        names = self.canonical_names(self.foreign_name(canonical))
        return f" (part {names.index(canonical) + 1} of {len(names)})" if canonical in names[len(names) == 1 :] else ""

    def convert(self, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """The weights under canonical names, heads joined and parts cut, and the names that the table does not know."""
        parts: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        unexpected = []
        for name, tensor in weights.items():
            canonical_names = self.canonical_names(name)
            # What cannot be cut is left as it is: its shape is reported with all else that is wrong.
            can_be_cut = tensor.dim() > 0 and len(tensor) >= len(canonical_names)
            cut = tensor.tensor_split(len(canonical_names)) if canonical_names and can_be_cut else [tensor]
            for canonical, piece in zip(canonical_names, cut, strict=False):
                parts[canonical].append((self._head(name), piece))
            if not self.known(name):
                unexpected.append(name)
        joined = {}
        for canonical, heads in parts.items():
            tensors = [tensor for _, tensor in sorted(heads, key=lambda part: part[0])]
            # Heads that do not fit together are left as one of them: its shape is reported with all else that is wrong.
            alike = len({tensor.shape for tensor in tensors}) == 1
            joined[canonical] = torch.cat(tensors) if alike and len(tensors) > 1 else tensors[0]
        return joined, unexpected

    def _head(self, name: str) -> int:
        matches = (regex.fullmatch(name) for regex, _ in self._forward)
        match = next(match for match in matches if match)
        return int(match.groupdict().get("h") or 0)

    @cached_property
    def _forward(self) -> list[tuple[re.Pattern[str], tuple[str, ...]]]:
        return [
            (_regex(foreign), (canonical,) if isinstance(canonical, str) else canonical)
            for foreign, canonical in self.renames.items()
        ]

    @cached_property
    def _backward(self) -> list[tuple[re.Pattern[str], str]]:
        return [
            (_regex(canonical), foreign)
            for (foreign, _), (_, names) in zip(self.renames.items(), self._forward, strict=True)
            for canonical in names
        ]

    @cached_property
    def _ignored(self) -> list[re.Pattern[str]]:
        return [_regex(name) for name in self.ignored]


def count_indices(weights: Mapping[str, Tensor], template: str) -> int:
    """How many different numbers stand at the last placeholder of `template` among the names of `weights`."""
    regex = _regex(template)
    placeholder = re.findall(r"{(\w)}", template)[-1]
    return len({match[placeholder] for match in map(regex.fullmatch, weights) if match})


def _regex(template: str) -> re.Pattern[str]:
    pieces = re.split(r"({\w})", template)
    return re.compile("".join(_PLACEHOLDERS.get(piece, re.escape(piece)) for piece in pieces))


def _fill(template: str, match: re.Match[str]) -> str:
    for key, value in match.groupdict().items():
        template = template.replace(f"{{{key}}}", value)
    return template
