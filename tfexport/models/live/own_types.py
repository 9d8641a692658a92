"""The module in its own types, after it was read in float64. What depends on the type shows only there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import chain, cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tfexport.models.dispatch import DispatchMode
from tfexport.models.float64 import InFloat64
from tfexport.models.live.call import WorkingCall
from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.ids import Ids
from tfexport.models.live.proof import largest_difference, logits_of
from tfexport.models.live.recording import eagerly
from tfexport.models.live.sequences import Pairs, of_several_lengths, random_pairs
from tfexport.models.transformer import Transformer

_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 0.25, torch.bfloat16: 0.25}
"""Largest difference of a logit by the narrowest type; see `largest_difference`."""
_MOST_ROUNDING = 20
"""A module may differ from exact arithmetic by so many times as much as the exported model in float32, if that is more."""


class DependsOnType(NotCanonical):
    """The module computes something else in its own types than in float64."""


class Widened:
    """A module whose floating-point tensors are float64 until `restore`."""

    def __init__(self, module: nn.Module):
        self.module = module
        # Conversion to float64 gives a parameter new memory, unless it is float64 already.
        self.named: Mapping[str, nn.Parameter] = dict(module.named_parameters())
        """The parameters by name. A forward may assign others to the module's attributes."""
        self.parameters: Mapping[str, Tensor] = {
            name: parameter.detach().clone() if parameter.dtype == torch.float64 else parameter.detach()
            for name, parameter in self.named.items()
        }
        """The parameters as they were."""
        self._states = [
            (part, dict(vars(part)), dict(part._buffers), dict(part._parameters)) for part in module.modules()
        ]
        for part in module.modules():
            if isinstance(part, nn.RMSNorm) and part.eps is None:  # it depends on the type: that of the user's states
                part.eps = torch.finfo(torch.float32 if part.weight is None else part.weight.dtype).eps
            for name, value in vars(part).items():  # plain attributes too
                if isinstance(value, Tensor) and value.is_floating_point():
                    setattr(part, name, value.double())
        module.double()

    def restore(self) -> None:
        """Give the module its own tensors again, and drop what its forward kept in attributes meanwhile."""
        for part, attributes, buffers, parameters in self._states:
            vars(part).clear()
            vars(part).update(attributes)
            for kept, before in ((part._buffers, buffers), (part._parameters, parameters)):
                kept.clear()
                kept.update(before)  # type: ignore[arg-type]
        for name, parameter in self.named.items():
            parameter.data = self.parameters[name]


class _NarrowestType(DispatchMode):
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
    """Compare a restored module with the model that is exported, as the user's program runs it.

    Args:
        model: the canonical model with the float32 weights of the export.

    Returns:
        What the comparison in float64 does not confirm, with the reason.

    Raises:
        DependsOnType: they differ by more than rounding.
    """
    error, gives_padding, mode = 0.0, False, _NarrowestType()
    try:
        long = (random_pairs(model, ids, call, [length], [length]) for length in _LONG)
        for pairs, context in zip(chain(of_several_lengths(model, ids, call), long), cycle(_CONTEXTS), strict=False):
            own, exact = _own(call, pairs, mode, context), _exact(model, returns, pairs)
            difference, _ = largest_difference(own, _rows_of(exact), pairs, returns)
            is_long = max(pairs.src.shape[1], pairs.tgt.shape[1]) >= min(_LONG)
            tolerance = max(_TOLERANCES[mode.type], _LONG_TOLERANCE if is_long else 0.0)
            if difference > tolerance and difference > _MOST_ROUNDING * _rounding(model, returns, pairs):
                raise DependsOnType(
                    f"in {_name(mode.type)}, its logits differ by {difference:.1e} from those of the export"
                )
            error = max(error, difference)
            gives_padding |= bool((exact.argmax(-1) == ids.pad)[pairs.is_real].any())
        doubts = {}
        if gives_padding and _hides_padding(call, model, returns, ids, mode):
            doubts["padding in outputs"] = "which the module hides from later tokens"
    except _Fails as failure:
        # Code that caches tensors outside of the module has those of float64 now.
        return {"its own types": f"its forward fails in them now ({failure})"}
    if mode.type.itemsize < torch.float32.itemsize:
        doubts[f"rounding of {_name(mode.type)}"] = f"(logits to {error:.0e} from exact ones)"
    return doubts


class _Fails(Exception):
    """The user's forward fails."""


_LONG = (64, 1024)
"""Further lengths of sources and targets."""
_LONG_TOLERANCE = 1e-2
"""The same for them: sinusoids that are computed in float32 have an error of 1e-4 at position 1,000."""
_CONTEXTS = (torch.no_grad, torch.inference_mode, torch.enable_grad)
"""Contexts in which people decode."""


def _own(call: WorkingCall, pairs: Pairs, mode: _NarrowestType, context: Callable[[], Any] = torch.no_grad) -> Tensor:
    """The result of the module in its own types."""
    try:
        with context(), eagerly(), mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch about its fast path, which the user knows
            return call.call(pairs.src, pairs.tgt).detach()
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise _Fails(" ".join(str(error).split())[:150]) from error


@torch.no_grad()
def _exact(model: Transformer, returns: str, pairs: Pairs) -> Tensor:
    with InFloat64():
        return logits_of(model, returns, pairs)


@torch.no_grad()
def _rounding(model: Transformer, returns: str, pairs: Pairs) -> float:
    """The largest difference of the exported model's own logits in float32."""
    exact = _exact(model, returns, pairs)
    rounded = logits_of(model, returns, pairs)
    form = "logits" if returns == "probabilities" else returns  # they have their logarithms already
    return largest_difference(rounded, _rows_of(exact), pairs, form)[0]


def _hides_padding(call: WorkingCall, model: Transformer, returns: str, ids: Ids, mode: _NarrowestType) -> bool:
    """Whether the module hides padding within a target, which the canonical model reads as any other token."""
    pairs = random_pairs(model, ids, call, [5], [5])
    pairs.tgt[:, 2:-1] = ids.pad
    exact = _exact(model, returns, pairs)
    difference, _ = largest_difference(_own(call, pairs, mode), _rows_of(exact), pairs, returns)
    return difference > _TOLERANCES[mode.type]


def _rows_of(logits: Tensor) -> Callable[[Tensor], Tensor]:
    return logits.flatten(0, 1).__getitem__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
