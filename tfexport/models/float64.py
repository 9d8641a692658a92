"""A float32 model computed in float64: what a rounding error is measured from."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_EXACT = (F.embedding,)
"""Functions that only copy numbers: their results are widened where they are used, not the tables that they read."""
_CASTS = (Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16)


class InFloat64(TorchFunctionMode):
    """Within it every PyTorch function computes in float64, whatever the type of the tensors that it is given.

    A model needs no copy of its weights for that: each is widened where it is used and freed after it. So the memory that
    is needed on top is that of a part of a matrix, and not twice the model. A write into a given tensor keeps the type of
    that tensor; the models here write none in place while they are in this mode.
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
        if getattr(func, "__name__", "") == "__get__":  # of a property, such as a shape: it computes nothing
            found = func(*args)
            return torch.float64 if isinstance(found, torch.dtype) and found.is_floating_point else found
        if func is F.linear and args[1].numel() > 2 * _CHUNK:
            return self._rounded(_large_linear(*args, **named))
        return self._rounded(func(*map(_widened, args), **{name: _widened(value) for name, value in named.items()}))

    def _rounded(self, result: Any) -> Any:
        return result


class WithRandomRounding(InFloat64):
    """Within it PyTorch computes in float64, and the result of every function is off by a random part of float32's unit
    roundoff: one sample of what rounding may do to a model (Monte Carlo arithmetic, Parker 1997).

    A float32 computation is one sample too, but its rounding is always the same. Functions that only move numbers, such as
    a reshape, round here too: that adds a little to the spread and takes nothing away.
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
"""Numbers of a matrix that are widened at once: buffers of some megabytes are used again, larger ones are mapped anew."""


def _large_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` in float64, the weights widened a part at a time."""
    states = _widened(states)
    rows = max(1, _CHUNK // weight.shape[1])
    products = torch.cat([F.linear(states, part.double()) for part in torch.split(weight, rows)], dim=-1)
    return products if bias is None else products + bias.double()


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() and value.dtype != torch.float64 else value
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        widened = [_widened(item) for item in value]
        return type(value)(*widened) if hasattr(value, "_fields") else type(value)(widened)
    return value


_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


class Widening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes in float64 what asks for a narrower type, and keeps the lines of code that asked.

    It is for modules of others, whose weights are float64 already. Attention that computes its softmax in float32 differs
    from exact arithmetic by rounding alone. That would look like a small fault of the model, such as another epsilon.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, None] = {}
        """`my_model.py, line 42` of each line that asks for a narrower type than float64, in order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if named.get("dtype") in _NARROW:
            self.places[_caller()] = None
            named["dtype"] = torch.float64
        return func(*args, **named)


def _caller() -> str:
    """The innermost line that is not of PyTorch or tfexport."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_OWN):
            return f"{Path(frame.filename).name}, line {frame.lineno}"
    return "the code"


@contextmanager
def widened() -> Iterator[Widening]:
    """Within it every floating-point number is float64, except in tensors that were made before."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widening() as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)
