"""The module in its own types, after it was read in float64. What depends on the type shows only there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tfexport.models.float64 import InFloat64
from tfexport.models.live.call import WorkingCall
from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.ids import Ids
from tfexport.models.live.proof import largest_difference, logits_of
from tfexport.models.live.sequences import of_several_lengths
from tfexport.models.transformer import Transformer

_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.25, torch.bfloat16: 0.25}
"""Largest difference of a logit, relative to 1 + its size, by the narrowest type. Usual models stay below a tenth of it."""
_MOST_ROUNDING = 20
"""A module may differ from exact arithmetic by so many times as much as the canonical model in float32."""


class DependsOnType(NotCanonical):
    """The module computes something else in its own types than in float64."""


class Widened:
    """A module whose floating-point tensors are float64 until `restore`."""

    def __init__(self, module: nn.Module):
        self.module = module
        # Conversion to float64 gives a parameter new memory, unless it is float64 already.
        self.parameters: Mapping[str, Tensor] = {
            name: parameter.detach().clone() if parameter.dtype == torch.float64 else parameter.detach()
            for name, parameter in module.named_parameters()
        }
        """The parameters as they were."""
        self._states = [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]
        for part in module.modules():
            if isinstance(part, nn.RMSNorm) and part.eps is None:  # it depends on the type: that of the user's states
                part.eps = torch.finfo(torch.float32 if part.weight is None else part.weight.dtype).eps
            for name, value in vars(part).items():  # plain attributes too
                if isinstance(value, Tensor) and value.is_floating_point():
                    setattr(part, name, value.double())
        module.double()

    def restore(self) -> None:
        """Give the module its own tensors again, and drop what its forward kept in attributes meanwhile."""
        for part, attributes, buffers in self._states:
            vars(part).clear()
            vars(part).update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        for name, parameter in self.module.named_parameters():
            parameter.data = self.parameters[name]


class _NarrowestType(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notices the narrowest floating-point type of all results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.type = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dtype in _TOLERANCES and leaf.dtype.itemsize < self.type.itemsize:
                self.type = leaf.dtype
        return result


def doubts_in_own_types(call: WorkingCall, model: Transformer, returns: str, ids: Ids) -> dict[str, str]:
    """Compare a restored module with the canonical model, as the user's program runs it.

    Args:
        model: the canonical model with the checkpoint's weights, which become float32.

    Returns:
        What the comparison in float64 does not confirm: arithmetic in a narrower type than float32.

    Raises:
        DependsOnType: they differ by more than rounding.
    """
    error, mode = 0.0, _NarrowestType()
    for pairs in of_several_lengths(model, ids, call):
        try:
            with torch.no_grad(), mode, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of PyTorch about its fast path, which the user knows
                theirs = call.call(pairs.src, pairs.tgt)
        except Exception as failure:  # whatever the user's code raises
            # Code that caches tensors outside of the module has those of float64 now.
            return {"its own types": f"its forward fails in them now ({' '.join(str(failure).split())[:150]})"}
        with torch.no_grad(), InFloat64():
            exact = logits_of(model, returns, pairs)
        difference, _ = largest_difference(theirs, exact, pairs)
        if difference > _TOLERANCES[mode.type]:
            with torch.no_grad():
                rounded = logits_of(model.float(), returns, pairs)
            rounding, _ = largest_difference(rounded, exact, pairs)
            if difference > _MOST_ROUNDING * rounding:
                name = str(mode.type).removeprefix("torch.")
                raise DependsOnType(
                    f"in {name}, its logits differ by {difference:.1e} from those in float64, as with a branch on the type"
                )
        error = max(error, difference)
    if mode.type.itemsize < torch.float32.itemsize:
        name = str(mode.type).removeprefix("torch.")
        return {f"rounding of {name}": f"(logits to {error:.0e} from exact ones)"}
    return {}
