"""Arguments for the parameters of a user's `forward`, by their names: ids, lengths and masks in a convention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

MaskValues = Literal["hide", "keep", "add", "int"]
"""The values of a mask: True where a key is hidden, True where it is read, a number to add to scores, or 1 where
it is read."""
MaskAxes = Literal[2, 3, 4]
"""[queries, keys] and [batch, keys]; [batch, queries, keys]; [batch, 1, queries, keys]."""
Role = Literal["mask", "lengths", "tokens", "other"]

_TARGET = ("tgt", "trg", "target", "dec", "output")
_SOURCE = ("src", "source")
_CAUSAL = ("look", "causal", "subsequent", "future", "peak")
_OTHER = ("teacher", "ratio", "return", "train", "cache", "past", "state", "pos", "label", "epoch")


def role_of(name: str) -> Role:
    """The kind of value that a parameter of this name takes."""
    lower = name.lower()
    if "mask" in lower or "pad" in lower:
        return "mask"
    if "len" in lower:
        return "lengths"
    return "other" if any(word in lower for word in _OTHER) else "tokens"


def is_of_source(name: str) -> bool:
    """Whether a parameter of this name is about the source, and says so."""
    return any(word in name.lower() for word in _SOURCE)


def is_of_target(name: str) -> bool:
    """Whether a parameter of this name is about the target."""
    lower = name.lower()
    return not {"y", "tar"}.isdisjoint(lower.split("_")) or any(word in lower for word in _TARGET)


def of_tensorflow(name: str, names: Sequence[str]) -> str:
    """The name of a mask in PyTorch's terms. Beside a `look_ahead_mask` for the target, TensorFlow's tutorial has a
    `dec_padding_mask` for the keys of the source."""
    lower = name.lower()
    has_causal = any(word in other.lower() for other in names for word in _CAUSAL)
    return "src_padding_mask" if has_causal and "dec" in lower and "pad" in lower else name


@dataclass(frozen=True)
class Arguments:
    """Sources and targets, and what follows from them in a convention for masks."""

    src: Tensor
    """int64 [batch, src]"""
    tgt: Tensor
    """int64 [batch, tgt]"""
    pad: int
    values: MaskValues = "keep"
    axes: MaskAxes = 2

    def lengths(self, name: str) -> Tensor:
        """The lengths [batch] of the side of a name."""
        return (self._ids(name) != self.pad).sum(1)

    def mask(self, name: str) -> Tensor | None:
        """The mask for a parameter of this name; None for one of the memory, whose keys have a mask of their own."""
        lower = name.lower()
        # The transformers library calls a mask of padding `attention_mask`.
        is_padding = "pad" in lower or ("attention_mask" in lower and self.axes == 2)
        is_causal = not is_padding and self._is_of_target_attention(lower)
        if is_padding:
            keep = self._with_axes(self._ids(name) != self.pad)
        elif "memory" in lower:
            return None
        elif is_causal:
            length = self.tgt.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            keep = causal if self.axes == 2 else self._with_axes(self.tgt != self.pad) & causal
        elif self.axes == 2:
            keep = torch.ones(self.src.shape[1], self.src.shape[1], dtype=torch.bool)
        else:
            keep = self._with_axes(self.src != self.pad)
        if self.values == "add":
            return torch.zeros(keep.shape, dtype=torch.get_default_dtype()).masked_fill(~keep, -math.inf)
        return {"keep": keep, "hide": ~keep, "int": keep.long()}[self.values]

    def named(self, name: str) -> Any:
        """The argument for a name, whatever it takes."""
        return {"mask": self.mask, "lengths": self.lengths}.get(role_of(name), self._ids)(name)

    def _ids(self, name: str) -> Tensor:
        return self.tgt if is_of_target(name) else self.src

    def _is_of_target_attention(self, lower: str) -> bool:
        is_cross = "memory" in lower or "enc_dec" in lower or ("src" in lower and "tgt" not in lower)
        return not is_cross and any(word in lower for word in (*_TARGET, *_CAUSAL))

    def _with_axes(self, keep: Tensor) -> Tensor:
        """A mask of keys [batch, keys] with an axis for queries, and one for heads."""
        return {2: keep, 3: keep[:, None], 4: keep[:, None, None]}[self.axes]


class NamedBatch(dict[str, Any]):
    """The one argument of a `forward` that takes a batch: it has a tensor for every name."""

    def __init__(self, arguments: Arguments):
        super().__init__()
        self._arguments = arguments

    def __missing__(self, name: str) -> Any:
        return self._arguments.named(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor for a name that says what it is; else the default."""
        says = (
            role_of(name) in ("mask", "lengths") or is_of_source(name) or is_of_target(name) or "input" in name.lower()
        )
        return self[name] if says else default

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]
