"""Computation of a float32 model in float64, the reference for rounding errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tfexport.models.dispatch import DispatchMode, line_of_user

_EXACT = (F.embedding,)
"""Functions that only copy numbers. Their results are widened, not the tables that they read."""
_CASTS = (Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16)


class InFloat64(TorchFunctionMode):
    """A mode in which every PyTorch function computes in float64, for tensors of any type.

    The model's weights are not copied: a linear layer widens its weights in parts, into one buffer of 8 MB. Other weights
    are widened for their use and then freed. A write into an existing tensor keeps the type of that tensor; the models here
    write nothing in place in this mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wide = torch.empty(_CHUNK, dtype=torch.float64)

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
        if getattr(func, "__name__", "") == "__get__":  # a property, such as a shape: no computation
            result = func(*args)
            return torch.float64 if isinstance(result, torch.dtype) and result.is_floating_point else result
        if func is F.linear:
            return self._rounded(self._linear(*args, **named))
        return self._rounded(func(*map(_widened, args), **{name: _widened(value) for name, value in named.items()}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear` in float64. The weights are widened part by part, into memory that stays in the processor's cache."""
        rows = max(1, _CHUNK // weight.shape[1])
        states = _widened(input)
        products = states.new_empty(*states.shape[:-1], len(weight))
        for start, part in zip(range(0, len(weight), rows), torch.split(weight, rows), strict=True):
            fits = part.numel() <= _CHUNK
            wide = self._wide[: part.numel()].view(part.shape).copy_(part) if fits else part.double()
            added = None if bias is None else bias[start : start + rows].double()
            products[..., start : start + rows] = F.linear(states, wide, added)
        return products

    def _rounded(self, result: Any) -> Any:
        return result


class WithRandomRounding(InFloat64):
    """A mode in which PyTorch computes in float64, with a random error of up to float32's unit roundoff in every result.
    It is one sample of the effect of rounding on a model (Monte Carlo arithmetic, Parker 1997).

    A float32 computation is also such a sample, but its rounding is always the same. Functions that only move numbers, such
    as a reshape, also round here. That increases the spread a little and never reduces it.
    """

    def __init__(self, seed: int):
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def _rounded(self, result: Any) -> Any:
        if not (isinstance(result, Tensor) and result.dtype == torch.float64):
            return result
        noise = torch.empty_like(result).uniform_(-(2.0**-24), 2.0**-24, generator=self._generator)
        return result.addcmul(result.nan_to_num(0.0, 0.0, 0.0), noise)


_CHUNK = 2**20
"""Number of matrix elements that are widened at once."""


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() and value.dtype != torch.float64 else value
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        widened = [_widened(item) for item in value]
        return type(value)(*widened) if hasattr(value, "_fields") else type(value)(widened)
    return value


_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Widening(DispatchMode):
    """A mode that computes in float64 where code requests a narrower type, and records the lines of that code.

    It is for modules of other authors, whose weights are already float64. Attention with a float32 softmax differs from
    exact arithmetic only by rounding. The difference would look like a small fault of the model, such as another epsilon.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, None] = {}
        """The lines that request a narrower type than float64, in order, such as `my_model.py, line 42`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if named.get("dtype") in _NARROW:
            self.places[line_of_user() or "the code"] = None
            named["dtype"] = torch.float64
        return func(*args, **named)


@contextmanager
def widened() -> Iterator[Widening]:
    """A context in which new floating-point tensors are float64; earlier tensors keep their types."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widening() as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)
