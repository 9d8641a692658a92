"""Finds the modules of the canonical model and of the user's module that have the same weights, by a family's names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tfexport.models.families.family import Family
from tfexport.models.layers import Attention, PointwiseConv
from tfexport.models.model import EncoderClassifier
from tfexport.models.transformer import Transformer
from tfexport.verification.probe_weights import prefix_in

_LEAVES = (nn.Linear, PointwiseConv, nn.LayerNorm, nn.RMSNorm)

Model = Transformer | EncoderClassifier


@dataclass(frozen=True)
class Pair:
    """Modules with the same weights."""

    ours: str
    theirs: str
    part: int = 0
    parts: int = 1
    """The number of canonical modules that the user's module computes side by side."""
    whole: bool = False
    """The module is an attention that is compared as a whole, because its layers are not called one by one."""


def pairs_of(model: Model, user_module: nn.Module, family: Family, names: Sequence[str]) -> list[Pair]:
    """The modules of both models that have the same weights, by the names of the family."""
    prefix = prefix_in(user_module, names)
    if prefix is None:
        return []
    modules, known = dict(model.named_modules()), dict(user_module.named_modules(remove_duplicate=False))
    sources: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for canonical in family.canonical_names(name):
            sources[canonical].append(name)
    pairs = []
    for canonical, foreign in sources.items():
        path, owner = canonical.rpartition(".")[0], prefix + foreign[0].rpartition(".")[0]
        parts = family.canonical_names(foreign[0])
        is_leaf = isinstance(modules.get(path), _LEAVES) and foreign[0].endswith(".weight") and len(foreign) == 1
        if is_leaf and canonical.endswith(".weight") and owner in known:
            pairs.append(Pair(path, owner, parts.index(canonical), len(parts)))
    for path, module in modules.items():
        if isinstance(module, Attention):
            own = {
                name for canonical, renamed in sources.items() if canonical.startswith(f"{path}.") for name in renamed
            }
            attention = _owner(own, names)
            if attention is not None and prefix + attention in known:
                pairs.append(Pair(path, prefix + attention, whole=True))
    return pairs


def _owner(own: set[str], names: Sequence[str]) -> str | None:
    """The innermost module that has these weights and no others."""
    if not own:
        return None
    first, *others = (name.split(".")[:-1] for name in own)
    depth = next((n for n, word in enumerate(first) if any(other[n : n + 1] != [word] for other in others)), len(first))
    path = ".".join(first[:depth])
    return path if path and {name for name in names if name.startswith(f"{path}.")} == own else None
