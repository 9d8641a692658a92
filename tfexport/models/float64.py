"""A float32 model computed in float64: what a rounding error is measured from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_EXACT = (F.embedding,)
"""Functions that only copy numbers: their results are widened where they are used, not the tables that they read."""
_CASTS = (Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16)


class InFloat64(TorchFunctionMode):
    """Within it every PyTorch function computes in float64, whatever the type of the tensors that it is given.

    A model needs no copy of its weights for that: each is widened where it is used and freed after it. So the memory that
    is needed on top is that of the largest matrix, and not twice the model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in _EXACT:
            return func(*args, **named)
        if func in _CASTS and isinstance(args[0], Tensor) and args[0].is_floating_point():
            return args[0].double()  # a cast to a narrower type would round
        return func(*map(_widened, args), **{name: _widened(value) for name, value in named.items()})


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() and value.dtype != torch.float64 else value
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        widened = [_widened(item) for item in value]
        return type(value)(*widened) if hasattr(value, "_fields") else type(value)(widened)
    return value
