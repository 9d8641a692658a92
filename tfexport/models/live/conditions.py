"""Finds the lines where values are chosen by a condition on tokens or on states, such as `torch.where(src == 5, ...)`.

Such a condition is no part of the data flow that is read. Sequences that meet it may not be among those that are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tfexport.models.dispatch import DispatchMode, line_of_user
from tfexport.models.live.recording import Call, plain_operations
from tfexport.models.live.tape import LOOKUPS, MADE, MOVES


@dataclass(frozen=True)
class _Use:
    """A condition on tokens that changes states."""

    line: str
    value: Tensor


Kind = Literal["", "ids", "padding", "other", "state", "limit"]
"""The values that a tensor depends on: none that is followed; the ids as they are; perhaps padding alone; other ids than
padding; embeddings; a condition on states."""
_COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "isin"])


class _Conditions(DispatchMode):
    """A mode that follows ids, states, and conditions on either, by the memory of their tensors."""

    def __init__(self, pad: int, *ids: Tensor):
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: list[_Use] = []
        """Tensors that depend on the ids alone and change states, in order: masks of padding, and others."""
        self.on_tokens: dict[str, None] = {}
        """The lines where a condition on other ids than padding changes states."""
        self.on_states: dict[str, None] = {}
        """The lines where a condition on states changes states."""
        # Tensors are kept, so that no other gets the address of their memory.
        self._kinds: dict[int, tuple[Kind, Tensor]] = {self._key(tensor): ("ids", tensor) for tensor in ids}
        self._pad = pad

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _kind(self, tensor: Tensor) -> Kind:
        known = self._kinds.get(self._key(tensor))
        return known[0] if known is not None else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        operands = [(self._kind(leaf), leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kinds = {kind for kind, _ in operands}
        if name in MADE or not kinds - {""}:
            return result
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                kind = self._kind_of(name, made, operands, kinds, args)
                self._kinds[self._key(made)] = kind, made
        return result

    def _kind_of(
        self, name: str, made: Tensor, operands: Sequence[tuple[Kind, Tensor]], kinds: set[Kind], args: Any
    ) -> Kind:
        """The kind of a result. A use of a condition is noted."""
        if not made.is_floating_point():
            if kinds & {"state", "limit"}:
                return "limit"
            if "other" in kinds or (name in _COMPARISONS and "ids" in kinds and not self._is_padding(operands, args)):
                return "other"
            return "ids" if "ids" in kinds and (name in MOVES or made.dtype == torch.int64) else "padding"
        if "state" in kinds:
            line = line_of_user()
            self.on_states |= dict.fromkeys([line] if "limit" in kinds else [])
            self.on_tokens |= dict.fromkeys([line] if "other" in kinds else [])
            self.uses += [_Use(line, leaf.detach().clone()) for kind, leaf in operands if kind in ("ids", "padding")]
            return "state"
        if name in LOOKUPS and any(not kind and leaf.is_floating_point() for kind, leaf in operands):
            return "state"
        return next(kind for kind in ("limit", "other", "padding") if kind in kinds or kind == "padding")

    def _is_padding(self, operands: Sequence[tuple[Kind, Tensor]], args: Any) -> bool:
        """Whether ids are compared with the padding id, or with lengths."""
        constants = [leaf for kind, leaf in operands if not kind]
        numbers = [leaf for leaf in tree_leaves(args) if isinstance(leaf, int | float) and not isinstance(leaf, bool)]
        return any(number == self._pad for number in numbers) or any(bool((t == self._pad).all()) for t in constants)


def conditions_on(call: Call, src_ids: Tensor, tgt_ids: Tensor, pad: int) -> tuple[list[str], list[str]]:
    """The lines of the user's code where conditions on tokens, other than padding, and on states change states.

    Args:
        src_ids, tgt_ids: int64 [batch, length], without padding.
    """
    runs = []
    for padded in (False, True):
        pair = src_ids.clone(), tgt_ids.clone()
        if padded:
            for ids in pair:
                ids[1:, -2:] = pad
        with plain_operations(), _Conditions(pad, *pair) as mode:
            call(*pair)
        runs.append(mode)
    # A mask of padding differs between them. Random ids do not meet other conditions, or in the same places.
    same = [
        use.line
        for use, other in zip(runs[0].uses, runs[1].uses, strict=False)
        if use.value.shape == other.value.shape and torch.equal(use.value, other.value)
    ]
    return list(dict.fromkeys([*runs[0].on_tokens, *same])), list(runs[0].on_states)
